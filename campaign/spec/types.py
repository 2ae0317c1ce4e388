"""Number and text types of the spec: each loads as meant, or is refused.

The loader hands every YAML scalar over as written (`Scalar`), so a field's type decides what it is:
`24.10` is text in a text field and 24.1 in a number field, `no` is Norway in a text field and false in a
boolean one. The checks are our own: pydantic lets NaN, infinity, booleans and numeric text through its
bounds in one version or another.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any, NoReturn, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

VARIABLE = r"^\$\{[A-Za-z_][A-Za-z0-9_]*\}$"
"""A whole scalar taken from the environment: allowed wherever a value is."""

_NUMBER = re.compile(r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$")
_DURATION = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(s|m|h|d)$")
_UNIT_US = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_LONGEST_DAYS = 30
_LONGEST_NUMBER = 40


class Scalar(str):
    """A YAML scalar as written; `plain` says that it stood without quotes."""

    __slots__ = ("plain",)
    plain: bool

    def __new__(cls, text: str, *, plain: bool = True) -> Self:
        """Build from the text between the quotes, escapes resolved."""
        self = super().__new__(cls, text)
        self.plain = plain
        return self


def refuse(why: str, fix: str) -> NoReturn:
    """Raise what the loader turns into a problem with file, line, field and value."""
    raise PydanticCustomError("campaign", "{why}", {"why": why, "fix": fix})


def _core(read: Callable[[Any], Any], write: Callable[[Any], Any] | None = None) -> CoreSchema:
    dump = None
    if write is not None:
        dump = core_schema.plain_serializer_function_ser_schema(write, when_used="json")
    return core_schema.no_info_plain_validator_function(read, serialization=dump)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number with bounds, read exactly.

    Accepted as YAML writes it in decimal (`40`, `0.05`, `5e-2`, `1e3`); refused are quotes, booleans,
    NaN, infinity, negative zero, leading zeros, signs before zero, `_` between digits, hex, octal and
    sexagesimals. Integers take no decimal point (`3.0` is refused, `1e3` is 1000).
    """

    of: type[int] | type[float] | type[Decimal]
    example: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    places: int | None = None
    """Most decimals; money is whole micro-dollars."""
    fraction: bool = False
    """Values from 1 to 100 are taken for a percentage, and the fix says the fraction."""

    def read(self, value: Any) -> int | float | Decimal:
        """The number, or PydanticCustomError."""
        number = self._written(value) if isinstance(value, Scalar) else self._native(value)
        if not number.is_finite():
            refuse("must be finite", self._such_as())
        if number.is_zero() and number.is_signed():
            refuse("must not be negative zero", "write 0")
        if number and not -_LONGEST_NUMBER < number.adjusted() < _LONGEST_NUMBER:
            refuse("is out of range", self._such_as())
        self._bounds(number)
        if self.places is not None and number != round(number, self.places):
            refuse(f"has more than {self.places} decimals", f"round it to {self.places} decimals")
        if self.of is int:
            return int(number)
        if self.of is float:
            real = float(number)
            if number and not real:
                refuse("is too small to be told from 0", self._such_as())
            return real
        return number

    def _such_as(self) -> str:
        kind = "a whole number" if self.of is int else "a number"
        return f"write {kind} such as {self.example}"

    def _written(self, text: Scalar) -> Decimal:
        if not text.plain:
            refuse("is text, and a number belongs here", "remove the quotes")
        low = text.lower()
        if low.lstrip("+-") in {".nan", ".inf", "nan", "inf", "infinity"}:
            refuse("must be finite", self._such_as())
        if low in _BOOLEANS:
            refuse("is a boolean, and a number belongs here", self._such_as())
        if len(text) > _LONGEST_NUMBER:
            refuse("is out of range", self._such_as())
        if not _NUMBER.match(text):
            self._almost(text)
        number = Decimal(text)
        if self.of is int and ("." in text or number != number.to_integral_value()):
            refuse("must be a whole number", "write it without a decimal point")
        return number

    def _almost(self, text: str) -> NoReturn:
        """Refuse what one YAML version or another reads as a number, with what was probably meant."""
        if re.fullmatch(r"[+-]?[0-9][0-9_]*(_[0-9]+)+(\.[0-9]+)?", text):
            refuse("has `_` between its digits", f"write {text.replace('_', '')}")
        if re.fullmatch(r"0[0-9]+", text):
            refuse(
                "has a leading zero, which is octal in one YAML version and decimal in the next",
                f"write {int(text)}",
            )
        if re.fullmatch(r"0[xob][0-9a-fA-F]+", text):
            refuse("is not decimal", f"write {int(text, 0)}" if _parses(text) else self._such_as())
        if re.fullmatch(r"[0-9]+(:[0-9]{1,2})+(\.[0-9]+)?", text):
            refuse("is a time of day or a base-60 number", self._such_as())
        if re.fullmatch(r"\+[0-9.]+([eE][+-]?[0-9]+)?", text):
            refuse("has a plus sign", f"write {text[1:]}")
        if re.fullmatch(r"-?\.[0-9]+", text):
            refuse("has no digit before the point", f"write {text.replace('.', '0.')}")
        if re.fullmatch(r"-?[0-9]+\.", text):
            refuse("has no digit after the point", f"write {text[:-1]}")
        if re.fullmatch(r"\$?[0-9.]+ ?(\$|usd|USD)?", text):
            refuse("has a currency", f"write {text.strip('$ usdUSD')}")
        if re.fullmatch(r"[0-9.]+ ?%", text):
            refuse("is a percentage", "write the fraction: 0.05 for 5 %")
        refuse("must be a number", self._such_as())

    def _native(self, value: Any) -> Decimal:
        if isinstance(value, bool):
            refuse("is a boolean, and a number belongs here", self._such_as())
        if isinstance(value, Decimal):
            number = value
        elif isinstance(value, float):
            if not math.isfinite(value):
                refuse("must be finite", self._such_as())
            number = Decimal(repr(value))
        elif isinstance(value, int):
            if value.bit_length() > 128:  # turning a huge int to text would raise
                refuse("is out of range", self._such_as())
            number = Decimal(value)
        else:
            refuse("must be a number", self._such_as())
        if self.of is int and not isinstance(value, int):
            refuse("must be a whole number", "write it without a decimal point")
        return number

    def _bounds(self, number: Decimal) -> None:
        if self.fraction and 1 <= number <= 100:
            refuse(
                "must be a fraction between 0 and 1, not a percentage",
                f"write {float(number) / 100:g} for {float(number):g} %",
            )
        for limit, bad, words in (
            (self.gt, self.gt is not None and number <= self.gt, "above"),
            (self.ge, self.ge is not None and number < self.ge, "at least"),
            (self.lt, self.lt is not None and number >= self.lt, "below"),
            (self.le, self.le is not None and number > self.le, "at most"),
        ):
            if bad:
                refuse(f"must be {words} {limit:g}", self._such_as())

    def _write(self, value: int | float | Decimal) -> int | float:  # noqa: PYI041 - int stays int
        if isinstance(value, Decimal):
            return int(value) if value == value.to_integral_value() else float(value)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _core(self.read, self._write)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        number: dict[str, Any] = {"type": "integer" if self.of is int else "number"}
        bounds = {
            "exclusiveMinimum": self.gt,
            "minimum": self.ge,
            "exclusiveMaximum": self.lt,
            "maximum": self.le,
        }
        number |= {key: limit for key, limit in bounds.items() if limit is not None}
        return {"anyOf": [number, {"type": "string", "pattern": VARIABLE}], "examples": [float(self.example)]}


