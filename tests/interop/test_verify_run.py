"""`verify` on an ordinary run: every printed number follows, and a changed one is found."""

import json

import pytest

from campaign.report.assemble import assemble
from campaign.report.files import write
from campaign.store.run import open_run
from campaign.testing.sample_run import sample_run


@pytest.fixture
def sample(tmp_path):
    run_dir = sample_run(tmp_path)
    write(assemble(open_run(str(run_dir.root))), run_dir)
    return run_dir


def test_everything_follows_and_one_changed_number_is_named(sample, call):
    found = call("verify", sample.root, "--json")
    assert found["differences"] == []
    assert found["checked"] == found["matched"] > 1000
    page = json.loads(sample.report_json.read_text())
    page["verdicts"][0]["ratio"] *= 1.001
    page["anchors"][0]["step_ms"] = 1.0
    sample.report_json.write_text(json.dumps(page))
    found = call("verify", sample.root, "--json", code=1)
    v = page["verdicts"][0]
    fields = [d["field"] for d in found["differences"]]
    assert fields == ["anchors[0].step_ms", f"verdicts[{v['session']}/{v['pair']}/{v['metric']}].ratio"]
    assert all(d["file"] == "report.json" for d in found["differences"])


def test_cells_of_an_ordinary_run(sample, call):
    cells = call("cells", sample.root, "--json")
    assert {"file", "arm", "cell", "n", "accept_len", "step_ms", "rate_definition"} <= set(cells[0])
    for c in cells:
        if c["accept_len"] is not None:
            assert c["decode_tok_s_agg"] == pytest.approx(1000 * c["accept_len"] / c["step_ms"])
