"""Three short real runs in one store: what the later ones know of the earlier, and what compares them."""

import json

import pytest
from e2e_support import Campaign, spec_argv

from campaign.fleet import past
from campaign.report.assemble import assemble
from campaign.store.run import Run, open_run

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

TINY = (
    "ray.mode=inline", "workloads.health.n=2", "workloads.health.max_tokens=8", "anchor.boots=1", "anchor.between=false",
    "anchor.reference=store", "anchor.drift_delta=0.9", "pairs.aa.boots=2", "workloads.chat.n=3",
    "workloads.chat.max_tokens=8", "sessions.main.pairs=[aa]", "sessions.main.ladders=[]", "gates.boot_timeout=240s",
)  # fmt: skip
"""An A/A of two boots between two anchors: some 15 s on two quiet cores. Neighbours must not stop it."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaign, list[Run]]:
    campaign = Campaign(tmp_path_factory.mktemp("past"))
    for _ in range(3):
        done = campaign.run(*spec_argv("run", TINY))
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [open_run(p.parent) for p in (campaign.folder / "results").glob("*/ledger.db")]
    return campaign, sorted(runs, key=lambda r: r.events()[0].utc_ns)


def test_the_third_run_is_held_against_the_first_anchors_of_the_two_before(
    store: tuple[Campaign, list[Run]],
) -> None:
    _, runs = store
    first = [assemble(run).anchors[0] for run in runs]
    assert [a.position for a in first] == ["first"] * 3
    assert first[0].reasons == ("no_reference",)
    assert first[1].reasons == ("no_reference",)
    last = first[2]
    assert last.reference_ms is not None
    assert last.drift is not None
    assert last.lo is not None
    assert last.hi is not None
    assert last.lo < last.drift < last.hi
    # The session judged it by the same past as the report does.
    (said, *_) = (e.payload for e in runs[2].events() if e.type == "anchor_judged")
    assert said["reference_ms"] == pytest.approx(last.reference_ms)
    assert said["drift"] == pytest.approx(last.drift)
    one = past.earlier(runs[2].dir.root.parent, before_utc_ns=runs[2].events()[0].utc_ns, cpu=True)
    assert {r.run for r in one} == {runs[0].name, runs[1].name}


def test_boots_of_earlier_runs_stand_behind_the_verdicts_of_the_next(
    store: tuple[Campaign, list[Run]],
) -> None:
    _, runs = store
    reports = [assemble(run) for run in runs]
    assert reports[0].prior_runs == ()
    assert reports[2].prior_runs == (runs[0].name, runs[1].name)
    df = [next(v.df for v in r.verdicts if v.metric == "step_ms") or 0.0 for r in reports]
    boots = [next(v.boot_sd_source for v in r.verdicts if v.metric == "step_ms") for r in reports]
    assert boots == ["estimated"] * 3
    assert df[0] <= df[2]


def test_plan_says_which_runs_it_knows_the_variance_from(store: tuple[Campaign, list[Run]]) -> None:
    campaign, runs = store
    plan = campaign.json(*spec_argv("plan", TINY))
    assert {p["source"] for p in plan["power"]} == {"prior"}
    (said,) = [line for line in plan["assumptions"] if line.startswith("variance components")]
    assert "the same arms" in said
    assert all(run.name in said for run in runs)
    other = campaign.json(*spec_argv("plan", (*TINY, "arms.plain.threads=2")))
    (said,) = [line for line in other["assumptions"] if line.startswith("variance components")]
    assert "other arms on the same kind of node (CPU)" in said


def test_two_runs_compare_across_sessions_and_never_as_a_pair(store: tuple[Campaign, list[Run]]) -> None:
    campaign, runs = store
    found = campaign.json("compare", runs[0].name, runs[2].name)["across"]
    step = next(x for x in found if x["metric"] == "step_ms")
    assert step["matched_by"] == "hash"
    assert step["lo_these_sessions"] < step["ratio"] < step["hi_these_sessions"]
    assert step["session_sd_source"] in {"estimated", "unknown"}
    assert step["caveat"]


def test_verdicts_re_derive_in_every_run(store: tuple[Campaign, list[Run]]) -> None:
    campaign, runs = store
    for run in runs:
        checked = json.loads(campaign.run("verify", run.name, "--json").stdout)
        assert checked["differences"] == []
        assert checked["checked"] == checked["matched"] > 0
    table = campaign.run("report", runs[2].name)
    assert table.returncode == 0