def _parses(text: str) -> bool:
    try:
        int(text, 0)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Boolean:
    """`true` or `false`; `yes`, `no`, `on`, `off` mean the same. Quoted words are refused."""

    def read(self, value: Any) -> bool:
        """The boolean, or PydanticCustomError."""
        if isinstance(value, bool):
            return value
        if isinstance(value, Scalar):
            if not value.plain:
                refuse("is text, and a boolean belongs here", "remove the quotes")
            if value.lower() in _BOOLEANS:
                return _BOOLEANS[value.lower()]
        refuse("must be a boolean", "write true or false")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _core(self.read)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        words = {"type": "string", "pattern": f"^(?:[Yy]es|YES|[Nn]o|NO|[Oo]n|ON|[Oo]ff|OFF)$|{VARIABLE}"}
        return {"anyOf": [{"type": "boolean"}, words]}


@dataclass(frozen=True, slots=True)
class Written:
    """Text as written in the file: `24.10`, `010`, `no` and `695e0514` stay what they are."""

    pattern: str | None = None
    fix: str = "write text"
    empty: bool = False

    def read(self, value: Any) -> str:
        """The text, or PydanticCustomError."""
        if not isinstance(value, str):
            refuse("must be text", self.fix if value is not None else "write text, or quote the word: 'null'")
        text = str.__str__(value)
        if not text and not self.empty:
            refuse("is empty", self.fix)
        if any(ord(c) < 32 and c not in "\n\t" for c in text) or "\x7f" in text:
            refuse("holds a control character", "remove it")
        if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
            refuse("is not valid Unicode", "save the file, or set the variable, as UTF-8")
        if self.pattern is not None and not re.fullmatch(self.pattern, text):
            refuse(f"does not look right (pattern {self.pattern})", self.fix)
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _core(self.read)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if self.pattern is None:
            # An editor's own YAML parser may see a number where the loader keeps the text.
            return {"type": ["string", "number", "boolean"]}
        return {"type": "string", "pattern": f"^(?:{self.pattern})$|{VARIABLE}"}


