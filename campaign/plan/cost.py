"""What a plan is expected to take and to cost, and the most it may cost.

Times come from an arm's `estimate`, else from the table below, which `plan` prints. They decide dollars and
the length of the lease; they never enter a verdict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from campaign.money import NOTHING, MicroUsd, bill, micro
from campaign.plan.model import PlannedDesign
from campaign.spec.models import Arm, Gates, SkyNode, Spec, Workload

SAFETY: Final = 1.5
"""The lease asks for this many times the expected time, plus one boot and one request that time out."""
TEARDOWN_SHARE: Final = 0.2
"""Part of the teardown reserve that a node is expected to use."""
CHEAP_BOOT_S: Final = 10.0
"""Anchors stand between groups only where a boot takes no longer than this."""
ROUND_S: Final = 0.5
"""Per round: sealing rows, counters, the next order."""
STOP_S: Final = 0.5
"""Per boot: ending the server and proving it gone."""

PriceSource = Literal["declared", "quoted", "cap"]


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of a node costs, and what a lease of it carries beside its own length."""

    usd_per_hour: MicroUsd
    granularity_s: int
    source: PriceSource
    dead_man_s: int
    """The longest a node runs past its deadline while one dead-man works."""
    teardown_s: int
    """Reserve for taking the node down and proving it gone."""


def declared_prices(spec: Spec) -> dict[str, Price]:
    """Price of each node as the file alone gives it; nothing is asked of a cloud.

    A rented node is priced at its cap, since a launch above it is refused.
    """
    return {
        name: Price(micro(node.max_usd_per_hour), 60, "cap", 150, 300)
        if isinstance(node, SkyNode)
        else Price(micro(node.usd_per_hour), 1, "declared", 0, 5)
        for name, node in spec.nodes.items()
    }


SETUP_S: Final = {"local": 4.0, "attach": 40.0, "sky": 420.0}
"""From launch to the first boot. sky: a launch took 30 to 57 s with the node at hand (SkyPilot 0.14, Slurm);
clouds add minutes of provisioning and the install of the runtime."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Times of one engine where nothing is known of the arm."""

    boot_s: float
    ttft_floor_ms: float
    ttft_per_token_ms: float
    prompt_tokens: int
    """Taken where the workload states no bounds."""
    step_ms: float
    accept_len: float
    """With speculation; without it 1."""
    drafted_share: float
    """Share of steps that verify a draft."""
    verify_token_ms: float
    """Per further verified token."""
    verify_fixed_ms: float
    """Per drafted step, whatever its width."""
    per_request: float
    """What each further request in flight adds to a step, as a share of it."""
    source: str


TYPICAL: Final[dict[str, Typical]] = {
    "llamacpp": Typical(
        1.5, 20, 12, 65, 14, 1.6, 0.5, 11, 0, 0.8,
        "xllamacpp 2026.10, SmolLM2-135M Q4_1, 1 thread",
    ),
    "sglang": Typical(
        600, 30, 0.1, 2000, 10, 2.5, 1.0, 0, 8, 0.01,
        "a large model on Hopper or Blackwell; an 8B boots in 50 to 130 s",
    ),
    "vllm": Typical(
        600, 30, 0.1, 2000, 10, 2.5, 1.0, 0, 8, 0.01,
        "taken to be like sglang",
    ),
    "command": Typical(
        120, 30, 0.1, 2000, 15, 2.5, 1.0, 0, 8, 0.05,
        "an unknown server on one GPU",
    ),
    "api": Typical(0, 600, 0.05, 2000, 15, 1.0, 0.0, 0, 0, 0.0, "a provider's endpoint"),
}  # fmt: skip
"""Rows for `llamacpp` and the 8B boots of `sglang` (0.5.14 on an H200) were measured; the rest is stated."""


@dataclass(frozen=True, slots=True)
class ArmTimes:
    """What one arm is taken to need on one workload."""

    boot_s: float
    ttft_ms: float
    step_ms: float
    accept_len: float
    source: Literal["estimate", "default", "estimate+default"]

    def request_s(self, workload: Workload, in_flight: int = 1) -> float:
        """Seconds of one request with `in_flight` such requests at once; prefills queue."""
        steps = max(0.0, (workload.max_tokens - 1) / self.accept_len)
        return (self.ttft_ms * in_flight + steps * self.step_ms) / 1000


def arm_times(arm: Arm, workload: Workload, in_flight: int = 1) -> ArmTimes:
    """Times from the arm's estimate, its gaps filled from the table of its engine."""
    typical = TYPICAL[arm.engine or "command"]
    estimate = arm.estimate
    given = {} if estimate is None else estimate.model_dump(exclude_none=True)
    prompt = workload.tokens[1] if workload.tokens else typical.prompt_tokens
    step, accept = typical.step_ms, 1.0
    if arm.speculation is not None and arm.speculation.depth > 0:
        accept = min(typical.accept_len, 1.0 + arm.speculation.depth)
        width = typical.verify_token_ms * arm.speculation.depth
        step += typical.drafted_share * (width + typical.verify_fixed_ms)
    times = ArmTimes(
        boot_s=typical.boot_s,
        ttft_ms=typical.ttft_floor_ms + typical.ttft_per_token_ms * prompt,
        step_ms=step,
        accept_len=accept,
        source="default" if not given else "estimate" if len(given) == 4 else "estimate+default",
    )
    times = replace(times, **given)
    return replace(times, step_ms=times.step_ms * (1 + typical.per_request * (in_flight - 1)))


