"""Kubernetes quantities, compared by value: 1000m is 1, and 1.5Gi is 1610612736."""

from __future__ import annotations

import re
from decimal import Decimal

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_TOO_LARGE = Decimal(2**63)  # what the API server cuts quantities down to
# As the API server's own: a sign, digits with or without a fraction, then a suffix or an exponent.
PATTERN = r"^[+-]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
_QUANTITY = re.compile(r"^([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([KMGTPE]i|[numkMGTPE])|([eE][+-]?[0-9]+))?$")


def parse_quantity(text: str | int | float) -> Decimal:
    """The value of a quantity; raises ValueError for what the API server would refuse, too."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity, such as 500m, 1.5Gi or 2")
    number, suffix, exponent = match.groups()
    try:
        value = Decimal(number + (exponent or "")) * _SUFFIXES[suffix or ""]
    except ArithmeticError:
        value = _TOO_LARGE
    if abs(value) >= _TOO_LARGE:
        raise ValueError(f"{text!r} is too large")
    return value


def canonical_quantity(text: str | int | float) -> str:
    """The one spelling that all equal quantities share here: a whole number, else in thousandths."""
    value = parse_quantity(text)
    whole = value.to_integral_value()
    if value == whole:
        return str(int(whole))
    return f"{int((value * 1000).to_integral_value(rounding='ROUND_CEILING'))}m"
