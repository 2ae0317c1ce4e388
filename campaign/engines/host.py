"""LocalEngineHost: starts servers on this machine, proves what started, and leaves nothing behind."""

import asyncio
import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from campaign.clock import Clock, SystemClock, iso
from campaign.engines import child as children
from campaign.engines import (
    container,
    effective,
    failures,
    fetch,
    gpu,
    gpus,
    procfs,
    runtimes,
    upkeep,
    weights,
)
from campaign.engines.api import Api
from campaign.engines.base import BootOrder, BootRecord, Counters, Engine, Launch
from campaign.engines.logs import LogTail, last_lines, scrub
from campaign.engines.prometheus import Poller
from campaign.engines.readiness import Failed, Look, Readiness, await_ready, check_alive
from campaign.engines.registry import get as get_engine
from campaign.errors import EngineError
from campaign.redact import REDACTOR, secret_values
from campaign.spec.models import Arm

PORT_TRIES = 3
"""We chose the port, so one that is taken meanwhile is ours to replace."""
_LOOPBACK = "127.0.0.1"
_HTTP_S = 5.0
_TAIL = 64 * 1024
_DYING_S = 1.0
_QUIET_S = 5.0
"""A known failure in the log of a live server ends its boot once the log has been silent for this long."""
# Engines compile kernels at the first start: with another compiler than the node's own they would do it again.
_TOOLCHAIN = ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "LIBRARY_PATH", "CPATH")
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", *_TOOLCHAIN)
ENV_VALUES = frozenset(
    {
        *("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
        *_TOOLCHAIN,
    }
)
"""Variables whose values are recorded, besides those that the arm sets; of all others only the name."""
_HUB = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN")
"""Inherited too: where weights of the hub are found, and the key to closed ones."""


@dataclass(slots=True)
class _Server:
    order: BootOrder
    engine: Engine
    launch: Launch
    child: children.Child
    port: int
    log: LogTail
    state: Readiness
    clock: Clock
    poller: Poller
    created: float | None = None
    gpus_before: gpus.Use | None = None
    failed: Failed | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    """Its pages as they were at boot, and the log so far."""
    stopping: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last: tuple[int, int] = (-1, 0)

    @property
    def base_url(self) -> str:
        return f"http://{_LOOPBACK}:{self.port}"

    # --- readiness.Probe

    async def look(self) -> Look:
        alive, owner = self.child.poll(), self.owner()
        if owner == "foreign" and _contained(self.order):
            # A container that dies holds its port for a moment after it has left our tree.
            await self.clock.sleep(_DYING_S)
            alive, owner = self.child.poll(), self.owner()
        grown = self.log.grown()
        if grown != self._last[0]:
            self._last = (grown, self.clock.monotonic_ns())
        failure = None
        if not alive or self.clock.monotonic_ns() - self._last[1] > _QUIET_S * 1e9:
            failure = self.engine.failure(self.log.text(_TAIL))
        if not alive and failure is None:
            failure = failures.of_status(self.child.status)
        return Look(alive, owner, grown, failure)

    def owner(self) -> Literal["ours", "foreign", "none"]:
        """Who listens on the port: only our tree, nobody, or (also) somebody else."""
        found = procfs.listeners(self.port)
        if not found:
            return "none"
        ours = procfs.sockets(self.child.pids())
        return "ours" if all(x.inode in ours for x in found) else "foreign"

    def main_pid(self) -> int:
        """The server: our child, or in a container whoever of its tree listens on the port."""
        if not _contained(self.order):
            return self.child.pid
        inodes = {x.inode for x in procfs.listeners(self.port)}
        pids = [p for p in self.child.pids() if inodes & set(procfs.sockets([p]))]
        return pids[0] if pids else self.child.pid

    async def get(self, path: str) -> tuple[int | None, tuple[str, ...] | None]:
        if path == "/health":
            path = str(getattr(self.engine, "health_path", path))
        try:
            status, body = await fetch.get(self.base_url + path, self.launch.headers, _HTTP_S)
        except (OSError, TimeoutError):
            return None, None
        if path != "/v1/models" or status != 200:
            return status, None
        return status, _model_ids(body)

    async def token(self, timeout_s: float) -> Literal["produced", "refused", "hung"]:
        body = {
            "model": self.engine.model_id(self.order),
            "prompt": "1 2 3",
            "max_tokens": 1,
            "temperature": 0,
            **self.engine.request_extras(self.order.config),
        }
        try:
            status, raw = await fetch.post(
                self.base_url + "/v1/completions", self.launch.headers, body, timeout_s
            )
            if status in {404, 405, 501}:  # a server that only chats
                body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
                status, raw = await fetch.post(
                    self.base_url + "/v1/chat/completions", self.launch.headers, body, timeout_s
                )
            produced = status == 200 and json.loads(raw)["usage"]["completion_tokens"] == 1
        except TimeoutError:
            return "hung"
        except (OSError, ValueError, KeyError, TypeError):
            return "refused"
        return "produced" if produced else "refused"


class LocalEngineHost:
    """`session.ports.EngineHost` for processes of this machine, several at once."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        engines: Callable[[str], Engine] = get_engine,
        token_timeout_s: float = 30.0,
        seed: int | None = None,
        look_at: gpus.Look = gpus.look,
    ) -> None:
        self._clock = clock or SystemClock()
        self._engines = engines
        self._token_timeout_s = token_timeout_s
        self._look_at = look_at
        self._servers: dict[str, _Server] = {}
        self._ended: dict[str, tuple[str, str]] = {}
        self._endpoints: set[str] = set()
        """Boots that are a provider's endpoint: nothing of ours runs."""
        self._ports: set[int] = set()
        self._rng = random.Random(seed)  # noqa: S311  # spreads ports, guards nothing

    async def boot(self, order: BootOrder) -> BootRecord:
        """Start a server and wait until it is ready. Raises EngineError, or PreflightError before starting.

        A port that somebody takes between our choice and the server's bind is replaced, `PORT_TRIES` times
        in all; nothing else is retried here.
        """
        if order.boot_id in self._servers:
            raise EngineError("config", f"{order.boot_id} is already running")
        engine = bound(self._engines(order.config.engine or ""), order.config)
        await asyncio.to_thread(engine.preflight, order.config, order.models)
        if isinstance(engine, Api):
            record = await engine.connect(order, self._clock)
            self._endpoints.add(order.boot_id)
            return record
        self._free(order)
        for attempt in range(1, PORT_TRIES + 1):
            try:
                return await self._boot_on(order, engine, procfs.free_port(self._ports, self._rng))
            except EngineError as error:
                if error.kind not in {"port_taken", "port_owned_by_other"} or attempt == PORT_TRIES:
                    raise
            except OSError as error:
                raise EngineError("port_taken", str(error)) from error
        raise AssertionError("unreachable")

    def _free(self, order: BootOrder) -> None:
        """Raises EngineError where the GPUs of this boot are in use by somebody else, or by another boot of ours."""
        taken = {
            g: s.order.boot_id
            for s in self._servers.values()
            for g in s.order.gpus
            if not (order.shared and s.order.shared)
        }
        shared = [g for g in order.gpus if g in taken]
        if shared:
            raise EngineError("config", f"{order.boot_id}: GPU {shared[0]} is in use by {taken[shared[0]]}")
        strangers = self._strangers(order)
        if strangers:
            listed = ", ".join(f"pid {pid} ({mib:.0f} MiB)" for pid, mib in strangers.items())
            gpus_ = ", ".join(map(str, order.gpus))
            raise EngineError(
                "not_effective", f"{order.boot_id}: another process is on GPU {gpus_}: {listed}"
            )

    def _strangers(self, order: BootOrder) -> dict[int, float]:
        ours = {pid for server in self._servers.values() for pid in server.child.pids()}
        return gpus.foreign(self._look_at(order.gpus), ours)

    async def foreign(self, boot_id: str) -> str | None:
        """Who else is on the GPUs of a boot now; None where nobody is, or nobody can tell."""
        server = self._servers.get(boot_id)
        found = {} if server is None else await asyncio.to_thread(self._strangers, server.order)
        return ", ".join(f"pid {pid} ({mib:.0f} MiB)" for pid, mib in found.items()) or None

    async def _boot_on(self, order: BootOrder, engine: Engine, port: int) -> BootRecord:
        launch = await asyncio.to_thread(engine.launch, order, port)
        if _contained(order):
            launch = await asyncio.to_thread(container.wrap, order, launch)
        self._ports.add(port)
        environment = {**_environment(launch), **(container.passed() if _contained(order) else {})}
        for value in (*launch.headers.values(), *secret_values(environment)):
            REDACTOR.hide(value.rpartition(" ")[2])
        log = LogTail(Path(order.log_path))
        before = await asyncio.to_thread(self._look_at, order.gpus)
        spawned_ns = self._clock.monotonic_ns()
        try:
            child = await children.start(
                launch.argv, env=environment, cwd=launch.cwd, cpus=order.cpus, log_path=log.path
            )
        except BaseException:
            self._ports.discard(port)
            raise
        state = Readiness(engine.model_id(order), spawned_ns, order.boot_timeout_s)
        server = _Server(
            order, engine, launch, child, port, log, state, self._clock, Poller(engine.read_counters)
        )
        server.gpus_before = before
        self._servers[order.boot_id] = server
        try:
            return await self._ready(server)
        except BaseException as error:
            kind = error.kind if isinstance(error, EngineError) else "died"
            await asyncio.shield(self._end(server, (kind, str(error))))
            raise

    async def _ready(self, server: _Server) -> BootRecord:
        failed = await await_ready(server.state, server, self._clock)
        if failed or server.state.ready_ns is None:
            failed = failed or Failed("died", "ended while it was being proven ready")
            raise EngineError(failed.kind, _message(server.order, failed, server.log))
        return await self._record(server, server.state.ready_ns - server.state.started_ns)

    async def _record(self, server: _Server, boot_ns: int) -> BootRecord:
        """Read what really started; raises EngineError('not_effective') where it is not what was asked."""
        order, engine = server.order, server.engine
        log = server.log.text()
        info = await _info(server, log)
        live = await asyncio.to_thread(procfs.describe, server.main_pid())
        server.created, server.info = live["created"], info
        asked = effective.requested(order.config)
        in_force = dict(engine.effective(info))
        differences = [
            *effective.diff(asked, in_force),
            *effective.log_differences(log, order.config.env, order.config.extra_args),
            *_process_differences(server, live),
        ]
        if differences:
            text = "; ".join(str(d) for d in differences)
            raise EngineError("not_effective", REDACTOR.text(f"{order.boot_id}: {text}"))
        env = live.pop("env")
        provenance = {
            **live,
            "argv": REDACTOR.argv(live["argv"]),
            "env": REDACTOR.env(env, ENV_VALUES | set(order.config.env)),
            "created": iso(int(live["created"] * 1e9)),
            "versions": {
                **engine.versions(),
                **await asyncio.to_thread(runtimes.versions, live["argv"][0], order),
            },
            "runtime": _runtime(order),
            "patches": {patch.target: patch.sha256 for patch in order.config.patches},
            "gpus": list(order.gpus),
            "gpu_identity": await asyncio.to_thread(gpus.identity, order.gpus),
            "weights": await asyncio.to_thread(weights.identity, order.config, order.models),
            "requested": asked,
            "effective": in_force,
            "unconfirmed": list(effective.unconfirmed(asked, in_force)),
            "comparison": effective.table(asked, in_force),
            "info": REDACTOR.json({k: v for k, v in info.items() if k != "log"}),
            "engine": engine.name,
            "arm": order.arm,
            "arm_hash": order.arm_hash,
            "place": order.place,
            "port": server.port,
            "listening": sorted({f"{x.address}:{x.port}" for x in procfs.listeners(server.port)}),
            "log": Path(order.log_path).name,
        }
        return BootRecord(
            boot_id=order.boot_id,
            base_url=server.base_url,
            model_id=engine.model_id(order),
            pid=server.child.pid,
            port=server.port,
            boot_ns=boot_ns,
            gpu_set=",".join(str(g) for g in order.gpus) or "cpu",
            provenance=provenance,
            headers=dict(server.launch.headers),
        )

    async def counters(self, boot_id: str) -> Counters | None:
        """One scrape; the start time of the process is the kernel's where the page does not say."""
        server = self._servers.get(boot_id)
        path = server.engine.metrics_path() if server else None
        if server is None or path is None:
            return None
        found = await server.poller.scrape(
            lambda: fetch.get(server.base_url + path, server.launch.headers, _HTTP_S)
        )
        if found is None or found.started is not None:
            return found
        from dataclasses import replace

        reasons = tuple(r for r in found.reasons if r != "started:absent")
        return replace(found, started=server.created, reasons=reasons)

    async def alive(self, boot_id: str) -> bool:
        """Our child lives, alone owns the port, and produces a token within the limit.

        The token moves the server's counters: take a new scrape before the next request.
        """
        server = self._servers.get(boot_id)
        if server is None:
            # An endpoint that fails shows in its requests; asking costs tokens.
            return boot_id in self._endpoints
        server.failed = await check_alive(server.state, server, self._clock, self._token_timeout_s)
        return server.failed is None

    async def loading(self, boot_id: str) -> dict[str, Any]:
        """How far a boot's weights are: `{shards, of, left}` from its log; empty where it does not say."""
        server = self._servers.get(boot_id)
        found = None if server is None else gpu.shards(server.log.text(_TAIL))
        return {} if found is None else {"shards": found[0], "of": found[1], "left": found[2]}

    async def settle(self, boot_id: str) -> dict[str, Any]:
        """Wait until the server holds no request, then have it forget earlier ones (campaign.engines.upkeep)."""
        server = self._servers.get(boot_id)
        if server is None:
            return {"drained": None, "cache_reset": "none", "why": None}
        return await upkeep.settle(
            server.engine, server.order.config, server.base_url, server.launch.headers, self._clock
        )

    async def recheck(self, boot_id: str) -> dict[str, Any]:
        """Read the pages again: `{effective: [differences as text], pages: [members that changed]}`."""
        server = self._servers.get(boot_id)
        if server is None:
            return {"effective": [], "pages": []}
        info = await _info(server, server.log.text())
        before, after = server.engine.effective(server.info), dict(server.engine.effective(info))
        changed = [
            str(effective.Difference(name, str(value), str(after[name])))
            for name, value in before.items()
            if after.get(name) is not None and after[name] != value
        ]
        return {
            "effective": changed,
            "pages": cast("list[Any]", REDACTOR.json(upkeep.changes(server.info, info))),
        }

    async def why_dead(self, boot_id: str) -> tuple[str, str]:
        """(kind, last lines of the log); from the log, the exit status, or the last probe."""
        server = self._servers.get(boot_id)
        if server is None:
            return self._ended.get(boot_id, ("died", "never started"))
        alive = server.child.poll()
        tail = server.log.text(_TAIL)
        if alive and server.failed:
            kind, why = server.failed.kind, server.failed.why
        else:
            kind, why = server.engine.failure(tail) or failures.of_status(server.child.status)
        return kind, REDACTOR.text(f"{why}\n{last_lines(tail)}")

    async def stop(self, boot_id: str) -> None:
        """End the whole tree, wait until it is gone and its port is free. Idempotent."""
        self._endpoints.discard(boot_id)
        server = self._servers.get(boot_id)
        if server is not None:
            await asyncio.shield(self._end(server, ("stopped", "stopped by us")))

    async def close(self) -> None:
        """Stop every server. The host can be used again."""
        await asyncio.gather(*(self.stop(name) for name in list(self._servers)))

    def _partners(self, server: _Server) -> list[_Server]:
        """Other servers of ours on its GPUs."""
        mine = set(server.order.gpus)
        return [s for s in self._servers.values() if s is not server and mine & set(s.order.gpus)]

    async def _end(self, server: _Server, why: tuple[str, str]) -> None:
        async with server.stopping:
            if self._servers.get(server.order.boot_id) is not server:
                return
            pids = server.child.pids()
            await asyncio.to_thread(server.child.end)
            partners = self._partners(server)
            if partners:
                # Theirs stays: only what our processes held must go. What was there before us is their baseline now.
                for partner in partners:
                    partner.gpus_before = gpus.lowest(
                        server.order.gpus, server.gpus_before, partner.order.gpus, partner.gpus_before
                    )
                released = await asyncio.to_thread(
                    gpus.wait_gone, server.order.gpus, pids, look_at=self._look_at
                )
            else:
                released = await asyncio.to_thread(
                    gpus.wait_released, server.order.gpus, server.gpus_before, look_at=self._look_at
                )
            if not released:
                why = (why[0], f"{why[1]}; its GPU memory was not given back within {gpus.RELEASE_S:.0f} s")
            for _ in range(100):
                if server.owner() == "foreign" or procfs.port_is_free(server.port):
                    break
                await self._clock.sleep(0.05)
            if _contained(server.order):
                await asyncio.to_thread(container.sweep, server.order.boot_id)
            # Nobody writes to it any more; what the server said of keys must not stay in the run folder.
            await asyncio.to_thread(scrub, server.log.path)
            self._ports.discard(server.port)
            self._ended[server.order.boot_id] = why
            del self._servers[server.order.boot_id]


def bound(engine: Engine, arm: Arm) -> Engine:
    """The adapter of one arm, for an engine whose pages and counters the arm declares."""
    bind = getattr(engine, "for_arm", None)
    return engine if bind is None else cast("Engine", bind(arm))


def _contained(order: BootOrder) -> bool:
    return order.runtime is not None and order.runtime.image is not None


def _runtime(order: BootOrder) -> dict[str, Any] | None:
    """How the engine got here; an image by its digest."""
    if order.runtime is None:
        return None
    given = order.runtime.model_dump(exclude_none=True)
    if order.runtime.image is not None and (found := runtimes.DIGEST.search(order.runtime.image)):
        given["image_digest"] = found[1]
    return cast("dict[str, Any]", REDACTOR.json(given))


def _environment(launch: Launch) -> dict[str, str]:
    """Explicit and minimal: what a shell exported today must not change a measurement."""
    return {**{k: os.environ[k] for k in (*_INHERITED, *_HUB) if k in os.environ}, **launch.env}


def _process_differences(server: _Server, live: Mapping[str, Any]) -> list[effective.Difference]:
    out = []
    bound = {x.address for x in procfs.listeners(server.port)}
    if bound != {_LOOPBACK}:
        out.append(effective.Difference("host", _LOOPBACK, ", ".join(sorted(bound)) or "nothing"))
    if server.order.cpus and sorted(live["cpu_affinity"]) != sorted(server.order.cpus):
        out.append(effective.Difference("cpus", str(server.order.cpus), str(live["cpu_affinity"])))
    for name, value in server.launch.env.items():
        if live["env"].get(name) != value:
            out.append(effective.Difference(f"env {name}", "set", "not in the process"))
    return out


def _model_ids(body: bytes) -> tuple[str, ...] | None:
    try:
        return tuple(str(m["id"]) for m in json.loads(body)["data"])
    except (ValueError, KeyError, TypeError):
        return None


async def _info(server: _Server, log: str) -> dict[str, Any]:
    info: dict[str, Any] = {"log": log}
    for path in server.engine.info_paths():
        info[path] = await _json(server.base_url + path, server.launch.headers)
    return info


async def _json(url: str, headers: Mapping[str, str]) -> Any:
    try:
        status, body = await fetch.get(url, headers, _HTTP_S)
        return json.loads(body) if status == 200 else None
    except (OSError, TimeoutError, ValueError):
        return None


def _message(order: BootOrder, failed: Failed, log: LogTail) -> str:
    tail = last_lines(log.text(_TAIL), 5)
    return REDACTOR.text(f"{order.boot_id}: {failed.why}" + (f"\n{tail}" if tail else ""))
