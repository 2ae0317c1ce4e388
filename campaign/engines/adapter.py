"""What most adapters have in common; each overrides what its engine does otherwise."""

from collections.abc import Mapping
from typing import Any

from campaign.client.base import Outcome
from campaign.engines import prometheus
from campaign.engines.base import BootOrder, Counters, StepCounts
from campaign.spec.models import Arm


class Adapter:
    """Defaults of the `Engine` contract for a server with a Prometheus page."""

    def model_id(self, order: BootOrder) -> str:
        """The entry of `models`: servers are started with that name."""
        return str(order.config.model)

    def metrics_path(self) -> str | None:
        """Path of the Prometheus page."""
        return "/metrics"

    def info_paths(self) -> tuple[str, ...]:
        """No page says more."""
        return ()

    def effective(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Nothing is known."""
        del info
        return {}

    def read_counters(self, metrics_text: str) -> Counters:
        """By the names of all engines we know."""
        return prometheus.read(metrics_text)

    def request_extras(self, arm: Arm) -> Mapping[str, Any]:
        """Nothing."""
        del arm
        return {}

    def versions(self) -> Mapping[str, str]:
        """Those of its interpreter are read by the host."""
        return {}

    def running_path(self) -> str | None:
        """Page that says how many requests the server holds; the metrics page."""
        return self.metrics_path()

    def running(self, page: bytes) -> int | None:
        """Requests that run or wait, from that page; None where it does not say."""
        return prometheus.running(page.decode("utf-8", "replace"))

    def reset_path(self, arm: Arm) -> str | None:
        """What is posted to so that nothing of earlier requests is kept; None where there is no such thing."""
        del arm
        return None


def plain(arm: Arm, outcome: Outcome) -> StepCounts | None:
    """Steps of an arm that does not draft: a token is a step. None where the arm drafts."""
    if arm.speculation is not None and arm.speculation.depth > 0:
        return None
    usage = outcome.usage
    completion = usage.completion_tokens if usage else None
    cached = usage.cached_tokens if usage else None
    reasons = ("no_usage",) if completion is None else ()
    steps = None if completion is None else max(completion - 1, 0)
    return StepCounts(steps, None, None, None, None, None, cached, "none", reasons)
