"""Builds what a session needs: the same classes, in this process or in Ray actors of their own."""

import os
from collections.abc import Iterable
from typing import Protocol, cast

from campaign.client.base import Client, Job
from campaign.client.http import HttpClient
from campaign.client.process import ProcessClient
from campaign.client.split import SplitClient
from campaign.clock import SystemClock
from campaign.engines.base import BootOrder
from campaign.engines.host import LocalEngineHost
from campaign.engines.readiness import CEILING
from campaign.fleet.actors import Remote, spawn
from campaign.session.ports import EngineHost, Ports, Telemetry
from campaign.session.telemetry import HostTelemetry
from campaign.spec.models import Arm

SLACK_S = 30.0
"""Added to an operation's own limit before the actor call is given up."""


class PortsFactory(Protocol):
    """Makes the ports of one session."""

    def __call__(self) -> Ports:
        """Fresh parts, owned by the session that asked."""
        ...


def inline_ports() -> Ports:
    """All parts in this process, but for further client processes where one core is not enough."""
    clock = SystemClock()
    client = SplitClient(ProcessClient, first=HttpClient())
    return Ports(host=LocalEngineHost(clock), client=client, telemetry=HostTelemetry(clock))


class _EngineHostActor(LocalEngineHost):
    def __init__(self) -> None:
        super().__init__(SystemClock())


class _TelemetryActor(HostTelemetry):
    def __init__(self) -> None:
        super().__init__(SystemClock())


class _RemotePart(Remote):
    """A part whose process ends with it."""

    async def close(self) -> None:
        try:
            await self.__getattr__("close")()
        finally:
            self.kill()


def ray_ports() -> Ports:
    """Each part in an actor: the client's core is its own, and a dying engine takes nobody with it."""

    def boot_limit(order: BootOrder) -> float:
        # The limit is on silence; a boot that makes progress may take CEILING times as long.
        return CEILING * order.boot_timeout_s + SLACK_S

    def run_limit(job: Job) -> float:
        return job.timeout_s + SLACK_S

    host = _RemotePart(spawn(_EngineHostActor), {"boot": boot_limit})

    def client() -> Client:
        return cast(Client, _RemotePart(spawn(HttpClient, concurrency=2000), {"run": run_limit}))

    telemetry = _RemotePart(spawn(_TelemetryActor))
    return Ports(
        host=cast(EngineHost, host), client=SplitClient(client), telemetry=cast(Telemetry, telemetry)
    )


OWN_CORES = 2
"""Cores left to client and telemetry beside a GPU engine that does not say how many threads it takes."""


def engine_threads(arms: Iterable[Arm]) -> int | None:
    """Cores that the engines of a session are to have; None where a GPU engine does not say.

    A GPU engine is several busy processes (scheduler, tokenizer, detokenizer): one core would starve it.
    """
    wanted = [(arm.threads, arm.engine) for arm in arms]
    if any(threads is None and engine in {"sglang", "vllm"} for threads, engine in wanted):
        return None
    return max((threads or 1 for threads, _ in wanted), default=1)


def engine_cores(threads: int | None) -> tuple[int, ...]:
    """Cores to pin engines to: the last `threads` ones, if that leaves at least one for everything else.

    None: all but the first few, on a node that has plenty.
    """
    cores = sorted(os.sched_getaffinity(0))
    if threads is None:
        return tuple(cores[OWN_CORES:]) if len(cores) >= 4 * OWN_CORES else ()
    return tuple(cores[-threads:]) if len(cores) > threads else ()
