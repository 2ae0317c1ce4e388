"""Runs a campaign: sessions by priority, as money and nodes allow, until all is done or something stops it."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from campaign.clock import Clock
from campaign.errors import CampaignError
from campaign.fleet.additions import Inbox, Request, next_addition, refusal
from campaign.fleet.again import continued, draw_of, next_name, root_of
from campaign.fleet.budget import BudgetPort
from campaign.fleet.reconcile import Reconciled, Scope
from campaign.fleet.snapshot import SessionSnapshot, Snapshot
from campaign.fleet.supervisor import SessionJob, SessionResult
from campaign.ledger.events import NewEvent
from campaign.plan.model import CampaignPlan
from campaign.spec.models import LocalNode
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
    async def add(self, session: str, data: bytes) -> None: ...


class PlanFile(Protocol):
    """Where a plan that grows is kept: beside the one in force until the ledger names it."""

    def begin(self, plan: CampaignPlan) -> str: ...
    def commit(self) -> None: ...


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
        plan_file: PlanFile | None = None,
        poll_s: float = POLL_S,
        inbox: Inbox | None = None,
    ) -> None:
        # `scope`: what to reconcile at start, every minute and at the end.
        self._run_dir, self._plan, self._budget, self._pool, self._clock = run_dir, plan, budget, pool, clock
        self._show, self._inbox = show, inbox
        self._jobs = tuple(jobs)
        self._waiting = list(jobs)
        self._running: dict[str, SessionJob] = {}
        self._refused: dict[str, SessionResult] = {}
        """Held until money settles: asking again before that gives the same answer."""
        self._ended: list[SessionResult] = []
        self._stopping: str | None = None
        self._started_ns = clock.monotonic_ns()
        self._scope, self._plan_file, self._poll_s = scope, plan_file, poll_s
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
                # The sessions first: their last words then say stopped, not refused.
                await self._pool.stop(self._stopping)
                with contextlib.suppress(CampaignError):
                    # A ledger that fails must not keep the sessions from being waited for.
                    await self._budget.record(NewEvent("stop_asked", {"by": "user", "why": self._stopping}))
                self._waiting.clear()
            await self._collect()
            await self._additions()
            started = await self._start_next()
            await self._display()
            if not self._running and not started:
                break
            await self._clock.sleep(self._poll_s)
        await self._sweep(last=True)
        self._ended += self._refused.values()
        return self._ending()

    async def _sweep(self, *, last: bool = False) -> None:
        """Reconcile at the start, every minute, and at the end; what a person has to look at is kept."""
        now = self._clock.monotonic_ns()
        due = last or self._swept_ns is None or now - self._swept_ns >= SWEEP_S * 1e9
        if self._scope is None or not due:
            return
        self._swept_ns = now
        try:
            found = await self._pool.reconcile(self._scope)
        except CampaignError:
            return  # the ledger cannot be asked; the sessions stop for that themselves
        # Runs of others share the account: what is not of this run is left to `campaign reconcile`.
        self._alarms = {
            f.node: f"{f.detail}; check by hand: {f.check_by_hand}"
            for f in found.alarms
            if f.what == "unreachable" and f.check_by_hand
        }

    # --- sessions

    async def _start_next(self) -> bool:
        """Start what free nodes and the budget allow, in order; True if something was started.

        A session that was refused waits for money to settle, and everything behind it waits with it.
        """
        busy = {_place(job) for job in self._running.values()}
        started = False
        for job in list(self._waiting):
            if job.plan.name in self._refused:
                break
            if _place(job) in busy:
                continue
            busy.add(_place(job))
            self._waiting.remove(job)
            self._running[job.plan.name] = job
            await self._pool.start(job)
            started = True
        return started

    async def _collect(self) -> None:
        settled = False
        for result in await self._pool.results():
            job = self._running.pop(result.session)
            if result.ending == "refused" and not self._stopping:
                self._refused[result.session] = result
                self._waiting.append(job)
                self._waiting.sort(key=self._jobs.index)
                continue
            settled = True
            if result.ending in {"preempted", "bad_draw"} and await self._drawn_again(job, result):
                continue
            self._ended.append(result)
            if result.ending in {"failed", "unreachable", "preempted"}:
                self._waiting.clear()
        if settled and self._waiting:
            # Money has settled: what was refused may ask again.
            self._refused.clear()

    async def _drawn_again(self, job: SessionJob, result: SessionResult) -> bool:
        try:
            return await self._again(job, result)
        except CampaignError:
            # A ledger or a disk that fails must not end the watch over the sessions that still run.
            return False

    async def _again(self, job: SessionJob, result: SessionResult) -> bool:
        """Plan what is left on another node, as a session of its own with its own anchors."""
        if draw_of(job.plan.name) >= MAX_DRAWS or self._stopping:
            return False
        state = await self._budget.state()
        rest = continued(job.plan, state, next_name(root_of(job.plan.name), state))
        if rest is None:
            return True
        self._plan = replace(self._plan, sessions=(*self._plan.sessions, rest))
        payload = {
            "sessions": [rest.name],
            "reason": f"{result.ending} of {job.plan.name}",
            "plan_sha256": self._plan_file.begin(self._plan) if self._plan_file else None,
            "continues": job.plan.name,
        }
        await self._budget.record(NewEvent("sessions_added", payload))
        if self._plan_file:
            self._plan_file.commit()
        again = replace(job, plan=rest, attempts={}, done=())
        self._jobs = (*self._jobs, again)
        self._waiting.append(again)
        return True

    async def _additions(self) -> None:
        """What `campaign add` asks for: named in the ledger as exploratory, then handed to the node that is held."""
        for request in self._inbox.take() if self._inbox else ():
            name, error = None, "the run is being stopped" if self._stopping else None
            if error is None:
                try:
                    name, error = await self._add(request)
                except CampaignError as failed:
                    error = str(failed)
            if self._inbox:
                self._inbox.answer(request.id, name, error)

    async def _add(self, request: Request) -> tuple[str | None, str | None]:
        state = await self._budget.state()
        host, error = refusal(state, request, self._clock.utc_ns())
        if host is None or host not in self._running:
            return None, error or f"session {host} is not run by this controller"
        name = next_addition(host, state)
        what = request.what.named(name, self._running[host].plan.node)
        self._plan = replace(self._plan, sessions=(*self._plan.sessions, what.plan))
        payload = {
            "sessions": [name],
            "reason": f"added to {host} while it was held",
            "plan_sha256": self._plan_file.begin(self._plan) if self._plan_file else None,
            "exploratory": True,
            "lease": state.sessions[host].lease,
            "file": request.file,
            "canonical_sha256": request.canonical_sha256,
        }
        await self._budget.record(NewEvent("sessions_added", payload))
        if self._plan_file:
            self._plan_file.commit()
        await self._pool.add(host, what.dump())
        return name, None

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
        snapshot = Snapshot(
            run=self._run_dir.name,
            campaign=self._plan.campaign,
            elapsed_s=elapsed,
            left_s=_left(elapsed, sessions, self._jobs),
            cap_usd=self._plan.cap_usd,
            spent_usd=money.spent,
            committed_usd=money.committed,
            sessions=sessions,
            notes=money.notes,
        )
        try:
            self._show(snapshot)
        except (Exception, SystemExit):
            # A reader that has gone (`| head`, a closed terminal) must not end the run; rich raises SystemExit for it.
            self._show = lambda _: None

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
        whole = len(results) == len(self._jobs) and all(r.ending == "done" for r in results)
        if self._stopping and not whole:
            return Ending(130, self._stopping, results)
        return Ending(0, "", results)


def _place(job: SessionJob) -> str:
    """What a session needs for itself. CPU sessions share one machine, whatever their nodes are called."""
    local = isinstance(job.node, LocalNode) and not job.node.gpus
    return "this machine's CPU" if local else job.plan.node


def _left(elapsed: float, sessions: Sequence[SessionSnapshot], jobs: Sequence[SessionJob]) -> float | None:
    left = 0.0
    for job in jobs:
        shot = next((s for s in sessions if s.name == job.plan.name), None)
        if shot is None:
            left += job.plan.seconds
        elif shot.total and shot.state not in {"done", "stopped", "failed", "tripped"}:
            share = shot.done / shot.total
            # The plan's pace at first, the measured one as it becomes known.
            pace = elapsed / share if share > 0 else job.plan.seconds
            left += (1 - share) * (share * pace + (1 - share) * job.plan.seconds)
    return left if sessions else None
