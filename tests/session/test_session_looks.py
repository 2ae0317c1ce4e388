"""Early stops on a virtual clock: looks between rounds and inside them, ladders, forecasts, and what resume makes of it."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from session_rig import Rig, all_rounds, rig

from campaign.analysis.conclude import conclude
from campaign.analysis.looks import Stop
from campaign.client.base import Job
from campaign.engines.base import Counters
from campaign.errors import EngineError
from campaign.ledger.events import Event
from campaign.ledger.state import fold
from campaign.plan.model import CampaignPlan
from campaign.report.further import further
from campaign.spec.load import load
from campaign.store.folder import FolderStore
from campaign.store.row import RequestRow

LADDER = lambda g: g.kind == "ladder"  # noqa: E731  # a filter with a name


def arm_of(job: Job) -> str:
    return job.base_url.rsplit("/", 1)[1]


def steps(ratios: dict[str, float]) -> Callable[[Job], float]:
    """10 ms, a third of a percent apart by request; times what the arm is told."""

    def step_ms(job: Job) -> float:
        spread = 1 + 0.01 * (crc32(job.request_id.encode()) % 7 - 3) / 3
        return 10 * spread * ratios.get(arm_of(job), 1.0)

    return step_ms


def paired(tmp_path: Path, ratio: float, *sets: str, boot_sd: float = 0.005, **more: Any) -> Rig:
    it = rig(
        tmp_path, "pairs.kv.boots=6", "workloads.chat.n=8", f"statistics.boot_sd.step_ms={boot_sd}", *sets,
        keep=lambda g: g.name == "pair.kv", **more,
    )  # fmt: skip
    it.client.step_ms = steps({"kv.b": ratio})
    return it


def events(it: Rig) -> list[Event]:
    """The agent's journal as a ledger merges it."""
    return [
        Event(i, i, e.type, "agent:main", i, e.session, e.payload, "", "")
        for i, e in enumerate(it.events(), start=1)
    ]


def concluded(it: Rig, *sets: str) -> tuple[Any, Any, list[RequestRow]]:
    state = fold(events(it))
    kept = {g.name for g in it.plan.groups}
    session = replace(it.plan, comparisons=tuple(c for c in it.plan.comparisons if c.group in kept))
    plan = CampaignPlan("c", 1, (session,), ("main",), (), (), ())  # type: ignore[arg-type]  # dollars do not matter here
    rows = [r for r in FolderStore(it.run_dir).rows() if r.validity == "valid"]
    spec = load(Path(__file__).parents[2] / "experiments.yaml", sets).spec
    found = conclude(
        rows, plan, declared_boot_sd=spec.statistics.boot_sd, confidence=0.95, usd_by_group={}, partial=False,
        anchor=spec.anchor, stopped={k: Stop.of(e) for k, e in state.stopped_early.items()},
    )  # fmt: skip
    beside = further(
        rows, plan, found.verdicts, run="r", usd_by_group={}, declared=spec.statistics.boot_sd, prior=None,
        stopped=state.stopped_early, forecasts=state.forecasts,
    )  # fmt: skip
    return found, beside, rows


async def test_a_pair_stops_at_the_first_look_that_shows_it(tmp_path: Path) -> None:
    it = paired(tmp_path, 1.5, "pairs.kv.looks=[2,4]")
    assert await it.agent.run() == "done"
    rounds = all_rounds(it)
    assert it.committed == rounds[:2]
    (stop,) = it.events("group_stopped")
    assert (stop.payload["group"], stop.payload["look"], stop.payload["why"]) == ("pair.kv", 2, "differs")
    assert stop.payload["skipped"] == rounds[2:]
    assert it.progress.done == it.progress.total


async def test_a_look_that_shows_nothing_goes_on_to_the_end(tmp_path: Path) -> None:
    it = paired(tmp_path, 1.0, "pairs.kv.looks=[2,4]", boot_sd=0.2)
    assert await it.agent.run() == "done"
    assert it.committed == all_rounds(it)
    assert it.events("group_stopped") == []


