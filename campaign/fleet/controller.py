"""Runs a campaign: sessions by priority, as money and nodes allow, until all is done or something stops it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from campaign.clock import Clock
from campaign.fleet.again import continued, draw_of, root_of
from campaign.fleet.budget import BudgetPort
from campaign.fleet.reconcile import Reconciled, Scope
from campaign.fleet.snapshot import SessionSnapshot, Snapshot
from campaign.fleet.supervisor import SessionJob, SessionResult
from campaign.ledger.events import NewEvent
from campaign.plan.model import CampaignPlan
from campaign.store.layout import RunDir

POLL_S = 0.5
SWEEP_S = 60.0
"""Between two passes of the reconcile."""
MAX_DRAWS = 3
"""Nodes drawn for one planned session: preempted, or slower than the reference from the first anchor on."""


class PoolPort(Protocol):
    """A SupervisorPool, or the actor that holds one."""

    async def start(self, job: SessionJob) -> None: ...
    async def snapshots(self) -> tuple[SessionSnapshot, ...]: ...
    async def results(self) -> tuple[SessionResult, ...]: ...
    async def stop(self, why: str, gate: str | None = None) -> None: ...
    async def reconcile(self, scope: Scope) -> Reconciled: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How the campaign ended, and the exit code that says so."""

    exit_code: int
    reason: str
    results: tuple[SessionResult, ...]


