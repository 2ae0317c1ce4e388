"""A file is never trusted: an error with its place, or kept and marked."""

import contextlib
import json

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaign.cli import cli
from campaign.errors import CampaignError
from campaign.interop import brl11, imported
from campaign.interop.verify import cells
from campaign.store.run import open_run

K5 = ("arms", "A0_anchor_k5", "cells", "tool_nothink_10k")


def at(data, *path):
    for key in path:
        data = data[key]
    return data


@pytest.fixture
def written(tmp_path):
    def write(data, name="stage.json"):
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda d: d.pop("arms"), "arms"),
        (lambda d: d.update(schema_version=2), "schema_version"),
        (lambda d: d.update(arms=7), "arms"),
        (lambda d: d.update(campaign=None), "campaign"),
        (lambda d: d.update(arms={"A": {"error": "died"}}), "arms"),
        (lambda d: at(d, *K5)["rows"][3].update(slot=2), "rows[3]"),
        (lambda d: at(d, *K5)["rows"][3].pop("slot"), "rows[3].slot"),
        (lambda d: at(d, *K5)["rows"][1].update(tok_s=-4), "rows[1].tok_s"),
        (lambda d: at(d, *K5)["rows"][1].update(tok_s="fast"), "rows[1].tok_s"),
        (lambda d: at(d, *K5)["rows"][1].update(tok_s=True), "rows[1].tok_s"),
        (lambda d: at(d, *K5)["rows"][1].update(dr=1.5), "rows[1].dr"),
        (lambda d: at(d, *K5)["rows"][1].update(pp_raw={"0": 3, "2": 1}), "rows[1].pp_raw"),
        (lambda d: at(d, *K5).update(rows={"0": 1}), "rows"),
        (lambda d: d["arms"].update({"../../evil": d["arms"]["A1_nospec"]}), "arms"),
    ],
)
def test_errors_name_the_place(stage, written, change, place):
    change(stage)
    path = written(stage)
    with pytest.raises(brl11.ImportProblem) as error:
        brl11.read(path)
    assert place in str(error.value)
    assert "stage.json" in str(error.value)
    assert "Fix:" in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "text", ['{"campaign": "x", "arms": {"A": {"cells": {"c": {"rows": [{"slot": 0', "", "[]", "7"]
)
def test_truncated_or_foreign_json(written, text):
    with pytest.raises(brl11.ImportProblem):
        brl11.read(written(text))


def test_a_cut_file_says_the_line(stage, written):
    whole = json.dumps(stage, indent=1)
    path = written(whole[: len(whole) // 2])
    with pytest.raises(
        brl11.ImportProblem, match=r"stage\.json:\d+: file: is not JSON at line \d+, column \d+"
    ):
        brl11.read(path)


@pytest.mark.parametrize(
    "text", ['{"campaign": NaN, "arms": {}}', '{"campaign": "a", "campaign": "b", "arms": {}}']
)
def test_nan_and_double_keys(written, text):
    with pytest.raises(brl11.ImportProblem):
        brl11.read(written(text))


def test_a_missing_file(tmp_path):
    with pytest.raises(brl11.ImportProblem, match="No such file"):
        brl11.read(tmp_path / "none.json")


def test_what_is_odd_is_kept_and_marked(stage, written, tmp_path):
    cell = at(stage, *K5)
    cell["rows"].reverse()
    cell["tau"] = None
    cell["rows"][0]["tok_s"] = None
    stage["arms"]["A4_k6"].pop("cells")
    stage["arms"]["A5_k7"]["cells"]["tool_nothink_10k"]["n"] = 9
    read = brl11.read(written(stage))
    marks = "\n".join(read.marks)
    for said in (
        "out of order",
        "incomplete",
        "A4_k6: no cells",
        "says 9, there are 8 rows",
        "A2_ngram_k5: no cells",
    ):
        assert said in marks
    imported.write([read], tmp_path / "into")
    run = open_run(str(tmp_path / "into"))
    found = {(c["arm"], c["cell"]): c for c in cells(run)}
    assert found["A0_anchor_k5", "tool_nothink_10k"]["n"] == 7
    assert found["A0_anchor_k5", "tool_nothink_10k"]["tau_as_published"] > 4
    void = [r for r in run.requests(valid_only=False).rows() if r.validity == "void"]
    assert [(r.slot, r.state) for r in void] == [(7, "incomplete")]


def test_two_files_of_one_name_and_a_full_folder_are_refused(stage, written, tmp_path):
    path = written(stage)
    read = brl11.read(path)
    with pytest.raises(CampaignError, match="two files are called stage"):
        imported.write([read, read], tmp_path / "twice")
    result = CliRunner().invoke(cli, ["import", "brl11", str(path), "--into", str(tmp_path)])
    assert isinstance(result.exception, CampaignError)
    assert "something is there already" in str(result.exception)


def test_a_later_change_of_the_kept_statistics_is_found(stage, written, tmp_path):
    imported.write([brl11.read(written(stage))], tmp_path / "into")
    kept = tmp_path / "into" / "published" / "stage.json"
    kept.write_text(kept.read_text().replace("403.2", "503.2"))
    with pytest.raises(CampaignError, match="not the file the ledger committed"):
        cells(open_run(str(tmp_path / "into")))


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=_junk, where=st.sampled_from(["top", "arms", "arm", "cell", "rows", "row"]))
def test_whatever_stands_there_is_read_or_refused(written, junk, where):
    row = {"slot": 0, "ctok": 9, "tok_s": 3.0, "ttft_ms": 1.0}
    data = {"campaign": "x", "arms": {"A": {"cmd": "", "cells": {"c": {"rows": [row]}}}}}
    if where == "top":
        data = junk
    elif where == "arms":
        data["arms"] = junk
    elif where == "arm":
        data["arms"]["A"] = junk
    elif where == "cell":
        data["arms"]["A"]["cells"]["c"] = junk
    elif where == "rows":
        data["arms"]["A"]["cells"]["c"]["rows"] = junk
    else:
        data["arms"]["A"]["cells"]["c"]["rows"][0] = junk
    read = None
    with contextlib.suppress(brl11.ImportProblem):
        read = brl11.read(written(data))
    assert read is None or any(c.rows for a in read.arms for c in a.cells)