async def test_a_stopped_pair_stays_stopped_and_nothing_is_repeated(tmp_path: Path) -> None:
    """What `resume` does: the ledger's fold says what is done, and a new agent goes on from there."""
    first = paired(tmp_path / "a", 1.5, "pairs.kv.looks=[2,4]")
    await first.agent.run()
    done = fold(events(first)).done("main")
    assert set(done) == set(all_rounds(first))
    again = paired(tmp_path / "b", 1.5, "pairs.kv.looks=[2,4]", done=frozenset(done))
    assert await again.agent.run() == "done"
    assert (again.committed, again.host.booted, again.client.jobs) == ([], [], [])
    assert again.progress.done == again.progress.total


async def test_a_look_in_a_round_that_then_fails_stops_nothing(tmp_path: Path) -> None:
    """The look's decision is committed with its round: done again without it, the group runs to its end."""
    it = paired(tmp_path, 1.5, "pairs.kv.look_quads=[6]")
    failed: list[str] = []

    async def recheck(boot_id: str) -> dict[str, Any]:
        if "/r1/" in boot_id and not failed:
            failed.append(boot_id)
            it.client.step_ms = steps({})  # the second time nothing is to be seen
            raise EngineError("died", f"{boot_id}: gone before its round was committed")
        return {"effective": [], "pages": []}

    it.host.recheck = recheck  # type: ignore[attr-defined]  # a host may have it
    assert await it.agent.run() == "done"
    assert len(failed) == 1
    assert [e.payload["attempt"] for e in it.events("round_voided")] == [0]
    assert it.committed == all_rounds(it)
    assert it.events("group_stopped") == []
    assert not any("group_stopped" in e.payload for e in it.events("round_committed"))
    assert it.progress.done == it.progress.total


async def test_a_stop_that_cannot_be_made_again_claims_nothing(tmp_path: Path) -> None:
    """The boots' part of the interval was the run's own; a report without it must not fall back on a fixed n."""
    sets = ("statistics.boot_sd.step_ms=0.005",)
    it = paired(tmp_path, 1.5, "pairs.kv.looks=[2,4]")
    await it.agent.run()
    found, _, rows = concluded(it, *sets)
    step = next(v for v in found.verdicts if v.metric == "step_ms")
    assert (step.verdict, step.verdict_adjusted) == ("slower", "slower")
    (stop,) = it.events("group_stopped")
    early = {("main", "pair.kv"): Stop(1)}  # no look stands there
    assert stop.payload["look"] == 2
    session = replace(it.plan, comparisons=tuple(c for c in it.plan.comparisons if c.group == "pair.kv"))
    plan = CampaignPlan("c", 1, (session,), ("main",), (), (), ())  # type: ignore[arg-type]  # dollars do not matter here
    spec = load(Path(__file__).parents[2] / "experiments.yaml", sets).spec
    again = conclude(
        [r for r in rows if r.round < 1], plan, declared_boot_sd=spec.statistics.boot_sd, confidence=0.95,
        usd_by_group={}, partial=False, anchor=spec.anchor, stopped=early,
    )  # fmt: skip
    step = next(v for v in again.verdicts if v.metric == "step_ms")
    assert (step.verdict, step.verdict_adjusted, step.lo, step.p) == ("unresolved", "unresolved", None, None)
    assert "look_not_repeatable" in step.reasons


async def test_a_look_inside_a_round_stops_after_whole_quads(tmp_path: Path) -> None:
    """8 prompts: 4 quads a round. The look after quad 6 stands in the middle of the second round."""
    sets = ("pairs.kv.look_quads=[6,10]", "statistics.boot_sd.step_ms=0.005")
    it = paired(tmp_path, 1.5, sets[0])
    assert await it.agent.run() == "done"
    rounds = all_rounds(it)
    assert it.committed == rounds[:2]
    assert it.events("group_stopped") == []  # the commit of the short round says it: one event for both
    stop = it.events("round_committed")[-1].payload["group_stopped"]
    assert stop == {
        "group": "pair.kv", "look": 1, "quads": 2, "why": "differs", "skipped": rounds[2:],
    }  # fmt: skip
    measured = [j for j in it.client.jobs if "/measure/" in j.request_id]
    assert len(measured) == 16 + 8
    assert Counter(map(arm_of, measured)) == {"plain": 12, "kv.b": 12}
    assert it.progress.done == it.progress.total
    state = fold(events(it))
    assert set(state.done("main")) == set(rounds)
    found, beside, _ = concluded(it, *sets)
    step = next(v for v in found.verdicts if v.metric == "step_ms")
    assert (step.verdict, step.reasons) == ("slower", ("drift_unproven", "stopped_early:1+2q")) or (
        step.verdict,
        step.reasons,
    ) == ("slower", ("stopped_early:1+2q",))
    assert step.lo is not None
    assert 1 < step.lo < 1.5 < (step.hi or 0)
    (saved,) = beside.looks
    assert (saved["requests_saved"], saved["boots_saved"], saved["quads"]) == (96 - 24, 12 - 4, 2)
    assert saved["usd_saved"] > 0


