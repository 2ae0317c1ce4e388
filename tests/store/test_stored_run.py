"""The whole way: a shipper's own process on the node's side, a followed agent on the controller's, S3 in between."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from campaign.clock import SystemClock
from campaign.cloud import stored
from campaign.errors import ProviderError, StoreError
from campaign.fleet import shipper
from campaign.ledger.agent import AgentJournal, journal_path, source_of
from campaign.ledger.events import NewEvent
from campaign.store.layout import RunDir
from campaign.store.objects import FolderObjects
from campaign.testing.clock import VirtualClock
from campaign.testing.proxy import Proxy

LEASE = "s1.1"


class Inner:
    """The provider's own line to the agent."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def events(self):
        raise AssertionError("events come through the store")

    async def stop(self, why: str, gate: str | None = None) -> None:
        self.told.append(f"stop {why} {gate}")

    async def kill(self) -> None:
        self.told.append("kill")

    async def extend(self, deadline_utc_ns: int, worst_usd_micro: int) -> None:
        self.told.append(f"extend {deadline_utc_ns} {worst_usd_micro}")


class Node:
    """A node's folder as `node_agent` sees it."""

    def __init__(self, folder: Path, store: str, run: str) -> None:
        self.folder, self.run_dir = folder, RunDir(folder / "run")
        self.run_dir.root.mkdir(parents=True)
        (folder / "order.json").write_text(json.dumps({"run": run, "terms": {"lease": LEASE}}))
        self.run_dir.canonical.write_text(json.dumps({"store": store}))
        self.store = store
        self.journal = AgentJournal(journal_path(self.run_dir, LEASE), source_of(LEASE), SystemClock())

    def round(self, number: int) -> None:
        path = self.run_dir.rows / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"rows of {number}".encode())
        self.say("round_committed", round_id=f"g/r{number}", attempt=0, cells=[])

    def say(self, type_: str, **payload: object) -> None:
        self.journal.append(NewEvent(type_, payload, "s1"))


def controller(tmp_path: Path, store: str) -> RunDir:
    here = RunDir(tmp_path / "the-run")
    here.root.mkdir()
    here.canonical.write_text(json.dumps({"store": store}))
    return here


