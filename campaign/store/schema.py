"""The one Arrow schema of request rows, derived from `RequestRow`.

Types never depend on the data: a column without values keeps its type, a whole number stays int64 to the
last digit, and files of every arm and run read as one table. Every column is nullable in Arrow; which
fields a row must have is the dataclass's business. Times stay integers of nanoseconds.
"""

import types
from collections.abc import Mapping
from typing import Any, Final, Literal, Union, get_args, get_origin

import pyarrow as pa

from campaign.errors import StoreError
from campaign.store.records import HINTS, other_version
from campaign.store.row import SCHEMA_VERSION

VERSION_KEY: Final = b"campaign.schema_version"
"""Key of the schema version in a file's metadata."""

_PLAIN: Final = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def _arrow_type(hint: Any) -> pa.DataType:
    origin = get_origin(hint)
    if origin is Literal:
        (kind,) = {type(value) for value in get_args(hint)}
        return _PLAIN[kind]
    if origin in {Union, types.UnionType}:
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return _arrow_type(inner)
    if origin is tuple:
        return pa.list_(_arrow_type(get_args(hint)[0]))
    return _PLAIN[hint]


ARROW_SCHEMA: Final[pa.Schema] = pa.schema(
    [pa.field(name, _arrow_type(hint)) for name, hint in HINTS.items()],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""One column for each field of `RequestRow`, in its order."""


def check_version(metadata: Mapping[bytes, bytes] | None, place: str) -> None:
    """Raise StoreError unless a file's metadata names the schema version of this campaign."""
    version = (metadata or {}).get(VERSION_KEY)
    if version is None:
        raise StoreError(f"{place}: not a file of request rows (no campaign.schema_version in its metadata)")
    if version != str(SCHEMA_VERSION).encode():
        raise StoreError(other_version(place, version.decode("utf-8", "replace")))


def conform(table: pa.Table, place: str) -> pa.Table:
    """The same rows under the fixed schema: known columns in order and type, unknown ones after them.

    A column that a foreign writer typed by its data (null, int for float) is cast exactly, or refused with
    StoreError; a known column that is missing is all null.
    """
    columns: list[Any] = []
    out: list[pa.Field] = []
    for known in ARROW_SCHEMA:
        index = table.schema.get_field_index(known.name)
        if index < 0:
            columns.append(pa.nulls(table.num_rows, known.type))
        else:
            column = table.column(index)
            try:
                columns.append(column.cast(known.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise StoreError(
                    f"{place}: column {known.name} is {column.type}, not {known.type}: {error}"
                ) from error
        out.append(known)
    for extra in table.schema:
        if extra.name not in ARROW_SCHEMA.names:
            columns.append(table.column(extra.name))
            out.append(extra)
    return pa.table(columns, schema=pa.schema(out))