async def test_a_kill_inside_a_round_that_a_look_would_end_does_the_round_again(tmp_path: Path) -> None:
    """The stop and the commit are one event, so there is no stop without its rows."""
    it = paired(tmp_path, 1.5, "pairs.kv.look_quads=[6]")
    await it.agent.run()
    whole = events(it)
    commit = max(i for i, e in enumerate(whole) if e.type == "round_committed")
    before = fold(whole[:commit])
    assert before.stopped_early == {}
    assert before.done("main") == tuple(all_rounds(it)[:1])
    assert before.attempts("main") == {all_rounds(it)[1]: 1}


async def test_a_ladder_stops_only_when_all_of_its_comparisons_are_decided(tmp_path: Path) -> None:
    sets = (
        "ladders.depth.values=[3,5]", "ladders.depth.boots=6", "workloads.copy.n=8", "ladders.depth.looks=[3]",
        "statistics.boot_sd.decode_tok_s=0.005", "ladders.depth.primary=decode_tok_s", "ladders.depth.margin=0.01",
    )  # fmt: skip
    clear = rig(tmp_path / "clear", *sets, keep=LADDER)
    clear.client.step_ms = steps({"depth=3": 1.5, "depth=5": 2.5})
    assert await clear.agent.run() == "done"
    (stop,) = clear.events("group_stopped")
    assert (stop.payload["look"], stop.payload["why"]) == (3, "differs")
    found, beside, _ = concluded(clear, *sets)
    primary = [v for v in found.verdicts if v.primary]
    assert [(v.verdict, v.verdict_adjusted) for v in primary] == [("slower", "slower")] * 3
    assert all(v.p is None and "stopped_early:3" in v.reasons for v in primary)
    assert beside.looks[0]["boots_saved"] == 9

    close = rig(tmp_path / "close", *sets, keep=LADDER)
    close.client.step_ms = steps({"depth=3": 1.5, "depth=5": 1.51})
    assert await close.agent.run() == "done"
    assert close.events("group_stopped") == []
    assert close.committed == all_rounds(close)


STAGED = (
    "ladders.depth.values=[2,4,6,8]", "ladders.depth.staged=yes", "ladders.depth.boots=2", "workloads.copy.n=4",
    "statistics.boot_sd.step_ms=0.005",
)  # fmt: skip
TOKENS = 41
"""Completion tokens of a request of the ladder; the first is the prefill's."""


