"""Following an agent's journal over a line, with the node's scripts run by a shell here in place of ssh."""

from pathlib import Path
from typing import Any

import pytest

from campaign.cloud.follow import SkyAgentRun
from campaign.cloud.shell import NodeShell
from campaign.ledger.agent import AgentJournal, journal_path, read, source_of
from campaign.ledger.events import NewEvent
from campaign.store.layout import RunDir
from campaign.testing.clock import VirtualClock

LEASE = "main.1"


def heartbeat(done: int) -> NewEvent:
    return NewEvent("agent_heartbeat", {"cell": "c", "done": done, "total": 9}, "main")


def committed() -> NewEvent:
    return NewEvent(
        "round_voided", {"round_id": "g/r0", "attempt": 0, "reason": "x", "cells": [], "discarded": 0}, "main"
    )


class GrowingShell(NodeShell):
    """The agent writes on while rows are being brought."""

    def __init__(self, folder: Path, journal: AgentJournal) -> None:
        super().__init__(["bash", "-c", 'exec bash -c "$0"'], str(folder))
        self._journal, self._pulls = journal, 0

    async def pull(self, remote: str, local: Path, *, everything: bool) -> list[str]:
        self._pulls += 1
        self._journal.append(heartbeat(100 + self._pulls))
        brought = await super().pull(remote, local, everything=everything)
        if self._pulls == 2:
            self._journal.append(heartbeat(200))
            (Path(self.folder) / "exit").write_text("0\n")
        return brought


async def test_journal_that_grows_while_rows_are_brought_is_followed_whole(tmp_path: Path) -> None:
    node, here, clock = tmp_path / "node", RunDir(tmp_path / "here"), VirtualClock()
    theirs = journal_path(RunDir(node / "run"), LEASE)
    theirs.parent.mkdir(parents=True)
    here.root.mkdir()
    with AgentJournal(theirs, source_of(LEASE), clock) as journal:
        journal.append(heartbeat(1))
        journal.append(committed())
        shell: Any = GrowingShell(node, journal)
        run = SkyAgentRun(shell, here, "main", LEASE, "ab" * 32, clock)
        seen = []
        async for event in run.events():
            seen.append(event)
            if len(seen) == 3:
                journal.append(committed())
    assert [e.source_seq for e in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].payload["done"] == 200
    assert read(journal_path(here, LEASE), source_of(LEASE)) == seen


@pytest.mark.parametrize("everything", [False, True])
async def test_journals_are_brought_at_the_end_only(tmp_path: Path, everything: bool) -> None:
    (tmp_path / "node/run/journal").mkdir(parents=True)
    (tmp_path / "node/run/journal/main.1.jsonl").write_text("{}\n")
    shell = NodeShell(["bash", "-c", 'exec bash -c "$0"'], str(tmp_path / "node"))
    brought = await shell.pull("run", tmp_path / "here", everything=everything)
    assert brought == (["journal/main.1.jsonl"] if everything else [])
