"""Names of children fit Kubernetes' limits and never meet."""

from __future__ import annotations

from draftline_operator.models import names

LONGEST = "n" * names.MAX_NAME_LENGTH
KEY = "0123abcd"


def test_the_longest_name_leaves_room_for_every_derived_one() -> None:
    derived = [
        names.serving_name(LONGEST),
        names.headless_service_name(LONGEST),
        names.config_map_name(LONGEST, KEY),
        names.preflight_name(LONGEST, KEY),
        names.pair_record_name(KEY),
    ]
    assert max(len(name) for name in derived) == 63


def test_a_hash_depends_on_the_content_and_not_on_the_order_of_keys() -> None:
    assert names.short_hash({"a": 1, "b": [1, 2]}) == names.short_hash({"b": [1, 2], "a": 1})
    assert names.short_hash({"a": 1, "b": [1, 2]}) != names.short_hash({"a": 1, "b": [2, 1]})
    assert len(names.short_hash({})) == names.KEY_LENGTH
