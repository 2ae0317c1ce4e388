"""What a session needs from outside: ports, implemented in-process and by Ray actors alike."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from campaign.client.base import Client
from campaign.engines.base import BootOrder, BootRecord, Counters
from campaign.ledger.events import NewEvent


@runtime_checkable
class EngineHost(Protocol):
    """Owns the process groups of every server of a session; nothing survives it."""

    async def boot(self, order: BootOrder) -> BootRecord:
        """Start a server and wait until it is ready. Raises EngineError.

        Ready: our own child is alive, owns the port, lists our model, and has produced one token.
        """
        ...

    async def counters(self, boot_id: str) -> Counters | None:
        """Scrape the server's counters; None where it has none or did not answer."""
        ...

    async def alive(self, boot_id: str) -> bool:
        """Whether our child is still the one that owns the port."""
        ...

    async def why_dead(self, boot_id: str) -> tuple[str, str]:
        """(kind, last lines of the log) of a server that is gone."""
        ...

    async def stop(self, boot_id: str) -> None:
        """End the whole process tree and wait until it is gone. Idempotent."""
        ...

    async def close(self) -> None:
        """Stop everything."""
        ...


@runtime_checkable
class Telemetry(Protocol):
    """Samples the machine beside the measurement."""

    async def start(self, path: str) -> dict[str, Any]:
        """Begin sampling into a file; returns what can be sampled and the identity of the node."""
        ...

    async def window(self, start_ns: int, end_ns: int) -> dict[str, float | None]:
        """Means over a window of CLOCK_MONOTONIC: cpu_load, cpu_mhz, steal, joules, ..."""
        ...

    async def close(self) -> None:
        """Stop sampling and flush."""
        ...


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything one session is given."""

    host: EngineHost
    client: Client
    telemetry: Telemetry


class Journal(Protocol):
    """The session's own journal: numbered, fsynced, merged by the controller."""

    def append(self, event: NewEvent) -> NewEvent:
        """Durable on return; gives the event its source sequence number."""
        ...

    def close(self) -> None:
        """Release the file. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """What the controller asks of a session."""

    stop: bool
    why: str
    gate: str | None = None


class Control(Protocol):
    """Polled by the session between and during requests. Silence never extends a lease."""

    async def poll(self) -> Command | None:
        """The latest command, if any."""
        ...

    async def added(self) -> bytes | None:
        """The next addition (campaign.session.added) that was sent to this session, each once."""
        ...
