"""A provider's endpoint: nothing is booted, every token has a price, and what it runs inside is unknown.

Its time to first token includes the network, and every row says so. Whether it speculates cannot be seen, so
steps are unknown; rates and times per token are comparable with an on-node cell on the same prompts.
"""

import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from campaign.client.base import Outcome
from campaign.clock import Clock
from campaign.engines import fetch
from campaign.engines.adapter import Adapter
from campaign.engines.base import BootOrder, BootRecord, Counters, Launch, StepCounts
from campaign.engines.prometheus import NotPrometheus
from campaign.errors import EngineError, PreflightError
from campaign.redact import REDACTOR, secret_name
from campaign.spec.models import Arm, Endpoint, Model

OVER_NETWORK = "ttft_over_network"
TRIES = 5
"""Answers of 429 in a row after which a request is given up."""
_PROBE_S = 60.0


class Api(Adapter):
    """The `Engine` contract for an endpoint; the host calls `connect` in place of a launch."""

    name = "api"

    def preflight(self, arm: Arm, models: Mapping[str, Model]) -> None:  # noqa: ARG002  # contract
        endpoint = _endpoint(arm)
        url = urlsplit(endpoint.base_url)
        if url.scheme not in {"http", "https"} or not url.hostname or url.username or url.password:
            raise PreflightError(
                f"api.base_url = {REDACTOR.url(endpoint.base_url)}: not an address. Fix: write https://HOST[/PATH], without a key in it"
            )
        if url.path.rstrip("/").endswith("/v1"):
            raise PreflightError(
                f"api.base_url = {endpoint.base_url}: ends in /v1, which is added. Fix: leave it out"
            )
        if url.scheme == "http" and url.hostname not in {"127.0.0.1", "localhost", "::1"}:
            raise PreflightError(
                f"api.base_url = {endpoint.base_url}: would send the key in the clear. Fix: write https://"
            )
        if not os.environ.get(endpoint.key_env):
            raise PreflightError(
                f"api.key_env = {endpoint.key_env}: not set in the environment. Fix: export {endpoint.key_env}"
            )

    def launch(self, order: BootOrder, port: int) -> Launch:  # noqa: ARG002  # contract
        raise EngineError("config", "engine api: nothing is started here")

    def model_id(self, order: BootOrder) -> str:
        return _endpoint(order.config).model_id

    def metrics_path(self) -> str | None:
        return None

    def failure(self, log_tail: str) -> tuple[str, str] | None:  # noqa: ARG002  # contract
        return None

    def read_counters(self, metrics_text: str) -> Counters:  # noqa: ARG002  # contract
        raise NotPrometheus("an endpoint has no metrics page")

    def steps(
        self,
        arm: Arm,
        before: Counters | None,
        after: Counters | None,
        outcome: Outcome,
    ) -> StepCounts:
        """Unknown: a provider does not say whether it drafts."""
        del arm, before, after
        cached = outcome.usage.cached_tokens if outcome.usage else None
        return StepCounts(None, None, None, None, None, None, cached, "none", ("absent", OVER_NETWORK))

    async def connect(self, order: BootOrder, clock: Clock) -> BootRecord:
        """Prove key, model and endpoint with one token. Raises EngineError, never with the key in it."""
        endpoint = _endpoint(order.config)
        key = os.environ.get(endpoint.key_env, "")
        REDACTOR.hide(key)
        headers = {"Authorization": f"Bearer {key}"}
        body = {
            "model": endpoint.model_id,
            "messages": [{"role": "user", "content": "1 2 3"}],
            "max_tokens": 1,
        }
        url = endpoint.base_url.rstrip("/") + "/v1/chat/completions"
        started = clock.monotonic_ns()
        for attempt in range(1, TRIES + 1):
            try:
                status, answered, raw = await fetch.post_full(url, headers, body, _PROBE_S)
            except (OSError, TimeoutError) as error:
                raise EngineError(
                    "died", REDACTOR.text(f"{order.boot_id}: {endpoint.base_url}: {error}")
                ) from None
            if status != 429 or attempt == TRIES:
                break
            await clock.sleep(backoff_s(endpoint, attempt, retry_after_s(answered.get("retry-after"))))
        _accept(order, status, raw)
        return BootRecord(
            boot_id=order.boot_id,
            base_url=endpoint.base_url.rstrip("/"),
            model_id=endpoint.model_id,
            pid=0,
            port=urlsplit(url).port or 443,
            boot_ns=clock.monotonic_ns() - started,
            gpu_set=f"api:{endpoint.region or 'unknown'}",
            provenance=_provenance(order, endpoint, answered, raw),
            headers=headers,
        )


def backoff_s(endpoint: Endpoint, attempt: int, asked_s: float | None = None) -> float:
    """Pause after the n-th 429 in a row: what the server asked for, else 1, 2, 4, ... s; never above the limit."""
    wanted = float(2 ** (attempt - 1)) if asked_s is None else asked_s
    return min(wanted, endpoint.max_backoff.total_seconds())


def retry_after_s(value: str | None, now_s: float | None = None) -> float | None:
    """Seconds that a Retry-After header asks for (a number, or a date); None where it says nothing usable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            then = parsedate_to_datetime(value)
        except ValueError:
            return None
        then = then if then.tzinfo else then.replace(tzinfo=UTC)
        seconds = (
            then - datetime.fromtimestamp(time.time() if now_s is None else now_s, UTC)
        ).total_seconds()
    return seconds if 0 <= seconds < 86400 else None


def tokens_usd_micro(endpoint: Endpoint, prompt_tokens: int, completion_tokens: int) -> int:
    """Price of so many tokens in micro-dollars, rounded up. A dollar a million tokens is one micro-dollar a token."""
    exact = endpoint.usd_per_mtok_in * prompt_tokens + endpoint.usd_per_mtok_out * completion_tokens
    return int(exact.to_integral_value(rounding="ROUND_CEILING"))


def _accept(order: BootOrder, status: int, raw: bytes) -> None:
    if status == 200:
        return
    said = REDACTOR.text(raw[:300].decode("utf-8", "replace"))
    kind = {401: "config", 403: "config", 400: "config", 422: "config", 404: "missing_model"}.get(
        status, "died"
    )
    raise EngineError(kind, f"{order.boot_id}: the endpoint answers {status}: {said}")


def _provenance(
    order: BootOrder, endpoint: Endpoint, headers: Mapping[str, str], raw: bytes
) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = {}
    return {
        "engine": "api",
        "arm": order.arm,
        "arm_hash": order.arm_hash,
        "endpoint": REDACTOR.url(endpoint.base_url),
        "region": endpoint.region,
        "model_id": endpoint.model_id,
        "model_answered": answer.get("model"),
        "system_fingerprint": answer.get("system_fingerprint"),
        "response_headers": REDACTOR.headers({k: v for k, v in headers.items() if not secret_name(k)}),
        "ttft": "includes the network",
        "usd_per_mtok_in": str(endpoint.usd_per_mtok_in),
        "usd_per_mtok_out": str(endpoint.usd_per_mtok_out),
        "requested": {},
        "effective": {},
        "unconfirmed": [],
        "versions": {},
    }


def _endpoint(arm: Arm) -> Endpoint:
    if arm.api is None:
        raise PreflightError(
            "engine api: the arm has no `api:`. Fix: say base_url, key_env, model_id and prices there"
        )
    return arm.api
