"""One schema for every file, whatever the data."""

import dataclasses
import json
import typing
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from campaign.errors import StoreError
from campaign.store import parquet
from campaign.store.parquet import CellNote
from campaign.store.records import to_record, to_row
from campaign.store.row import RequestRow
from campaign.store.schema import ARROW_SCHEMA, VERSION_KEY
from campaign.testing.conformance_store import CELL, make_row

CASE = Path(__file__).parents[1] / "data" / "cases" / "32_schema.json"
NOTE = CellNote("s", CELL, 0)
HINTS = typing.get_type_hints(RequestRow)
PLAIN = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bool: pa.bool_(),
    tuple[int, ...]: pa.list_(pa.int64()),
    tuple[str, ...]: pa.list_(pa.string()),
}


def test_schema_and_dataclass_agree():
    assert ARROW_SCHEMA.names == [f.name for f in dataclasses.fields(RequestRow)]
    for field in ARROW_SCHEMA:
        hint = HINTS[field.name]
        options = [a for a in typing.get_args(hint) if a is not type(None)]
        if typing.get_origin(hint) is typing.Literal:
            expected = pa.string() if isinstance(options[0], str) else None
        elif hint in PLAIN:
            expected = PLAIN[hint]
        elif typing.get_origin(options[0]) is typing.Literal:
            expected = pa.string()
        else:
            expected = PLAIN[options[0]]
        assert field.type == expected, field.name


def inferred(path, records, version=b"1", **columns):
    """A file as a writer without a schema would make it: types follow the data."""
    table = pa.Table.from_pylist(records)
    for name, array in columns.items():
        table = (
            table.set_column(table.schema.get_field_index(name), name, array)
            if name in table.column_names
            else table.append_column(name, array)
        )
    metadata = {} if version is None else {VERSION_KEY: version}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def test_batches_of_every_type_read_as_one_table(tmp_path):
    case = json.loads(CASE.read_text())
    paths = [inferred(tmp_path / f"{n}.parquet", batch) for n, batch in enumerate(case["batches"])]
    # The plain readers of such files fail, or change types.
    assert pq.read_schema(paths[0]).field("accept_len").type == pa.null()
    table = parquet.concat([parquet.load(p).table for p in paths])
    expect = case["expect"]
    assert {name: str(table.schema.field(name).type) for name in expect["types"]} == expect["types"]
    records = table.to_pylist()
    for batch, record in zip(case["batches"], records, strict=True):
        for name, value in batch[0].items():
            assert record[name] == value
    assert records[0]["seed"] == expect["seed_a_exact"]
    assert records[1]["seed"] is None
    assert [r["new_col"] for r in records] == [None, None, "x"]


def test_all_null_columns_keep_their_type(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write(path, [make_row(0, accept_pos=None, ttft_ms=None)], NOTE)
    in_file = pa.schema([f for f in ARROW_SCHEMA if f.name not in parquet.PARTITIONS])
    assert pq.read_schema(path).remove_metadata() == in_file
    parquet.write(path, [], NOTE)
    assert pq.read_schema(path).remove_metadata() == in_file
    assert parquet.load(path).table.schema.remove_metadata() == ARROW_SCHEMA.remove_metadata()


def test_the_path_speaks_for_the_cell(tmp_path):
    with pytest.raises(StoreError, match="does not belong"):
        parquet.write(tmp_path / "a.parquet", [make_row(0, session="t")], NOTE)


@pytest.mark.parametrize("version", [b"2", b"0", b"x"])
def test_another_schema_version_is_refused_with_its_place(tmp_path, version):
    path = inferred(tmp_path / "a.parquet", [to_record(make_row(0))], version=version)
    with pytest.raises(StoreError, match=r"a\.parquet.*version"):
        parquet.load(path)


def test_foreign_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(StoreError, match="not a file of request rows"):
        parquet.load(inferred(tmp_path / "a.parquet", [{"x": 1}], version=None))
    parquet.write(tmp_path / "b.parquet", [make_row(0)], NOTE)
    whole = (tmp_path / "b.parquet").read_bytes()
    for size in (0, 3, 50, len(whole) - 1):
        (tmp_path / "b.parquet").write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"b\.parquet"):
            parquet.load(tmp_path / "b.parquet")
    with pytest.raises(StoreError, match="cannot read"):
        parquet.load(tmp_path / "none.parquet")


def test_a_value_that_would_change_is_refused(tmp_path):
    for name, value in (("slot", 1.5), ("seed", "x"), ("ttft_ms", 2**53 + 1)):
        path = inferred(tmp_path / "a.parquet", [{**to_record(make_row(0)), name: value}])
        with pytest.raises(StoreError, match=f"column {name}"):
            parquet.load(path)


def test_columns_of_a_newer_campaign(tmp_path):
    record = {**to_record(make_row(0)), "new_col": "x"}
    loaded = parquet.load(inferred(tmp_path / "a.parquet", [record]))
    assert loaded.table.column_names[-1] == "new_col"
    assert loaded.rows() == [make_row(0)]


def test_a_row_without_a_needed_value_is_refused(tmp_path):
    record = to_record(make_row(0))
    del record["seed"]
    loaded = parquet.load(inferred(tmp_path / "a.parquet", [record]))
    with pytest.raises(StoreError, match=r"row 1: .* no seed"):
        loaded.rows()


def test_other_versions_and_new_fields_in_a_journal():
    record = to_record(make_row(0))
    assert to_row({**record, "new": 1}, "x") == make_row(0)
    with pytest.raises(StoreError, match="x: rows of schema version 2"):
        to_row({**record, "schema_version": 2}, "x")


def test_numbers_beyond_64_bits_are_refused_before_they_are_journalled():
    with pytest.raises(StoreError, match="64 bits"):
        to_record(make_row(0, seed=2**63))


INT = st.integers(-(2**63), 2**63 - 1)
VALUES = {
    int: INT,
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    bool: st.booleans(),
    tuple[int, ...]: st.lists(INT, max_size=3).map(tuple),
    tuple[str, ...]: st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=3).map(
        tuple
    ),
}


def values(hint):
    if hint in VALUES:
        return VALUES[hint]
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    (inner,) = (a for a in typing.get_args(hint) if a is not type(None))
    return st.none() | values(inner)


FIXED = {"schema_version": 1, "session": NOTE.session, "group": NOTE.group}
ROWS = st.builds(
    RequestRow,
    **{name: st.just(FIXED[name]) if name in FIXED else values(hint) for name, hint in HINTS.items()},
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=30,
    deadline=None,
)
@given(st.lists(ROWS, max_size=3))
def test_any_row_survives_parquet_and_json(tmp_path, rows):
    parquet.write(tmp_path / "a.parquet", rows, NOTE)
    assert parquet.load(tmp_path / "a.parquet").rows() == rows
    assert [to_row(json.loads(json.dumps(to_record(r))), "x") for r in rows] == rows
