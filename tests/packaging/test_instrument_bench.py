"""The benchmark's table and targets, from a result of known numbers; and the page has a place for them."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_instrument", ROOT / "bench" / "instrument.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape(**kw):
    row = {
        "cpu_us_per_chunk": 14.0, "lag_p50_us": 5.0, "lag_p99_us": 40.0, "ttft_err_ms": 0.1, "rate_err_pct": 0.01,
        "rss_mb": 60.0, "lost": 0, "merged": 0, "user_lag_p99_us": 3000.0,
    }  # fmt: skip
    return {**row, **kw}


def result(**ours):
    streams = {"32": shape(), "256": shape(), "1000": shape(lag_p99_us=80.0)}
    campaign = {"version": "1", "chunks_per_cpu_s": 300_000, "streams": streams, "loaded_256": shape()}
    campaign |= {"selfcheck": {"start_err_p99_us": 1500.0}, **ours}
    peer = {"version": "2", "chunks_per_cpu_s": 110_000, "streams": {"256": None}, "reasons": ["256: broke"]}
    machine = {"cpu": "x", "cores": 2, "kernel": "k", "python": "3", "load1_before": 0.1, "command": "c"}
    server = {"ceiling_chunks_per_s": 60_000, "jitter_p99_us": 90.0}
    return {"machine": machine, "server": server, "clients": {"campaign": campaign, "peer": peer}}


def test_targets_are_judged_by_the_numbers(bench):
    met = {what: ok for what, _, ok in bench.targets(result())}
    assert len(met) == 9
    assert {what for what, ok in met.items() if not ok} == {
        "3 times the best peer",
        "lag p50 at most 20 us, p99 50 us, 1,000 streams",
        "start error p99 at most 1,000 us at 200 requests/s",
    }


def test_the_page_is_replaced_between_its_marks(bench, tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "INSTRUMENT.md").read_text())
    before = page.read_text()
    bench.write(page, result())
    once = page.read_text()
    bench.write(page, result())
    assert page.read_text() == once
    head, _, rest = once.partition(bench.BEGIN)
    assert before.startswith(head)
    assert before.endswith(rest.partition(bench.END)[2])
    assert "| peer | 2 | 110,000 | 256 | did not run | - |" in once
    assert "- peer: 256: broke" in once
    assert "| 3 times the best peer | 2.7 times peer | no |" in once


def test_a_page_without_a_place_is_refused(bench, tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(SystemExit):
        bench.write(tmp_path / "page.md", result())


def test_the_command_is_kept_without_its_paths(bench):
    argv = ["--json", "/tmp/x.json", "--venvs", "/tmp/v", "--repeats", "3", "--markdown", "p"]
    assert bench.command(argv) == ["--json", "FILE", "--repeats", "3"]
