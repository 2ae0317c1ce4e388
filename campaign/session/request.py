"""One request: the job that is sent, and the row that is kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from campaign.client.base import Job, Outcome
from campaign.client.lag import judge
from campaign.client.measure import row_fields
from campaign.engines.base import BootRecord, StepCounts
from campaign.plan.model import ArmPlan, BootPlan, GroupPlan, RequestPlan, RoundPlan
from campaign.spec.models import Arm, ClientOptions, Workload
from campaign.store.row import Phase, RequestRow
from campaign.workloads.packs import Prompt, body

VOIDING = frozenset({"engine_restarted", "clock_step", "cache_hit", "other_traffic"})
"""Reasons that make a finished row unusable."""

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Identity:
    """What every row of one session has in common."""

    run: str
    campaign: str
    session: str
    lease: str
    node: str
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """One boot at work in one round."""

    plan: BootPlan
    arm: ArmPlan
    record: BootRecord
    attempt: int
    cell: str


def cell_name(group: GroupPlan, boot: BootPlan) -> str:
    """`GROUP/ARM/WORKLOAD/cCONCURRENCY/bBOOT_INDEX`: what a cell is called everywhere."""
    return f"{group.name}/{boot.arm}/{group.workload}/c{group.concurrency}/b{boot.index}"


def boot_id(session: str, round_: RoundPlan, boot: BootPlan, attempt: int) -> str:
    """`SESSION/GROUP/rROUND/ARM@ATTEMPT`: a planned boot and which try it is."""
    return f"{session}/{round_.id}/{boot.arm}@{attempt}"


def identity_fields(
    who: Identity, group: GroupPlan, round_: RoundPlan, boot: Measured, request: RequestPlan, phase: Phase
) -> dict[str, Any]:
    """The fields of a row that are known before the request is sent."""
    return {
        "run": who.run,
        "campaign": who.campaign,
        "session": who.session,
        "lease": who.lease,
        "node": who.node,
        "gpu_set": boot.record.gpu_set,
        "boot_id": boot.record.boot_id,
        "boot_index": boot.plan.index,
        "boot_attempt": boot.attempt,
        "arm": boot.arm.name,
        "arm_hash": boot.arm.hash,
        "group": group.name,
        "cell": boot.cell,
        "phase": phase,
        "workload": group.workload,
        "concurrency": group.concurrency,
        "block": f"s{request.slot}" if group.concurrency == 1 else f"w{request.wave}",
        "round": round_.index,
        "order": request.order,
        "half": boot.plan.place,
        "slot": request.slot,
        "seed": request.seed,
        "attempt": 0,
        "simulated": who.simulated,
        "context": boot.arm.config.context,
    }


def make_job(
    fields: Mapping[str, Any],
    boot: Measured,
    workload: Workload,
    prompt: Prompt,
    extras: Mapping[str, Any],
    timeout_s: float,
    sidecar_dir: str | None,
    start_ns: int | None = None,
    client: ClientOptions | None = None,
) -> Job:
    """The request as it goes onto the wire."""
    request_id = f"{fields['boot_id']}/{fields['phase']}/o{fields['order']}s{fields['slot']}x{fields['seed']}"
    if fields["attempt"]:
        request_id += f"t{fields['attempt']}"
    return Job(
        request_id=request_id,
        base_url=boot.record.base_url,
        path=_PATHS[workload.endpoint],  # type: ignore[arg-type]  # the two literals of Workload.endpoint
        body={**body(workload, prompt, fields["seed"], boot.record.model_id), **extras},
        timeout_s=timeout_s,
        expect_tokens=workload.max_tokens if workload.ignore_eos else None,
        headers=dict(boot.record.headers),
        sidecar_dir=sidecar_dir,
        start_ns=start_ns,
        connection=client.connection if client is not None else "new",
        proxy=client.proxy if client is not None else None,
    )


def _may_draft(arm: Arm) -> bool:
    """Whether a token need not be a step: the arm speculates, or a provider does not say."""
    return arm.speculation is not None or arm.engine == "api"


def gpu_fields(
    gpus: tuple[int, ...], window: Mapping[str, float | None], *, alone: bool
) -> dict[str, float | None]:
    """Row fields of the GPUs of one engine over the time of one request, by NVML.

    Power is summed over its GPUs, clocks are their mean, and the worst one counts for what slows it. `alone`:
    nothing else ran on them, so their energy is this request's.
    """

    def of(name: str) -> list[float] | None:
        values = [window.get(f"gpu{i}_{name}") for i in gpus]
        known = [v for v in values if v is not None]
        return known if known and len(known) == len(values) else None

    def mean(values: list[float] | None) -> float | None:
        return None if values is None else sum(values) / len(values)

    power, throttle, cap, joules = of("w"), of("throttle"), of("power_cap"), of("joules")
    return {
        "joules": None if joules is None or not alone else sum(joules),
        "gpu_w": None if power is None else sum(power),
        "gpu_sm_mhz": mean(of("sm_mhz")),
        "gpu_mem_mhz": mean(of("mem_mhz")),
        "gpu_throttle": None if throttle is None else max(throttle),
        "gpu_power_cap": None if cap is None else max(cap),
    }


def make_row(
    fields: Mapping[str, Any], boot: Measured, prompt: Prompt, outcome: Outcome, counts: StepCounts | None
) -> RequestRow:
    """The row of a finished request; void where it did not finish as asked or its engine was another."""
    measured = row_fields(outcome, counts, speculative=_may_draft(boot.arm.config))
    late = judge(measured["lag_p99_us"], measured["step_ms"]) == "void"
    # A short answer was measured well; that the lengths differ is for the pair to judge.
    void = late or measured["state"] not in {"ok", "short"} or bool(VOIDING & set(measured["reasons"]))
    return RequestRow(**fields, **measured, prompt_sha256=prompt.sha256, validity="void" if void else "valid")
