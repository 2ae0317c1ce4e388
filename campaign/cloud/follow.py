"""Follows a session agent on another machine: its order, its journal, and what it is told. Used by `sky` and `attach`."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Literal

from campaign.clock import Clock
from campaign.cloud.control import Record, sign
from campaign.cloud.shell import NodeShell
from campaign.errors import ProviderError
from campaign.ledger import agent as agent_journal
from campaign.ledger.events import NewEvent
from campaign.store.layout import RunDir

POLL_S = 3.0
LINE_TRIES = 5
"""Polls of the agent's journal that may fail in a row before the line counts as cut."""


def order_files(run_dir: RunDir) -> dict[str, bytes]:
    """What an agent needs of a run: the spec, the plan and the prompts."""
    files = {f"run/{p.name}": p.read_bytes() for p in (run_dir.canonical, run_dir.plan, run_dir.spec)}
    for path in sorted((run_dir.root / "workloads").glob("*.json")):
        files[f"run/workloads/{path.name}"] = path.read_bytes()
    return files


class SkyAgentRun:
    """Follows the agent's journal over SSH; rows of a round are here before its commit is handed on."""

    def __init__(
        self, shell: NodeShell, run_dir: RunDir, session: str, lease: str, key: str, clock: Clock
    ) -> None:
        self._shell, self._run_dir, self._session, self._clock = shell, run_dir, session, clock
        self._lease, self._key = lease, key
        self._control_seq = 0
        self._killed = False

    async def events(self) -> AsyncIterator[NewEvent]:
        """Whole events in order; ends with the agent. Raises ProviderError once the line stays cut."""
        local = agent_journal.journal_path(self._run_dir, self._lease)
        name = f"run/journal/{local.name}"
        local.parent.mkdir(parents=True, exist_ok=True)
        offset, failed = 0, 0
        local.unlink(missing_ok=True)
        while not self._killed:
            try:
                data, code = await self._shell.tail(name, offset)
                failed = 0
            except ProviderError:
                failed += 1
                if failed >= LINE_TRIES:
                    raise
                await self._clock.sleep(POLL_S * failed)
                continue
            whole = data[: data.rfind(b"\n") + 1]
            if whole:
                with local.open("r+b" if offset else "wb") as file:
                    file.truncate(offset)
                    file.seek(offset)
                    file.write(whole)
                events, _ = agent_journal.follow(local, offset)
                offset += len(whole)
                if any(e.type in {"round_committed", "round_voided"} for e in events):
                    await self._shell.pull("run", self._run_dir.root, everything=False)
                for event in events:
                    yield event
            elif code is not None:
                return
            await self._clock.sleep(POLL_S)

    async def stop(self, why: str, gate: str | None = None) -> None:
        with suppress(ProviderError):
            await self._tell("stop", why=why, gate=gate)

    async def kill(self) -> None:
        self._killed = True
        with suppress(ProviderError):
            await self._tell("kill", why="killed")
            await self._shell.run('p=$(cat agent.pid) && kill -TERM -- "-$p"; true')

    async def extend(self, deadline_utc_ns: int, worst_usd_micro: int) -> None:
        """Tell the node of an extension the controller has admitted. Raises ProviderError."""
        await self._tell("extend", deadline_utc_ns=deadline_utc_ns, worst_usd_micro=worst_usd_micro)

    async def add(self, data: bytes) -> None:
        """Send an addition for a session that is held. Raises ProviderError."""
        sha256 = hashlib.sha256(data).hexdigest()
        await self._shell.push({f"add/{sha256}.json": data})
        await self._tell("add", sha256=sha256)

    async def _tell(self, kind: Literal["stop", "extend", "kill", "add"], **more: Any) -> None:
        self._control_seq += 1
        record = Record(self._lease, self._control_seq, kind, **more)
        await self._shell.push({f"control/{self._control_seq:04}.json": sign(record, self._key)})
