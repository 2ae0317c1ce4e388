"""Rows through an object store: for every provider whose node cannot write into the run folder itself.

With `store: s3://...` the node's shipper writes there as it measures, and the controller follows from there; without,
the provider pulls over its own line. A provider needs two lines:

    return stored.followed(run, job, self._clock)        # at the end of `run_agent`
    return await stored.brought(handle.lease, run_dir, self._clock, pull)   # in `fetch`; `pull` is the provider's own line
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from campaign.clock import Clock
from campaign.cloud.base import AgentJob, AgentRun
from campaign.errors import ProviderError, StoreError, StoreUnreachable
from campaign.ledger import agent as agent_journal
from campaign.ledger.events import NewEvent
from campaign.store.follow import Follower
from campaign.store.layout import RunDir
from campaign.store.objects import ObjectStore, open_objects

POLL_S = 2.0
SILENT_S = 600.0
"""The store may not answer for so long; meanwhile the agent measures on, and the heartbeat gate decides."""
FINAL_S = 30.0
"""Wait for the node's last commit: its logs come after its last word."""


def spec_store(spec_json: str) -> str:
    """The `store:` of a resolved spec."""
    return str(json.loads(spec_json).get("store", ""))


def through_store(spec_json: str) -> bool:
    """Whether rows of this spec's nodes come through an object store."""
    return "://" in spec_store(spec_json)


def follower(objects: ObjectStore, run_dir: RunDir, lease: str) -> Follower:
    """The reading half for one lease."""
    return Follower(objects, run_dir.root, agent_journal.journal_path(run_dir, lease).name)


def followed(run: AgentRun, job: AgentJob, clock: Clock) -> AgentRun:
    """The same agent, its events and files taken from the store where the spec names one."""
    objects = open_objects(spec_store(job.spec_json), job.intent.run, job.intent.lease)
    if objects is None:
        return run
    return StoredRun(run, objects, RunDir(Path(job.intent.run_dir)), job.intent.lease, clock)


async def brought(
    lease: str,
    run_dir: str,
    clock: Clock,
    pull: Callable[[], Awaitable[Sequence[NewEvent]]],
    wait_s: float = FINAL_S,
) -> Sequence[NewEvent]:
    """Everything of a lease: from the store, and by `pull` where the store has not all of it or cannot be read.

    A shipper without a credential, or one that died, leaves the store empty and the node's disk full. Raises what
    `pull` raises where the store had nothing either.
    """
    shipped: Sequence[NewEvent] = ()
    follow = _of_run(lease, run_dir)
    if follow is not None:
        with suppress(ProviderError, StoreError):
            shipped = await drain(follow, RunDir(Path(run_dir)), lease, clock, wait_s)
        if follow.final:
            return shipped
    try:
        return await pull()
    except ProviderError:
        if not shipped:
            raise
        return shipped  # the node is gone: what it had sent is here


async def fetch(lease: str, run_dir: str, clock: Clock, wait_s: float = FINAL_S) -> Sequence[NewEvent] | None:
    """Everything of a lease that is in the store, and the events of its journal; None where there is no store.

    Needs no node: what a preempted one had shipped is here all the same. Raises ProviderError('unreachable').
    """
    follow = _of_run(lease, run_dir)
    return None if follow is None else await drain(follow, RunDir(Path(run_dir)), lease, clock, wait_s)


def _of_run(lease: str, run_dir: str) -> Follower | None:
    folder = RunDir(Path(run_dir))
    try:
        store = spec_store(folder.canonical.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    objects = open_objects(store, folder.name, lease)
    return None if objects is None else follower(objects, folder, lease)


async def drain(
    follow: Follower, run_dir: RunDir, lease: str, clock: Clock, wait_s: float = FINAL_S
) -> Sequence[NewEvent]:
    """Follow until the node's last commit, or until nothing came for `wait_s`."""
    quiet_since = clock.monotonic_ns()
    while not follow.final:
        try:
            if await asyncio.to_thread(follow.poll):
                quiet_since = clock.monotonic_ns()
                continue
        except StoreUnreachable as error:
            if clock.monotonic_ns() - quiet_since >= wait_s * 1e9:
                raise ProviderError("unreachable", str(error)) from error
        if clock.monotonic_ns() - quiet_since >= wait_s * 1e9:
            break
        await clock.sleep(min(POLL_S, wait_s))
    return agent_journal.read(agent_journal.journal_path(run_dir, lease), agent_journal.source_of(lease))


class StoredRun:
    """An `AgentRun` whose events come through the store; told to stop over the provider's own line."""

    def __init__(
        self, inner: AgentRun, objects: ObjectStore, run_dir: RunDir, lease: str, clock: Clock
    ) -> None:
        self._inner, self._clock = inner, clock
        self._follow = follower(objects, run_dir, lease)
        self._local = agent_journal.journal_path(run_dir, lease)
        self._session = lease.rpartition(".")[0]
        self._killed = False

    async def events(self) -> AsyncIterator[NewEvent]:
        """Whole events in order, their files here before them; ends with session, shipper or `kill`.

        Raises ProviderError('unreachable') once the store has not answered for SILENT_S.
        """
        offset, heard = 0, self._clock.monotonic_ns()
        while not self._killed:
            try:
                more = await asyncio.to_thread(self._follow.poll)
                heard = self._clock.monotonic_ns()
            except StoreUnreachable as error:
                if self._clock.monotonic_ns() - heard >= SILENT_S * 1e9:
                    raise ProviderError("unreachable", str(error)) from error
                more = False
            except StoreError as error:
                raise ProviderError("unreachable", str(error)) from error
            found, offset = agent_journal.follow(self._local, offset)
            for event in found:
                yield event
                if event.type == "session_finished" and event.session == self._session:
                    return
            if not more and self._follow.final:
                return  # the shipper outlived an agent that died without a last word
            if not more:
                await self._clock.sleep(POLL_S)

    async def stop(self, why: str, gate: str | None = None) -> None:
        await self._inner.stop(why, gate)

    async def kill(self) -> None:
        self._killed = True
        await self._inner.kill()

    async def add(self, data: bytes) -> None:
        """Send an addition for a session that is held. Raises ProviderError."""
        add = getattr(self._inner, "add", None)
        if add is None:
            raise ProviderError("refused", "nothing can be added on this node")
        await add(data)

    async def extend(self, deadline_utc_ns: int, worst_usd_micro: int) -> None:
        """Tell the node of an extension the controller has admitted. Raises ProviderError."""
        extend = getattr(self._inner, "extend", None)
        if extend is None:
            raise ProviderError("refused", "this node cannot be told of an extension")
        await extend(deadline_utc_ns, worst_usd_micro)
