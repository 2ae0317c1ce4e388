"""Runs a campaign: sessions by priority, as money and nodes allow, until all is done or something stops it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from campaign.clock import Clock
from campaign.fleet.budget import BudgetPort
from campaign.fleet.snapshot import SessionSnapshot, Snapshot
from campaign.fleet.supervisor import SessionJob, SessionResult
from campaign.ledger.events import NewEvent
from campaign.plan.model import CampaignPlan
from campaign.store.layout import RunDir

POLL_S = 0.5


class PoolPort(Protocol):
    """A SupervisorPool, or the actor that holds one."""

    async def start(self, job: SessionJob) -> None: ...
    async def snapshots(self) -> tuple[SessionSnapshot, ...]: ...
    async def results(self) -> tuple[SessionResult, ...]: ...
    async def stop(self, why: str, gate: str | None = None) -> None: ...


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
    ) -> None:
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

    def ask_stop(self, why: str) -> None:
        """Called by the signal handler: stop at the next token, tear down, settle."""
        self._stopping = self._stopping or why

    async def run(self) -> Ending:
        """Until nothing runs and nothing more can be started."""
        told = False
        while True:
            self._read_stop_file()
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
            await self._clock.sleep(POLL_S)
        return self._ending()

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
            self._end(result)
            if result.ending in {"failed", "unreachable"}:
                self._waiting.clear()
        if self._stopping or not (self._running or settled):
            # Nothing will settle any more: what was refused stays refused.
            for _, result in self._refused:
                self._end(result)
            self._refused.clear()
        elif settled:
            self._waiting += [job for job, _ in self._refused]
            self._refused.clear()

    def _end(self, result: SessionResult) -> None:
        self._ended.append(result)
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
        broken = next((r for r in results if r.ending in {"failed", "unreachable"}), None)
        gated = next((r for r in results if r.ending in {"tripped", "refused"}), None)
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
