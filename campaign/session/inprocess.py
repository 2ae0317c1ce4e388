"""A session agent running in this process: the local provider's, and the tests'."""

import asyncio
from collections.abc import AsyncIterator, Callable

from campaign.ledger.events import NewEvent
from campaign.session.agent import SessionAgent
from campaign.session.ports import Command, Journal, Ports
from campaign.session.round import Progress


class QueueJournal:
    """A journal that also hands each durable event on."""

    def __init__(self, inner: Journal) -> None:
        self._inner = inner
        self.queue: asyncio.Queue[NewEvent | None] = asyncio.Queue()

    def append(self, event: NewEvent) -> NewEvent:
        stored = self._inner.append(event)
        self.queue.put_nowait(stored)
        return stored

    def close(self) -> None:
        self._inner.close()


class FlagControl:
    """The latest command, set by whoever supervises."""

    def __init__(self) -> None:
        self._command: Command | None = None
        self._added: list[bytes] = []

    def give(self, command: Command) -> None:
        # The first stop says why; later ones must not overwrite it.
        self._command = self._command or command

    async def poll(self) -> Command | None:
        return self._command

    def add(self, data: bytes) -> None:
        """Something to run while the session is held."""
        self._added.append(data)

    async def added(self) -> bytes | None:
        return self._added.pop(0) if self._added else None


class InProcessAgent:
    """An `AgentRun` over a SessionAgent in a task of this event loop."""

    def __init__(
        self,
        make: Callable[[Journal, FlagControl], SessionAgent],
        journal: Journal,
        ports: Ports,
        progress: Progress,
    ) -> None:
        self._journal = QueueJournal(journal)
        self._control = FlagControl()
        self._ports = ports
        self.progress = progress
        self._agent = make(self._journal, self._control)
        self._task = asyncio.create_task(self._run())
        self.error: BaseException | None = None

    async def _run(self) -> None:
        try:
            await self._agent.run()
        except BaseException as error:
            self.error = error
            raise
        finally:
            try:
                await self._close()
            finally:
                # Whoever follows the events must hear of the end, whatever failed before it.
                self._journal.queue.put_nowait(None)

    async def _close(self) -> None:
        for part in (self._ports.host, self._ports.client, self._ports.telemetry):
            try:
                await part.close()
            except Exception as error:
                self.error = self.error or error
        self._journal.close()

    async def events(self) -> AsyncIterator[NewEvent]:
        """Events as they become durable; ends with the agent. Raises what the agent died of."""
        while (event := await self._journal.queue.get()) is not None:
            yield event
        await asyncio.gather(self._task, return_exceptions=True)
        if self.error is not None:
            raise self.error

    async def stop(self, why: str, gate: str | None = None) -> None:
        self._control.give(Command(stop=True, why=why, gate=gate))

    async def add(self, data: bytes) -> None:
        """Run an addition while the session is held."""
        self._control.add(data)

    async def kill(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