async def test_events_and_rows_come_through_a_cut_line(
    tmp_path: Path, s3_alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploaded by a process of its own; the server dies and comes back empty in the middle; nothing is missing."""
    monkeypatch.setattr(shipper, "EVERY_S", 0.2)
    monkeypatch.setattr(stored, "POLL_S", 0.1)
    async with Proxy(s3_alone.port) as proxy:
        store = s3_alone.store(proxy.port)
        node, here = Node(tmp_path / "node", store, "the-run"), controller(tmp_path, store)
        process = shipper.start(node.folder)
        try:
            objects = stored.open_objects(store, "the-run", LEASE)
            assert objects is not None
            inner = Inner()
            run = stored.StoredRun(inner, objects, here, LEASE, SystemClock())
            events = run.events()

            async def until(type_: str) -> NewEvent:
                async for event in events:
                    if event.type == type_:
                        return event
                raise AssertionError(type_)

            node.round(0)
            async with asyncio.timeout(90):
                assert (await until("round_committed")).payload["round_id"] == "g/r0"
            assert (here.rows / "0.parquet").read_bytes() == b"rows of 0"
            proxy.refuse = True
            proxy.abort()
            node.round(1)
            s3_alone.kill()
            s3_alone.start()
            proxy.refuse = False
            async with asyncio.timeout(90):
                assert (await until("round_committed")).payload["round_id"] == "g/r1"
            assert (here.rows / "1.parquet").read_bytes() == b"rows of 1"
            await run.stop("enough", "cost")
            await run.extend(5, 6)
            node.say("session_finished", state="stopped", reason="enough")
            async with asyncio.timeout(90):
                await until("session_finished")
            assert inner.told == ["stop enough cost", "extend 5 6"]
            with pytest.raises(StopAsyncIteration):
                await anext(events)
        finally:
            done = await asyncio.to_thread(shipper.finish, process)
        assert done == 0, (node.folder / "shipper.log").read_text()
        # What the first server had is in the second one too, and a controller that comes back reads it all.
        anew = controller(tmp_path / "node", store)
        found = await stored.fetch(LEASE, str(anew.root), SystemClock())
    assert found is not None
    assert [e.type for e in found] == ["round_committed", "round_committed", "session_finished"]
    assert sorted(p.name for p in anew.rows.iterdir()) == ["0.parquet", "1.parquet"]


async def test_a_node_that_is_gone_leaves_what_it_had_shipped(tmp_path: Path, s3) -> None:
    """No last commit ever comes: what is there is brought after a wait."""
    store = s3.store(prefix="gone")
    node, here = Node(tmp_path / "node", store, "the-run"), controller(tmp_path, store)
    objects = stored.open_objects(store, "the-run", LEASE)
    assert objects is not None
    one = shipper.Shipper(node.run_dir.root, shipper.FolderObjects(node.folder / "spool"), objects)
    node.round(0)
    one.collect()
    one.push()
    node.round(1)  # and there it is taken away
    found = await stored.fetch(LEASE, str(here.root), SystemClock(), wait_s=0.2)
    assert found is not None
    assert [e.payload["round_id"] for e in found] == ["g/r0"]


async def test_a_folder_is_no_object_store(tmp_path: Path) -> None:
    here = controller(tmp_path, "results/")
    assert await stored.fetch(LEASE, str(here.root), SystemClock()) is None
    assert stored.through_store(json.dumps({"store": "s3://bucket/x"}))
    assert not stored.through_store(json.dumps({"store": "results/"}))


async def test_an_agent_that_died_without_a_word_ends_its_events(tmp_path: Path) -> None:
    """Its shipper goes on to the last commit: then nothing more is waited for, and nothing bills for it."""
    clock, store = VirtualClock(), FolderObjects(tmp_path / "bucket")
    node, here = Node(tmp_path / "node", "", "the-run"), controller(tmp_path, "")
    one = shipper.Shipper(node.run_dir.root, FolderObjects(node.folder / "spool"), store)
    node.round(0)
    one.collect(final=True)
    one.push()
    run = stored.StoredRun(Inner(), store, here, LEASE, clock)
    assert [e.type async for e in run.events()] == ["round_committed"]
    assert clock.monotonic_ns() < 60e9


@pytest.mark.parametrize("bucket", ["empty", "half", "refuses"])
async def test_rows_a_bucket_has_not_got_are_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    """A shipper without a credential, one that died in the middle, and a bucket that lets nobody read."""
    here, objects = controller(tmp_path, "s3://bucket/p"), FolderObjects(tmp_path / "bucket")
    if bucket == "half":
        node = Node(tmp_path / "node", "", "the-run")
        one = shipper.Shipper(node.run_dir.root, FolderObjects(node.folder / "spool"), objects)
        node.round(0)
        one.collect()
        one.push()

    def opened(*_: str) -> FolderObjects:
        if bucket == "refuses":
            monkeypatch.setattr(objects, "get", refuse)
        return objects

    def refuse(key: str) -> bytes:
        raise StoreError(f"{key}: AccessDenied")

    monkeypatch.setattr(stored, "open_objects", opened)
    pulled = [NewEvent("session_started", {"lease": LEASE, "plan_sha256": None}, "s1", source_of(LEASE), 1)]

    async def pull() -> list[NewEvent]:
        return pulled

    async def no_node() -> list[NewEvent]:
        raise ProviderError("unreachable", "the node is gone")

    assert await stored.brought(LEASE, str(here.root), VirtualClock(), pull) == pulled
    if bucket == "half":
        found = await stored.brought(LEASE, str(here.root), VirtualClock(), no_node)
        assert [e.type for e in found] == ["round_committed"]
    else:
        with pytest.raises(ProviderError, match="the node is gone"):
            await stored.brought(LEASE, str(here.root), VirtualClock(), no_node)


def test_a_credential_that_comes_late_does_not_end_the_shipper(tmp_path: Path) -> None:
    node = Node(tmp_path / "node", "", "the-run")
    node.round(0)
    reads, writes = os.pipe()

    class LateRole(FolderObjects):
        refused = 0

        def put(self, key: str, data: bytes) -> None:
            if self.refused < 2:
                self.refused += 1
                if self.refused == 2:
                    os.close(writes)  # the agent ends
                raise StoreError("no credential")
            super().put(key, data)

    remote = LateRole(tmp_path / "bucket")
    with os.fdopen(reads, "rb") as until:
        assert shipper.work(node.folder, remote, until, every_s=0.01)
    assert remote.refused == 2
    assert FolderObjects.keys(remote, "log/")
