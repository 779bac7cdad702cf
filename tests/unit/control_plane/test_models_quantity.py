"""Quantities are compared by value, whatever their spelling."""

from __future__ import annotations

from decimal import Decimal

import pytest

from draftline_operator.models.quantity import canonical_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1000m", 1),
        ("4000m", 4),
        ("0.5", Decimal("0.5")),
        (1, 1),
        ("2048Mi", 2 * 2**30),
        ("8192Mi", 8 * 2**30),
        ("1.5Gi", 1_610_612_736),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 10**18),
        ("1G", 10**9),
        ("+3", 3),
        (".5", Decimal("0.5")),
        ("5.", 5),
        ("1Ki", 1024),
        ("100n", Decimal("1e-7")),
    ],
)
def test_a_quantity_has_the_value_that_the_api_server_reads(text: str | int, value: int | Decimal) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["1e9999999", "1e19", "-9223372036854775808", "9E999999999999999999"])
def test_what_the_api_server_would_cut_down_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too large"):
        parse_quantity(text)


@pytest.mark.parametrize(
    "text", ["", "1.5 Gi", "Gi", "1gi", "1KB", "one", "1.2.3", "1e", "0x10", "1 ", "1Gi\n", "--1", "∞", "NaN"]
)
def test_what_the_api_server_refuses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    "spellings",
    [
        ("1", "1000m", 1, "1.0", "1e0", "+1", "1000000u"),
        ("0.5", "500m", 0.5, ".5", "5e-1"),
        ("1.5Gi", "1536Mi", "1610612736", "1610612736000m"),
        ("1e3", "1k", "1000", 1000),
        ("1G", "1000M", "1e9"),
    ],
    ids=lambda spellings: str(spellings[0]),
)
def test_equal_values_share_one_spelling(spellings: tuple[str | int | float, ...]) -> None:
    assert len({canonical_quantity(spelling) for spelling in spellings}) == 1


def test_what_is_no_whole_number_is_rounded_up_to_thousandths() -> None:
    assert canonical_quantity("0.0001") == "1m"
    assert canonical_quantity("1.2345") == "1235m"