def drafting(it: Rig, accept: float, per_token_ms: float) -> None:
    """Servers that draft: each position is accepted with this probability given all before, a token costs so much."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    last: dict[str, dict[str, Any]] = {}

    def drafts_of(depth: int) -> tuple[int, list[int]]:
        reach = [accept ** (i + 1) for i in range(depth)]
        drafts = round((TOKENS - 1) / (1 + sum(reach)))
        hits = [round(drafts * r) for r in reach]
        hits[0] += (TOKENS - 1) - drafts - sum(hits)
        return drafts, hits

    def timings(job: Job) -> dict[str, Any] | None:
        depth = int(arm_of(job).partition("=")[2] or 0)
        if not depth:
            return None
        drafts, hits = drafts_of(depth)
        boot = job.request_id.partition("/measure/")[0].partition("/warmup/")[0]
        mine = totals[boot]
        for i, n in enumerate([drafts, drafts * depth, sum(hits), *hits]):
            mine[i] += n
        last[boot] = {"draft_n": drafts * depth, "draft_n_accepted": sum(hits), "depth": depth}
        return last[boot]

    def counts(boot_id: str) -> Counters | None:
        t = totals[boot_id]
        return Counters(
            drafts=t[0], drafted=t[1], accepted=t[2], accept_pos=tuple(t[3:]), generated=0, started=1.0
        )

    def step_ms(job: Job) -> float:
        depth = int(arm_of(job).partition("=")[2] or 0)
        wobble = 1 + 0.002 * (crc32(job.request_id.encode()) % 5 - 2)
        drafts = drafts_of(depth)[0] if depth else TOKENS - 1
        return wobble * (10 + per_token_ms * depth) * drafts / (TOKENS - 1)

    it.client.timings, it.host.counts, it.client.step_ms = timings, counts, step_ms


async def test_a_staged_ladder_stops_where_no_deeper_arm_can_win(tmp_path: Path) -> None:
    it = rig(tmp_path, *STAGED, f"workloads.copy.max_tokens={TOKENS}", keep=LADDER)
    drafting(it, accept=0.5, per_token_ms=4.0)
    assert [g.name for g in it.plan.groups] == ["ladder.depth", "ladder.depth@s2", "ladder.depth@s3"]
    assert await it.agent.run() == "done"
    order = [e.type for e in it.events() if e.type in {"forecast_made", "round_started", "group_stopped"}]
    assert order == ["round_started", "round_started", "forecast_made", "group_stopped", "group_stopped"]
    (said,) = it.events("forecast_made")
    assert said.payload["stop"] is True
    assert [f["arm"] for f in said.payload["forecasts"]] == ["depth=6", "depth=8"]
    assert all(f["tok_s_hi"] < said.payload["best_tok_s"] for f in said.payload["forecasts"])
    assert set(fold(events(it)).done("main")) == set(all_rounds(it))
    found, beside, _ = concluded(it, *STAGED)
    left = [v for v in found.verdicts if v.primary and "depth=6" in v.b]
    assert left
    assert {(v.verdict, v.reasons) for v in left} == {("unresolved", ("stopped_by_forecast",))}
    assert sum(x["requests_saved"] for x in beside.looks) == 2 * 2 * 3 * 4
    assert {x["why"] for x in beside.looks} == {"forecast"}


async def test_a_staged_ladder_goes_on_where_a_deeper_arm_may_win_and_is_scored(tmp_path: Path) -> None:
    it = rig(tmp_path, *STAGED, f"workloads.copy.max_tokens={TOKENS}", keep=LADDER)
    drafting(it, accept=0.9, per_token_ms=0.2)
    assert await it.agent.run() == "done"
    assert it.committed == all_rounds(it)
    made = it.events("forecast_made")
    assert [e.payload["group"] for e in made] == ["ladder.depth@s2", "ladder.depth@s3"]
    # Each stands in the journal before the first round of its stage.
    flow = [(e.type, e.payload.get("group") or e.payload.get("round_id")) for e in it.events()]
    assert flow.index(("forecast_made", "ladder.depth@s2")) < flow.index(
        ("round_started", "ladder.depth@s2/r0")
    )
    found, beside, rows = concluded(it, *STAGED)
    six = next(f for f in beside.forecasts if f["arm"] == "depth=6")
    scores = {s["quantity"]: s for s in six["scores"]}
    assert set(scores) == {"tau", "tok_s"}
    assert math.isclose(scores["tok_s"]["came"], scores["tok_s"]["said"], rel_tol=0.2)
    # The same arm many at once, elsewhere in the session, is not what was forecast.
    beside_it = [
        replace(r, concurrency=8, window_ms=10 * (r.window_ms or 0.0), group="pair.busy")
        for r in rows if r.arm == "depth=6"
    ]  # fmt: skip
    plan = CampaignPlan("c", 1, (it.plan,), ("main",), (), (), ())  # type: ignore[arg-type]  # dollars do not matter here
    more = further(
        [*rows, *beside_it], plan, (), run="r", usd_by_group={}, declared={}, prior=None,
        forecasts=fold(events(it)).forecasts,
    )  # fmt: skip
    assert more.forecasts == beside.forecasts
    (ladder,) = found.speculation
    assert [w.arm for w in ladder.widths] == ["depth=2", "depth=4", "depth=6", "depth=8"]
    assert {v.pair for v in found.verdicts if v.primary} == {
        "depth:plain|depth=2", "depth:plain|depth=4", "depth:depth=2|depth=4", "depth:plain|depth=6",
        "depth:depth=4|depth=6", "depth:plain|depth=8", "depth:depth=6|depth=8",
    }  # fmt: skip