@dataclass(frozen=True, slots=True)
class Span:
    """A duration with its unit. Bare numbers and clock times are refused."""

    def read(self, value: Any) -> timedelta:
        """The duration, or PydanticCustomError."""
        such_as = "write a number and a unit: 30s, 45m, 6h or 2d"
        if isinstance(value, timedelta):
            return value
        if not isinstance(value, str):
            refuse("must be a duration", such_as)
        match = _DURATION.match(value)
        if match is None or len(value) > _LONGEST_NUMBER:
            if re.fullmatch(r"[0-9]+(:[0-9]{1,2})+", value):
                such_as = f"{such_as} ({value} could be minutes or hours)"
            elif re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
                such_as = f"write {value}s for seconds, {value}m for minutes"
            refuse("must be a duration with a unit", such_as)
        micros = Decimal(match[1]) * _UNIT_US[match[2]]
        if micros > _LONGEST_DAYS * _UNIT_US["d"] or micros <= 0:
            refuse(f"must be above 0 and at most {_LONGEST_DAYS} days", such_as)
        if micros != micros.to_integral_value():
            refuse("is finer than a microsecond", such_as)
        return timedelta(microseconds=int(micros))

    def _write(self, value: timedelta) -> str:
        seconds = Decimal(value // timedelta(microseconds=1)) / 1_000_000
        return f"{seconds.normalize():f}s"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _core(self.read, self._write)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "pattern": f"{_DURATION.pattern}|{VARIABLE}", "examples": ["45m", "6h"]}


Usd = Annotated[Decimal, Number(Decimal, "40", gt=0, le=1_000_000, places=6)]
"""Money in dollars: a finite number above 0."""
UsdOrFree = Annotated[Decimal, Number(Decimal, "2.50", ge=0, le=1_000_000, places=6)]
"""Money in dollars, 0 allowed where a node is declared free."""
Seconds = Annotated[float, Number(float, "0.5", ge=0, le=1e9)]
"""A time after the start of something, in seconds."""
Hours = Annotated[Decimal, Number(Decimal, "1.5", gt=0, le=720, places=6)]
Fraction = Annotated[float, Number(float, "0.05", gt=0, lt=1, fraction=True)]
"""A share or relative difference: 0.02 is 2 %."""
Positive = Annotated[float, Number(float, "12.5", gt=0, le=1e9)]
Temperature = Annotated[float, Number(float, "0.6", ge=0, le=2)]
Share = Annotated[float, Number(float, "0.95", gt=0, le=1)]
"""A share that may be the whole."""
Count = Annotated[int, Number(int, "4", ge=1, le=1_000_000)]
Natural = Annotated[int, Number(int, "1", ge=0, le=1_000_000_000)]
One = Annotated[int, Number(int, "1", ge=1, le=1)]
Flag = Annotated[bool, Boolean()]
Duration = Annotated[timedelta, Span()]
Name = Annotated[
    str,
    Written(
        r"[a-z][a-z0-9_-]{0,47}",
        fix="start with a small letter; go on with small letters, digits, - or _; at most 48",
    ),
]
Text = Annotated[str, Written()]
AnyText = Annotated[str, Written(empty=True)]
"""Text that may be empty: an environment value, an argument."""
Sha256 = Annotated[str, Written(r"[0-9a-f]{64}", fix="write 64 small hex digits, as `sha256sum` prints")]