class Controller:
    """One run of `campaign run`, `resume` or `rerun`."""

    def __init__(
        self,
        run_dir: RunDir,
        plan: CampaignPlan,
        jobs: Sequence[SessionJob],
        budget: BudgetPort,
        pool: PoolPort,
        clock: Clock,
        show: Callable[[Snapshot], None] = lambda _: None,
        scope: Scope | None = None,
        keep_plan: Callable[[CampaignPlan], str] = lambda _: "",
        poll_s: float = POLL_S,
    ) -> None:
        # `scope`: what to reconcile at start, every minute and at the end. `keep_plan` stores a plan that has grown by
        # a session, and returns its hash.
        self._run_dir, self._plan, self._budget, self._pool, self._clock = run_dir, plan, budget, pool, clock
        self._show = show
        self._waiting = list(jobs)
        self._running: dict[str, SessionJob] = {}
        self._refused: list[tuple[SessionJob, SessionResult]] = []
        """Held until money settles: asking again before that gives the same answer."""
        self._ended: list[SessionResult] = []
        self._stopping: str | None = None
        self._notes: list[str] = []
        self._started_ns = clock.monotonic_ns()
        self._scope, self._keep_plan, self._poll_s = scope, keep_plan, poll_s
        self._swept_ns: int | None = None
        self._alarms: dict[str, str] = {}

    def ask_stop(self, why: str) -> None:
        """Called by the signal handler: stop at the next token, tear down, settle."""
        self._stopping = self._stopping or why

    async def run(self) -> Ending:
        """Until nothing runs and nothing more can be started."""
        told = False
        while True:
            self._read_stop_file()
            await self._sweep()
            if self._stopping and not told:
                told = True
                await self._budget.record(NewEvent("stop_asked", {"by": "user", "why": self._stopping}))
                await self._pool.stop(self._stopping)
                self._waiting.clear()
            await self._collect()
            started = await self._start_next()
            await self._display()
            if not self._running and not started:
                break
            await self._clock.sleep(self._poll_s)
        await self._sweep(last=True)
        return self._ending()

    async def _sweep(self, *, last: bool = False) -> None:
        """Reconcile at the start, every minute, and at the end; what a person has to look at is kept."""
        now = self._clock.monotonic_ns()
        due = last or self._swept_ns is None or now - self._swept_ns >= SWEEP_S * 1e9
        if self._scope is None or not due:
            return
        self._swept_ns = now
        found = await self._pool.reconcile(self._scope)
        self._alarms = {
            f.node: f.detail + (f"; check by hand: {f.check_by_hand}" if f.check_by_hand else "")
            for f in found.alarms
            # Runs of others share the account: what is not of this run is noted, and `campaign reconcile` judges it.
            if f.what == "unreachable" and f.check_by_hand
        }
        self._notes += [
            f"reconcile: {f.what} {f.node}: {f.detail}" for f in found.findings if f.what != "held"
        ]
        self._notes = self._notes[-50:]

    # --- sessions

    async def _start_next(self) -> bool:
        """Start what a free node and the budget allow; True if something was started."""
        busy = {job.plan.node for job in self._running.values()}
        started = False
        for job in list(self._waiting):
            if job.plan.node in busy:
                continue
            busy.add(job.plan.node)
            self._waiting.remove(job)
            self._running[job.plan.name] = job
            await self._pool.start(job)
            started = True
        return started

    async def _collect(self) -> None:
        settled = False
        for result in await self._pool.results():
            job = self._running.pop(result.session)
            if result.ending == "refused":
                self._refused.append((job, result))
                continue
            settled = True
            if result.ending in {"preempted", "bad_draw"} and await self._again(job, result):
                continue
            self._end(result)
            if result.ending in {"failed", "unreachable", "preempted"}:
                self._waiting.clear()
        if self._stopping or not (self._running or settled):
            # Nothing will settle any more: what was refused stays refused.
            for _, result in self._refused:
                self._end(result)
            self._refused.clear()
        elif settled:
            self._waiting += [job for job, _ in self._refused]
            self._refused.clear()

    async def _again(self, job: SessionJob, result: SessionResult) -> bool:
        """Plan what is left on another node, as a session of its own with its own anchors."""
        draw = draw_of(job.plan.name) + 1
        if draw > MAX_DRAWS or self._stopping:
            return False
        state = await self._budget.state()
        rest = continued(job.plan, state, f"{root_of(job.plan.name)}.draw{draw}")
        self._note_end(result)
        if rest is None:
            return True
        self._plan = replace(self._plan, sessions=(*self._plan.sessions, rest))
        payload = {
            "sessions": [rest.name],
            "reason": f"{result.ending} of {job.plan.name}",
            "plan_sha256": self._keep_plan(self._plan),
            "continues": job.plan.name,
        }
        await self._budget.record(NewEvent("sessions_added", payload))
        self._waiting.append(replace(job, plan=rest, attempts={}, done=()))
        return True

    def _end(self, result: SessionResult) -> None:
        self._ended.append(result)
        self._note_end(result)

    def _note_end(self, result: SessionResult) -> None:
        self._notes.append(
            f"session {result.session}: {result.ending}{': ' + result.reason if result.reason else ''}"
        )

    def _read_stop_file(self) -> None:
        try:
            asked = json.loads(self._run_dir.stop_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self.ask_stop(f"campaign stop: {asked.get('why') or 'no reason given'}")

    # --- what is shown

    async def _display(self) -> None:
        money = await self._budget.money()
        sessions = await self._pool.snapshots()
        elapsed = (self._clock.monotonic_ns() - self._started_ns) / 1e9
        self._show(
            Snapshot(
                run=self._run_dir.name,
                campaign=self._plan.campaign,
                elapsed_s=elapsed,
                left_s=_left(elapsed, sessions, self._plan),
                cap_usd=self._plan.cap_usd,
                spent_usd=money.spent,
                committed_usd=money.committed,
                sessions=sessions,
                notes=(*money.notes, *self._notes),
            )
        )

    def _ending(self) -> Ending:
        results = tuple(self._ended)
        broken = next((r for r in results if r.ending in {"failed", "unreachable", "preempted"}), None)
        gated = next((r for r in results if r.ending in {"tripped", "refused", "bad_draw"}), None)
        if self._alarms:
            return Ending(4, "; ".join(f"{node}: {why}" for node, why in self._alarms.items()), results)
        if broken is not None:
            return Ending(broken.error_exit or 4, broken.reason, results)
        if gated is not None:
            return Ending(3, gated.reason, results)
        if self._stopping:
            return Ending(130, self._stopping, results)
        return Ending(0, "", results)


def _left(elapsed: float, sessions: Sequence[SessionSnapshot], plan: CampaignPlan) -> float | None:
    planned: Mapping[str, float] = {s.name: s.seconds for s in plan.sessions}
    left = 0.0
    for name, seconds in planned.items():
        shot = next((s for s in sessions if s.name == name), None)
        if shot is None:
            left += seconds
        elif shot.total and shot.state not in {"done", "stopped", "failed", "tripped"}:
            share = shot.done / shot.total
            # The plan's pace at first, the measured one as it becomes known.
            pace = elapsed / share if share > 0 else seconds
            left += (1 - share) * (share * pace + (1 - share) * seconds)
    return left if sessions else None
