"""Whether an object still has what was applied, whatever others have added to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftline_operator.models.quantity import parse_quantity


def has_drifted(desired: Any, live: Any) -> bool:
    """True where something of `desired` is missing from `live` or different there.

    Items of a list of objects may come in any order and have others between them, as injected containers are.
    Quantities are compared by value. What is empty equals what is absent.
    """
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping):
            return bool(desired)
        return any(has_drifted(value, live.get(key)) for key, value in desired.items())
    if isinstance(desired, (list, tuple)):
        return _list_has_drifted(desired, live)
    if isinstance(desired, bool) or desired is None or live is None:
        return bool(desired) if live is None else desired != live
    return desired != live and not _are_same_quantity(desired, live)


def _list_has_drifted(desired: list[Any] | tuple[Any, ...], live: Any) -> bool:
    found = live if isinstance(live, (list, tuple)) else ()
    if any(isinstance(item, Mapping) for item in desired):
        return any(all(has_drifted(item, other) for other in found) for item in desired)
    return list(desired) != list(found)


def _are_same_quantity(desired: Any, live: Any) -> bool:
    try:
        return parse_quantity(desired) == parse_quantity(live)
    except ValueError:
        return False
