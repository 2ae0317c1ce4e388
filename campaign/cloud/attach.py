"""`provider: attach`: a host you have over SSH, or an existing SkyPilot cluster. Never taken down.

Only processes that we started are ended, only GPU indexes that the file names are used, and a set of GPUs is held
with flock on the host, so that two of us do not share one. No dead-man: the node is not ours to end.
"""

import hashlib
import json
import os
import secrets
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from campaign.clock import Clock
from campaign.cloud import naming, shipping, sky_sdk, stored, templates
from campaign.cloud.base import AgentJob, AgentRun, LaunchIntent, NodeHandle, Proof, Quote
from campaign.cloud.follow import SkyAgentRun, order_files
from campaign.cloud.shell import NodeShell
from campaign.cloud.sky_ssh import ssh_argv
from campaign.errors import ProviderError
from campaign.ledger import agent as agent_journal
from campaign.ledger.events import NewEvent
from campaign.money import micro
from campaign.plan import codec
from campaign.spec.load import parse_canonical
from campaign.spec.models import AttachNode, Node
from campaign.store.layout import RunDir

TEARDOWN_S = 30
SETUP_S = 1800.0
HELD = 75
"""Exit code of the holder where somebody else has a GPU."""


class AttachProvider:
    """Implements Provider over SSH."""

    name = "attach"

    def __init__(self, clock: Clock, cache: Path) -> None:
        self._clock, self._cache = clock, cache
        self._runs: dict[str, SkyAgentRun] = {}

    async def quote(self, node: Node) -> Quote:
        node = _attached(node)
        return Quote(
            usd_per_hour=micro(node.usd_per_hour),
            granularity_s=1,
            source="declared",
            free_allowed=True,
            dead_man_s=0,
            teardown_s=TEARDOWN_S,
        )

    def expected(self, intent: LaunchIntent) -> NodeHandle:
        node = _attached(intent.node)
        data = {
            "deadline_utc_ns": intent.deadline_utc_ns,
            "session": intent.session,
            "folder": f"attach-{naming.lease_key(intent.run, intent.lease)}",
            "ssh": node.ssh,
            "cluster": node.cluster,
        }
        where = hashlib.sha256(f"{node.ssh or node.cluster}".encode()).hexdigest()[:12]
        return NodeHandle(
            lease=intent.lease, node_id=f"attach-{where}", usd_per_hour=micro(node.usd_per_hour), granularity_s=1,
            price_source="declared", dead_men=(), ours=False, data=data,
        )  # fmt: skip

    async def launch(self, intent: LaunchIntent) -> NodeHandle:
        """Hold the GPUs, then make the environment. Raises ProviderError('capacity') where a GPU is held."""
        handle, node = self.expected(intent), _attached(intent.node)
        run_dir = RunDir(Path(intent.run_dir))
        session = next(s for s in codec.load(run_dir.plan.read_bytes()).sessions if s.name == intent.session)
        spec = parse_canonical(run_dir.canonical.read_bytes())
        home = await self._shell(handle, "")
        folder = handle.data["folder"]
        await home.run(f"mkdir -p {folder}/control {folder}/run {folder}/files locks && chmod 700 {folder}")
        left_s = max(1, round((intent.deadline_utc_ns - self._clock.utc_ns()) / 1e9))
        await self._hold(home, folder, node.gpus, left_s)
        shell = await self._shell(handle)
        built = shipping.wheel(self._cache)
        files = {"files/node_setup.sh": templates.path("node_setup.sh").read_bytes()}
        files["files/constraints.txt"] = shipping.pins(self._cache).read_bytes()
        if built is not None:
            files[f"files/{built.name}"] = built.read_bytes()
        await shell.push(files)
        there = f"@FILES@/{built.name}" if built is not None else None
        requirement = shlex.quote(shipping.requirement(there, session))
        extras = " ".join(shlex.quote(p) for p in shipping.weight_packages(spec, session))
        script = (
            f"r={requirement}; UV_CACHE_DIR=~/.cache/campaign-uv bash -l files/node_setup.sh venv "
            '"${r/@FILES@/$PWD/files}" files/constraints.txt; '
            f"for e in {extras}; do bash -lc 'uv=$(command -v uv || command -v uv-real || true); "
            'if [ -n "$uv" ]; then UV_CACHE_DIR=~/.cache/campaign-uv "$uv" pip install -q --no-deps -p venv/bin/python "$0"; '
            'else venv/bin/python -m pip install -q --no-deps "$0"; fi\' "$e" || exit 1; done'
        )
        try:
            await shell.run(f"set -e; {script}", timeout_s=SETUP_S)
        except ProviderError as error:
            raise ProviderError("setup", f"{_where(handle)}: {error}") from error
        return handle

    async def _hold(self, home: NodeShell, folder: str, gpus: Sequence[int], left_s: int) -> None:
        """A process on the host that holds one lock a GPU for as long as the lease lasts, and no longer."""
        locks = "; ".join(
            f"exec {20 + i}>locks/gpu-{gpu}; flock -n {20 + i} || exit {HELD}" for i, gpu in enumerate(gpus)
        )
        holder = f"{locks or ':'}; echo $$ > {folder}/holder.pid; exec sleep {left_s}"
        script = (
            f"rm -f {folder}/holder.pid; setsid nohup bash -c {shlex.quote(holder)} >/dev/null 2>&1 </dev/null & h=$!; "
            f"for _ in $(seq 1 50); do [ -s {folder}/holder.pid ] && echo held && exit 0; "
            f"kill -0 $h 2>/dev/null || break; sleep 0.1; done; [ -s {folder}/holder.pid ] && echo held || echo taken"
        )
        if (await home.run(script)).strip() != b"held":
            shown = ", ".join(map(str, gpus))
            raise ProviderError(
                "capacity", f"GPUs {shown} of this host are held by another session of campaign"
            )

    async def observe(self, handle: NodeHandle) -> Literal["up", "gone", "unreachable", "preempted"]:
        try:
            await (await self._shell(handle, "")).run("true")
        except ProviderError:
            return "unreachable"
        return "up"

    async def run_agent(self, handle: NodeHandle, job: AgentJob) -> AgentRun:
        shell, run_dir = await self._shell(handle), RunDir(Path(job.intent.run_dir))
        key = secrets.token_hex(32)
        assert job.terms is not None
        order = {
            "run": job.intent.run,
            "campaign": job.intent.campaign,
            "session": job.intent.session,
            "node_id": handle.node_id,
            "terms": asdict(job.terms),
            "key": key,
            "attempts": job.attempts,
            "done": list(job.done),
            "overrides": list(job.overrides),
        }
        await shell.push({**order_files(run_dir), "order.json": json.dumps(order).encode()})
        agent = 'venv/bin/python -m campaign.fleet.node_agent "$PWD" > agent.log 2>&1; echo $? > exit.tmp; mv exit.tmp exit'
        await shell.run(
            f"setsid nohup bash -c {shlex.quote('echo $$ > agent.pid; ' + agent)} >/dev/null 2>&1 </dev/null & "
            "for _ in $(seq 1 50); do [ -s agent.pid ] && exit 0; sleep 0.1; done; exit 1"
        )
        run = SkyAgentRun(shell, run_dir, job.intent.session, handle.lease, key, self._clock)
        self._runs[handle.lease] = run
        return stored.followed(run, job, self._clock)

    async def fetch(self, handle: NodeHandle, run_dir: str) -> Sequence[NewEvent]:
        async def pull() -> Sequence[NewEvent]:
            shell, local = await self._shell(handle), Path(run_dir)
            lease = handle.lease
            await shell.pull("run", local, everything=True, session=lease.rpartition(".")[0])
            return agent_journal.read(
                agent_journal.journal_path(RunDir(local), lease), agent_journal.source_of(lease)
            )

        return await stored.brought(handle.lease, run_dir, self._clock, pull)

    async def down(self, handle: NodeHandle) -> None:
        """End our agent, politely first, and let the GPUs go. The host stays as it is."""
        folder = handle.data["folder"]
        script = (
            f"cd {folder} 2>/dev/null || exit 0; for f in agent.pid holder.pid; do p=$(cat $f 2>/dev/null) || continue; "
            '{ tr "\\0" " " < /proc/$p/cmdline; } 2>/dev/null | grep -q -e campaign -e sleep -e node_agent || continue; '
            'kill -TERM -- "-$p" 2>/dev/null; for _ in $(seq 1 100); do kill -0 -- "-$p" 2>/dev/null || break; sleep 0.1; '
            'done; kill -KILL -- "-$p" 2>/dev/null; done; rm -rf venv files; true'
        )
        await (await self._shell(handle, "")).run(script)

    async def prove_down(self, handle: NodeHandle) -> Proof:
        folder, where = handle.data["folder"], _where(handle)
        by_hand = f"ssh {where} ps -ef"
        script = (
            f"cd {folder} 2>/dev/null || exit 0; for f in agent.pid holder.pid; do p=$(cat $f 2>/dev/null) || continue; "
            'kill -0 -- "-$p" 2>/dev/null && echo "$p"; done; true'
        )
        left = (await (await self._shell(handle, "")).run(script)).split()
        if left:
            return Proof(
                gone=False, how=f"processes {b' '.join(left).decode()} of ours run on", check_by_hand=by_hand
            )
        return Proof(
            gone=True,
            how=f"none of our processes is left on {where}; it is not ours to end",
            check_by_hand=by_hand,
        )

    async def list_ours(self, install_id: str) -> Sequence[NodeHandle]:  # noqa: ARG002  # contract
        """A host that is not ours to end is not listed as one that is."""
        return ()

    async def _shell(self, handle: NodeHandle, folder: str | None = None) -> NodeShell:
        cluster, ssh = handle.data["cluster"], handle.data["ssh"]
        if cluster:
            argv = await sky_sdk.in_thread(lambda: ssh_argv(str(cluster), self._cache.parent / "ssh"), "ssh")
        else:
            argv = _argv(str(ssh))
        inside = handle.data["folder"] if folder is None else folder
        if not inside:
            with suppress(ProviderError):
                await NodeShell(argv, "~").run("mkdir -p .campaign")
        return NodeShell(argv, f"~/.campaign/{inside}")


def _argv(target: str) -> list[str]:
    """`ssh` to `user@host[:port]`, by the user's own configuration."""
    host, _, port = target.partition(":")
    config = Path(os.path.expanduser("~/.ssh/config"))  # noqa: PTH111  # ssh itself reads the password file, not HOME
    options = [
        "-o",
        "BatchMode=yes",
        "-o",
        "LogLevel=ERROR",
        "-o",
        "ConnectTimeout=20",
        "-o",
        "ServerAliveInterval=15",
    ]
    return [
        "ssh", *(["-F", str(config)] if config.is_file() else []), *options, *(["-p", port] if port else []), "--", host,
    ]  # fmt: skip


def _where(handle: NodeHandle) -> str:
    return str(handle.data["ssh"] or handle.data["cluster"])


def _attached(node: Node) -> AttachNode:
    if not isinstance(node, AttachNode):
        raise ProviderError("price", f"not a node you have: {node.provider}")
    return node
