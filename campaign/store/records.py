"""Request rows as plain values and back: what journals and Parquet share. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Final, get_args, get_origin, get_type_hints

from campaign.errors import StoreError
from campaign.store.row import SCHEMA_VERSION, RequestRow

_ALL: Final = get_type_hints(RequestRow)
HINTS: Final[dict[str, Any]] = {f.name: _ALL[f.name] for f in fields(RequestRow)}
"""Field -> type, in the order of `RequestRow`."""

_OPTIONAL: Final = frozenset(name for name, hint in HINTS.items() if type(None) in get_args(hint))
_LISTS: Final = frozenset(
    name for name, hint in HINTS.items() if tuple in {get_origin(h) for h in (hint, *get_args(hint))}
)
_REQUIRED: Final = frozenset(
    f.name for f in fields(RequestRow) if f.default is MISSING and f.default_factory is MISSING
)


def to_record(row: RequestRow) -> dict[str, Any]:
    """A row as plain JSON and Arrow values.

    A lone surrogate in text from a server has no UTF-8 form and becomes U+FFFD. Raises StoreError for a
    whole number that int64 cannot hold.
    """
    return {name: _plain(name, getattr(row, name)) for name in HINTS}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise StoreError(f"{name} = {value} does not fit 64 bits")
    return value


def to_row(record: Mapping[str, Any], place: str) -> RequestRow:
    """A row from plain values; columns of a newer campaign are left out.

    Raises StoreError naming `place` for another schema version or a missing value.
    """
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise StoreError(other_version(place, version))
    values: dict[str, Any] = {}
    for name in HINTS:
        value = record.get(name)
        if value is None and name not in _OPTIONAL:
            if name in _REQUIRED:
                raise StoreError(f"{place}: a request row has no {name}; the file is damaged or not ours")
            continue
        values[name] = tuple(value) if name in _LISTS and value is not None else value
    return RequestRow(**values)


def other_version(place: str, version: Any) -> str:
    """What to say about rows of another schema version."""
    return (
        f"{place}: rows of schema version {version}; this campaign reads version {SCHEMA_VERSION}. "
        "Fix: read it with the version that wrote it"
    )
