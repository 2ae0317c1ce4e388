"""Number and text types of the spec: each loads as meant, or is refused.

pydantic lets NaN, infinity, booleans and numeric text through its bounds in one version or another, so
the checks here are our own and do not depend on the library's.
"""

import math
import re
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(s|m|h|d)$")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _number(value: Any) -> Any:
    """Refuse what is not plainly a finite number: text, booleans, NaN, infinity, negative zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise ValueError("must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be finite")
    if isinstance(value, Decimal) and not value.is_finite():
        raise ValueError("must be finite")
    if value == 0 and str(value).startswith("-"):
        raise ValueError("must not be negative zero")
    return value


def _decimal(value: Any) -> Decimal:
    number = _number(value)
    return number if isinstance(number, Decimal) else Decimal(str(number))


def _integer(value: Any) -> int:
    number = _number(value)
    if not isinstance(number, int):
        raise ValueError("must be a whole number, written without a decimal point")
    return number


def _float(value: Any) -> float:
    return float(_number(value))


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("must be a duration such as 30s, 45m, 6h or 2d")
    return timedelta(seconds=float(match[1]) * _UNIT_S[match[2]])


_plain = PlainSerializer(lambda d: format(d.normalize(), "f"), return_type=str, when_used="json")

Usd = Annotated[Decimal, BeforeValidator(_decimal), Field(gt=0, le=1_000_000), _plain]
"""Money in dollars: a finite number above 0."""
UsdOrFree = Annotated[Decimal, BeforeValidator(_decimal), Field(ge=0, le=1_000_000), _plain]
"""Money in dollars, 0 allowed where a node is declared free."""
Hours = Annotated[Decimal, BeforeValidator(_decimal), Field(gt=0, le=720), _plain]
Fraction = Annotated[float, BeforeValidator(_float), Field(gt=0, lt=1)]
"""A share or relative difference: 0.02 is 2 %."""
Real = Annotated[float, BeforeValidator(_float)]
Positive = Annotated[float, BeforeValidator(_float), Field(gt=0)]
Count = Annotated[int, BeforeValidator(_integer), Field(ge=1, le=1_000_000)]
Natural = Annotated[int, BeforeValidator(_integer), Field(ge=0, le=1_000_000_000)]
Duration = Annotated[
    timedelta,
    BeforeValidator(_duration),
    PlainSerializer(lambda t: f"{t.total_seconds():g}s", return_type=str, when_used="json"),
]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,47}$", strict=True)]
Text = Annotated[str, Field(strict=True)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", strict=True)]
