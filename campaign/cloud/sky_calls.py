"""SkyPilot, one call each; blocking, for threads. What it raises is sorted by `sky_sdk.in_thread`."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from campaign.budget.rules import Trip, freeze_price
from campaign.cloud import naming, sky_identity, sky_sdk
from campaign.cloud.base import LaunchIntent
from campaign.errors import ProviderError
from campaign.money import MicroUsd
from campaign.spec.models import Candidate, SkyNode


def resources_of(
    node: SkyNode,
    intent: LaunchIntent | None,
    left_s: float = 3600.0,
    only: Sequence[Candidate] | None = None,
) -> Any:
    """One Resources, a set (`any_of`) or a list (`ordered`).

    A cloud on which fewer than two dead-men end the bill is never a candidate. Raises ProviderError('refused') where
    none is left.
    """
    candidates = tuple(node.any_of or node.ordered or (Candidate(),)) if only is None else only
    usable = tuple(pinned for c in candidates for pinned in _pinned(node, c))
    if not usable:
        clouds = ", ".join(sorted({_named(node, c) or "any cloud" for c in candidates}))
        raise ProviderError(
            "refused", f"fewer than two dead-men end the bill on {clouds}; `campaign doctor` shows them"
        )
    made = [_one(node, c, intent, left_s) for c in usable]
    return made[0] if len(made) == 1 else made if node.ordered else set(made)


def _named(node: SkyNode, c: Candidate) -> str:
    """The cloud a candidate names, or an empty string."""
    return (c.infra or node.infra or "").split("/")[0].lower()


def _pinned(node: SkyNode, c: Candidate) -> Iterator[Candidate]:
    """The candidate on each cloud it may be launched on: the one it names, or all that are enabled."""
    named = _named(node, c)
    if named:
        if sky_identity.launchable(named):
            yield c
        return
    for cloud in _enabled():
        if sky_identity.launchable(cloud):
            yield c.model_copy(update={"infra": cloud})


def _enabled() -> list[str]:
    """Clouds that the server, here or elsewhere, can launch on."""
    sky = sky_sdk.load()
    from sky.client import sdk

    return sorted({str(c).lower() for c in sky_sdk.retried(lambda: sky.get(sdk.enabled_clouds()))})


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


def optimize(node: SkyNode, candidate: Candidate | None = None) -> Any:
    """What SkyPilot would launch now, of all candidates that may be launched on, or of this one wherever it is."""
    sky = sky_sdk.load()
    task = sky.Task(name="price", run="true")
    task.set_resources(resources_of(node, None) if candidate is None else _one(node, candidate, None, 0))
    with sky.Dag() as dag:
        dag.add(task)
    # Over the API the optimizer only prints; in this process it says what it chose, with the clouds enabled here.
    from sky.optimizer import Optimizer

    with contextlib.redirect_stdout(io.StringIO()):  # `quiet` still draws its spinner
        done = sky_sdk.retried(lambda: Optimizer.optimize(dag, quiet=True))
    return done.tasks[0].best_resources


def price_of(resources: Any, nodes: int) -> MicroUsd:
    """Micro-dollars per hour of what was launched; a negative one where it is no price."""
    try:
        raw = float(resources.get_cost(3600)) * nodes
    except Exception:
        return MicroUsd(-1)
    price = freeze_price(raw)
    return MicroUsd(-1) if isinstance(price, Trip) else price


def launch(task: Any, name: str, minutes: int, log: Path) -> Any:
    sky = sky_sdk.load()
    from sky.skylet.autostop_lib import AutostopWaitFor

    # Never again on an error: whether it launched is looked up by name, and taken down.
    with sky_identity.without_credentials(frozenset(cloud_of(r) for r in task.resources)):
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


def set_autodown(name: str, minutes: int) -> bool:
    sky = sky_sdk.load()
    from sky.skylet.autostop_lib import AutostopWaitFor

    sky_sdk.retried(lambda: sky.get(sky.autostop(name, minutes, wait_for=AutostopWaitFor.NONE, down=True)))
    records = status(name)
    return bool(records) and records[0].get("autostop") == minutes and records[0].get("to_down") is True


def status(name: str | None, *, force: bool = False) -> list[Any]:
    sky = sky_sdk.load()
    mode = sky.StatusRefreshMode.FORCE if force else sky.StatusRefreshMode.NONE
    names = None if name is None else [name]
    found = sky_sdk.retried(lambda: sky.get(sky.status(names, refresh=mode, all_users=True)))
    return list(found)


def job_failed(name: str) -> str | None:
    """The state of the node's one job where that is an ending, else None."""
    sky = sky_sdk.load()
    states = sky_sdk.retried(lambda: sky.get(sky.job_status(name, [1])))
    state = str(getattr(states.get(1), "value", states.get(1)))
    return state if state.startswith("FAILED") or state in {"SUCCEEDED", "CANCELLED"} else None


def under_way(name: str) -> list[str]:
    """Requests of the API server that are still launching a node of this name: it may yet appear."""
    sky = sky_sdk.load()
    found = sky_sdk.retried(sky.api_status)
    return [
        str(r.request_id)
        for r in found
        if r.cluster_name == name and "launch" in r.name and r.status in {"PENDING", "RUNNING"}
    ]


def down(name: str) -> None:
    """Cancel a launch that is under way, and end what is there. Never with purge."""
    sky = sky_sdk.load()
    launches = under_way(name)
    if launches:
        sky_sdk.retried(lambda: sky.get(sky.api_cancel(launches, silent=True)))
    try:
        # Ending what is ended changes nothing, so this may be asked again.
        sky_sdk.retried(lambda: sky.get(sky.down(name)))
    except Exception as error:
        if not sky_sdk.is_missing(error):
            raise


def cloud_of(resources: Any) -> str:
    return str(resources.cloud).lower()


def candidates_of(node: SkyNode) -> list[tuple[str, str, float | None]]:
    """(what, cloud, dollars per hour or None) of every candidate on every enabled cloud it may be on. Launches nothing.

    Raises ProviderError where SkyPilot cannot be asked.
    """
    try:
        enabled = _enabled()
    except Exception as error:
        raise ProviderError(sky_sdk.kind_of(error), f"{type(error).__name__}: {error}") from error
    found: list[tuple[str, str, float | None]] = []
    for candidate in node.any_of or node.ordered or (Candidate(),):
        named = _named(node, candidate)
        for cloud in [named] if named else enabled:
            infra = (candidate.infra or node.infra) if named else cloud
            what = f"{infra} {candidate.accelerators or node.accelerators}"
            try:
                best = optimize(node, candidate.model_copy(update={"infra": infra}))
            except Exception as error:
                kind = sky_sdk.kind_of(error)
                if kind not in {"capacity", "refused", "quota", "credentials"}:
                    raise ProviderError(kind, f"{type(error).__name__}: {error}") from error
                found.append((what, cloud, None))
                continue
            price = price_of(best, 1)
            found.append((str(best), cloud_of(best), None if price < 0 else price / 1_000_000))
    return found