def group_seconds(
    design: PlannedDesign,
    times: Sequence[ArmTimes],
    workload: Workload,
    *,
    boots: int,
    waves: int,
    concurrency: int,
    stagger_s: float | None = None,
) -> float:
    """Expected seconds of one group, boots and warm-up included; `times` at its concurrency.

    A boot is counted in full even where two could start at once: their starts do not overlap, unless they share
    a GPU and follow one another by `stagger_s`.
    """
    in_flight = min(concurrency, workload.n)
    batches = waves * math.ceil(workload.n / in_flight)
    work = [t.request_s(workload, in_flight) * batches for t in times]
    fixed = [t.boot_s + STOP_S + t.request_s(workload, in_flight) for t in times]
    resident = design in {"alternated", "duet"}
    if resident and stagger_s is not None:
        ready_s = max(i * stagger_s + t.boot_s for i, t in enumerate(times))
        fixed = [ready_s, *(STOP_S + t.request_s(workload) for t in times)]
    busy = max(work) if design == "duet" else sum(work)
    return boots * (sum(fixed) + busy + ROUND_S * (1 if resident else len(times)))


@dataclass(frozen=True, slots=True)
class Lease:
    """How long a session is expected to hold its node, and how long it may."""

    expected_s: float
    """Setup and every group, cut at the lease's end."""
    wanted_s: float
    """The same, not cut."""
    lease_s: float
    """Length asked for: at most the node's `max_hours`."""
    usd_expected: MicroUsd
    usd_worst: MicroUsd
    tokens_usd: MicroUsd = NOTHING
    """Most that tokens of priced endpoints come to; part of the worst case."""


TOKEN_TRIES: Final = 2
"""A round that fails is done again once, and its tokens are paid twice."""


def request_tokens_usd(arm: Arm, workload: Workload) -> MicroUsd:
    """Most that one request of an `api` arm costs in tokens; zero for every other arm.

    Prompts are taken at their upper bound; without one, at the table's length for an endpoint.
    """
    if arm.api is None:
        return MicroUsd(0)
    prompt = workload.tokens[1] if workload.tokens else TYPICAL["api"].prompt_tokens
    exact = arm.api.usd_per_mtok_in * prompt + arm.api.usd_per_mtok_out * workload.max_tokens
    return MicroUsd(math.ceil(exact))


def group_tokens_usd(
    arms: Sequence[Arm], workload: Workload, *, boots: int, waves: int, concurrency: int = 1
) -> MicroUsd:
    """The same for a group: every measured request and the warm-up of each boot of each arm."""
    requests = boots * (waves * workload.n + min(concurrency, workload.n))
    return MicroUsd(sum(request_tokens_usd(arm, workload) for arm in arms) * requests)


def lease(
    work_s: float,
    setup_s: float,
    price: Price,
    max_hours: float,
    gates: Gates,
    tokens_usd: MicroUsd = NOTHING,
    hold_s: float = 0.0,
) -> Lease:
    """Price a session whose groups take `work_s` and whose node is kept for `hold_s` more.

    The worst case is the lease to its deadline with the dead-man's granularity, and the teardown reserve
    beside it, each billed by whole units.
    """
    wanted = setup_s + work_s + hold_s
    margin = gates.boot_timeout.total_seconds() + gates.request_timeout.total_seconds()
    length = min(max_hours * 3600, float(math.ceil((setup_s + work_s) * SAFETY + margin + hold_s)))
    held = min(wanted, length)
    expected = billed(price, held + TEARDOWN_SHARE * price.teardown_s)
    worst = billed(price, length + price.dead_man_s) + billed(price, price.teardown_s)
    reserve = MicroUsd(TOKEN_TRIES * tokens_usd)
    return Lease(held, wanted, length, MicroUsd(expected + tokens_usd), MicroUsd(worst + reserve), reserve)


def billed(price: Price, seconds: float) -> MicroUsd:
    """Dollars of so many seconds at this price, by its granularity, rounded up."""
    return bill(price.usd_per_hour, math.ceil(seconds * 1_000_000_000), price.granularity_s)


def apportion(total: MicroUsd, weights: Sequence[float]) -> tuple[MicroUsd, ...]:
    """Split an amount by weights into whole micro-dollars that add up to it exactly."""
    whole = sum(weights)
    if whole <= 0:
        return tuple(MicroUsd(total if i == 0 else 0) for i in range(len(weights)))
    shares, given, run = [], 0, 0.0
    for i, weight in enumerate(weights):
        run += weight
        upto = total if i == len(weights) - 1 else min(total, int(total * (run / whole)))
        shares.append(MicroUsd(upto - given))
        given = upto
    return tuple(shares)
