"""The engine suite on a server that already runs: `pytest tests/engines/test_engine_url.py --engine-url URL --engine NAME`.

Nothing is started or stopped. The server must be idle: requests of others would be counted as ours. Checks that
would kill a server are skipped by name; the rest is `EngineSuite`, and `check_live` lists what is not as promised.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from campaign.client.base import Outcome
from campaign.engines import effective, fetch
from campaign.engines.base import BootOrder, BootRecord, Counters, Engine, StepCounts
from campaign.errors import EngineError
from campaign.spec.models import Arm
from campaign.testing.conformance_engine import request

LENGTHS = (1, 2, 9, 33, 64)
"""Output lengths asked for."""


@dataclass
class LiveReport:
    """What was seen, and what is not as promised."""

    effective: Mapping[str, Any] = field(default_factory=dict)
    counters: Counters | None = None
    steps: list[tuple[int, int | None, str]] = field(default_factory=list)
    """(completion tokens, steps, source) of each request."""
    problems: list[str] = field(default_factory=list)


class LiveHost:
    """`session.ports.EngineHost` for one server of somebody else: it boots nothing and stops nothing."""

    def __init__(
        self,
        engine: Engine,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        model: str | None = None,
    ) -> None:
        """`base_url` is without /v1; `model` is its name, the first that is listed where left out."""
        self._engine, self._url, self._headers, self._model = engine, base_url, dict(headers or {}), model
        self._id = ""

    async def boot(self, order: BootOrder) -> BootRecord:
        """Read the pages of the server. Raises EngineError where it does not list the model."""
        status, body = await fetch.get(f"{self._url}/v1/models", self._headers, 10)
        listed = [m["id"] for m in json.loads(body)["data"]] if status == 200 else []
        self._id = self._model or (listed[0] if listed else "")
        if self._id not in listed:
            raise EngineError(
                "missing_model", f"/v1/models answers {status} and lists {listed}, not {self._id!r}"
            )
        info: dict[str, Any] = {"log": ""}
        missing = []
        for path in self._engine.info_paths():
            status, body = await fetch.get(self._url + path, self._headers, 10)
            info[path] = json.loads(body) if status == 200 else None
            if status != 200:
                missing.append(f"{path} answers {status}")
        asked, in_force = effective.requested(order.config), dict(self._engine.effective(info))
        provenance = {
            "requested": asked,
            "effective": in_force,
            "unconfirmed": list(effective.unconfirmed(asked, in_force)),
            "missing_pages": missing,
            "engine": self._engine.name,
        }
        return BootRecord(order.boot_id, self._url, self._id, 0, 0, 0, "", provenance, self._headers)

    async def counters(self, boot_id: str) -> Counters | None:
        """One scrape; None where it has no page."""
        del boot_id
        path = self._engine.metrics_path()
        if path is None:
            return None
        status, body = await fetch.get(self._url + path, self._headers, 10)
        return self._engine.read_counters(body.decode("utf-8", "replace")) if status == 200 else None

    async def alive(self, boot_id: str) -> bool:
        """Whether it gives a token."""
        del boot_id
        body = {"model": self._id, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
        status, _ = await fetch.post(self._url + "/v1/chat/completions", self._headers, body, 60)
        return status == 200

    async def why_dead(self, boot_id: str) -> tuple[str, str]:
        """Nothing is known of a server of somebody else."""
        return ("died", f"{boot_id}: {self._url} does not answer")

    async def stop(self, boot_id: str) -> None:
        """Nothing: it is not ours."""

    async def close(self) -> None:
        """Nothing."""


async def check_live(
    engine: Engine,
    arm: Arm,
    base_url: str,
    headers: Mapping[str, str] | None = None,
    model: str | None = None,
) -> LiveReport:
    """Run the checks against `base_url` (without /v1). `arm` says how the server was started."""
    report, host = LiveReport(), LiveHost(engine, base_url, headers, model)
    try:
        record = await host.boot(BootOrder("live", "live", "", arm, {}, "p0", (), (), "", 0.0))
    except EngineError as error:
        report.problems.append(str(error))
        return report
    report.effective = record.provenance["effective"]
    report.problems += record.provenance["missing_pages"]
    for tokens in LENGTHS:
        before = await host.counters(record.boot_id)
        outcome = await request(engine, arm, record, max_tokens=tokens)
        after = await host.counters(record.boot_id)
        counts = engine.steps(arm, before, after, outcome)
        report.counters = after
        report.steps.append((tokens, counts.steps, counts.source))
        report.problems += _problems(tokens, outcome, counts, before, after)
    return report


def _problems(
    tokens: int, outcome: Outcome, counts: StepCounts, before: Counters | None, after: Counters | None
) -> list[str]:
    """What one request of `tokens` tokens shows that is not as promised."""
    out: list[str] = []
    completion = outcome.usage.completion_tokens if outcome.usage else None
    if completion != tokens:
        out.append(f"asked for {tokens} tokens, usage says {completion}")
    if before and after and before.generated is not None and after.generated is not None:
        grown = after.generated - before.generated
        if grown != tokens:
            out.append(f"the counter of generated tokens grew by {grown} over {tokens} tokens")
    if counts.steps is None:
        return out if counts.reasons else [*out, f"{tokens} tokens: steps are unknown without a reason"]
    if not 0 <= counts.steps <= tokens - 1:
        out.append(f"{tokens} tokens took {counts.steps} steps")
    if counts.accepted is not None and counts.steps + counts.accepted != tokens - 1:
        out.append(f"{tokens} tokens: {counts.steps} steps and {counts.accepted} accepted")
    return out
