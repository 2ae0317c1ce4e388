"""What every part of a round works with, and the ways a round is told to stop."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from campaign.budget.machine import Limits, Trip, limits
from campaign.clock import Clock
from campaign.engines.base import Counters
from campaign.ledger.events import NewEvent
from campaign.plan.model import SessionPlan
from campaign.session.ports import Command, Journal, Ports
from campaign.session.request import Identity
from campaign.spec.models import Spec
from campaign.store.base import Store
from campaign.store.layout import RunDir
from campaign.workloads.packs import Prompts


class Stopped(Exception):
    """The controller, a gate or the lease said stop; the round is not committed."""

    def __init__(self, command: Command) -> None:
        self.command = command
        super().__init__(command.why)


class Tripped(Exception):
    """The data left a gate; the round is void."""

    def __init__(self, trip: Trip) -> None:
        self.trip = trip
        super().__init__(trip.why)


@dataclass(slots=True)
class Progress:
    """How far the session is; read by whoever displays it."""

    state: str = "waiting"
    phase: str = "setup"
    cell: str = ""
    done: int = 0
    total: int = 0
    tok_s: float | None = None
    errors_in_a_row: int = 0
    command: Command | None = None
    last_counters: dict[str, Counters | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Everything a round needs, none of it created here."""

    who: Identity
    spec: Spec
    plan: SessionPlan
    prompts: Mapping[str, Prompts]
    run_dir: RunDir
    ports: Ports
    store: Store
    journal: Journal
    clock: Clock
    cpus: tuple[int, ...]
    """Cores the engines are pinned to; empty where there are too few to set apart."""
    progress: Progress
    disk: Executor
    """One worker: writes of request journals, in order."""
    stopping: asyncio.Event
    """Set once the session has been told to stop."""
    overrides: frozenset[str]
    """Gates that a person has overridden, on record."""

    @property
    def limits(self) -> Limits:
        """What the spec's gates allow."""
        return limits(self.spec)

    def emit(self, type_: str, **payload: Any) -> None:
        """Append to the session's journal; durable on return."""
        self.journal.append(NewEvent(type=type_, payload=payload, session=self.who.session))

    def check(self) -> None:
        """Raise Stopped where the session has been told to stop."""
        if self.progress.command is not None:
            raise Stopped(self.progress.command)

    def gate(self, trip: Trip | None) -> None:
        """Raise Tripped, unless a person has overridden that gate."""
        if trip is not None and trip.gate not in self.overrides:
            raise Tripped(trip)

    async def stopped_before(self, work: "asyncio.Future[Any]") -> bool:
        """Wait for the work or a stop, whichever is first; True where the stop was."""
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        return not work.done()


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of it to its end, then raise the first failure in order."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
