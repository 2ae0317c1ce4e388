"""What an adapter promises, checked on a server that already runs: `pytest --engine-url URL --engine NAME`.

Nothing is started or stopped. The server must be idle: requests of others would be counted as ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from campaign.client.base import Outcome
from campaign.engines import fetch
from campaign.engines.base import BootRecord, Counters, Engine, StepCounts
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


async def check_live(
    engine: Engine,
    arm: Arm,
    base_url: str,
    headers: Mapping[str, str] | None = None,
    model: str | None = None,
) -> LiveReport:
    """Run the checks against `base_url` (without /v1). `arm` says how the server was started."""
    import json

    sent, report = dict(headers or {}), LiveReport()
    status, body = await fetch.get(f"{base_url}/v1/models", sent, 10)
    listed = [m["id"] for m in json.loads(body)["data"]] if status == 200 else []
    name = model or (listed[0] if listed else "")
    if name not in listed:
        report.problems.append(f"/v1/models answers {status} and lists {listed}, not {name!r}")
        return report
    info: dict[str, Any] = {"log": ""}
    for path in engine.info_paths():
        status, body = await fetch.get(base_url + path, sent, 10)
        info[path] = json.loads(body) if status == 200 else None
        if status != 200:
            report.problems.append(f"{path} answers {status}")
    report.effective = engine.effective(info)
    record = BootRecord("live", base_url, name, 0, 0, 0, "", {}, sent)
    for tokens in LENGTHS:
        before = await _scrape(engine, base_url, sent)
        outcome = await request(engine, arm, record, max_tokens=tokens)
        after = await _scrape(engine, base_url, sent)
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


async def _scrape(engine: Engine, base_url: str, headers: Mapping[str, str]) -> Counters | None:
    path = engine.metrics_path()
    if path is None:
        return None
    status, body = await fetch.get(base_url + path, headers, 10)
    return engine.read_counters(body.decode("utf-8", "replace")) if status == 200 else None
