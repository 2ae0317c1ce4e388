"""What the client's stamps were worth: one self-check a session, and the lag figures of every cell."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from campaign.client.base import Outcome
from campaign.client.lag import LagCounts, judge, merge, percentile
from campaign.client.split import processes_needed
from campaign.plan.cost import arm_times
from campaign.plan.model import SessionPlan
from campaign.session.ports import Ports
from campaign.spec.models import Spec


@dataclass(slots=True)
class CellLag:
    """Figures of one cell, added up request by request."""

    requested_rate: float | None = None
    """Requests per second of an open loop."""
    sent_ns: list[int] = field(default_factory=list)
    lag: list[LagCounts] = field(default_factory=list)
    user_lag: list[LagCounts] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    start_err_us: list[float] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    merged_reads: int = 0
    reads: int = 0

    def add(self, outcome: Outcome, step_ms: float | None) -> None:
        """One measured request."""
        self.sent_ns.append(outcome.sent_ns)
        self.lag.append(outcome.lag)
        self.user_lag.append(outcome.user_lag)
        self.sources.add(outcome.stamp_source)
        self.merged_reads += outcome.merged_reads
        self.reads += outcome.reads
        if step_ms is not None:
            self.step_ms.append(step_ms)
        if outcome.start_error_us is not None:
            self.start_err_us.append(abs(outcome.start_error_us))

    @property
    def verdict(self) -> str | None:
        """`flag` above 2 % of the median step, `void` above 10 %; None below, or where nothing is known."""
        step = statistics.median(self.step_ms) if self.step_ms else None
        return judge(percentile(merge(self.lag), 0.99), step)

    def _achieved(self) -> float | None:
        """Requests per second between the first and the last that count."""
        span = max(self.sent_ns) - min(self.sent_ns)
        return (len(self.sent_ns) - 1) / span * 1e9 if span else None

    def to_json(self) -> dict[str, Any]:
        """The `client` object of a cell in `round_committed` (docs/CONTRACTS.md)."""
        lag, user = merge(self.lag), merge(self.user_lag)
        return {
            "stamp_source": min(self.sources)
            if len(self.sources) == 1
            else "mixed"
            if self.sources
            else None,
            "lag_p50_us": percentile(lag, 0.5),
            "lag_p99_us": percentile(lag, 0.99),
            "probes": sum(count for _, count in lag),
            "user_lag_p50_us": percentile(user, 0.5),
            "user_lag_p99_us": percentile(user, 0.99),
            "median_step_ms": statistics.median(self.step_ms) if self.step_ms else None,
            "reads": self.reads,
            "merged_reads": self.merged_reads,
            "start_err_p99_us": _p99(self.start_err_us),
            "requested_rate": self.requested_rate,
            "achieved_rate": self._achieved() if self.requested_rate is not None else None,
            "verdict": self.verdict,
        }


def _p99(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else None


def chunks_per_s(plan: SessionPlan, spec: Spec) -> float:
    """The most chunks per second that the plan is taken to bring: one a step, every stream at work."""
    most = 0.0
    for group in plan.groups:
        workload = spec.workloads[group.workload]
        steps = [arm_times(plan.arms[arm].config, workload).step_ms for arm in group.arms]
        rate = sum(1000 / step for step in steps) if group.design == "duet" else 1000 / min(steps)
        most = max(most, group.concurrency * rate)
    return most


async def share_load(
    ports: Ports, checked: Mapping[str, Any], plan: SessionPlan, spec: Spec, engine_cpus: Sequence[int]
) -> dict[str, Any]:
    """Start as many client processes as the load needs, on the cores that the engines do not have.

    Returns what was decided and from what (`provenance/SESSION/client-LEASE.json`).
    """
    expected, per_cpu = chunks_per_s(plan, spec), checked.get("chunks_per_cpu_s")
    free = sorted(os.sched_getaffinity(0) - set(engine_cpus)) if engine_cpus else []
    needed = processes_needed(per_cpu, expected) if per_cpu else 1
    if spec.client.processes is None:
        # More processes than cores would only take turns.
        processes = min(needed, max(1, len(free) or (os.cpu_count() or 1)))
    else:
        processes = spec.client.processes
    scale = getattr(ports.client, "scale", None)
    if scale is not None:
        await scale(processes, free)
    return {
        "processes": processes if scale is not None else 1,
        "needed": needed,
        "declared": spec.client.processes,
        "expected_chunks_per_s": expected,
        "chunks_per_cpu_s": per_cpu,
        "cpus": free,
    }


async def self_check(ports: Ports) -> dict[str, Any]:
    """The client's own check of its stamps, in its own process; never a reason to stop."""
    check = getattr(ports.client, "selfcheck", None)
    if check is None:
        return {"ok": None, "reasons": ["this client has no self-check"]}
    try:
        found: dict[str, Any] = await check()
    except Exception as error:
        return {"ok": None, "reasons": [f"{type(error).__name__}: {error}"]}
    return found
