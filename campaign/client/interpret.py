"""From reads to an outcome: tokens, usage, times, and what became of the request. Pure.

Token counts come from the server's `usage` alone, never from counting chunks or tokenising text.

States: `failed` an error, a reset, a timeout, or not a stream; `cancelled` by us; `truncated` the body was
cut inside an event or against its HTTP length; `incomplete` it ended between events without a finish
reason, or without any proof that it had ended; `empty` it ended well without a token; `short` fewer tokens
than `ignore_eos` asked for; else `ok`.
"""

import hashlib
import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from campaign.client.base import Outcome, Usage
from campaign.client.http1 import Response, finish, parse_response
from campaign.client.lag import lag_counts
from campaign.client.reader import Exchange
from campaign.client.reading import ERROR_LENGTH, Reading, error_of, read, read_steps, token_count
from campaign.store.row import State

__all__ = ["Interpreted", "conclude", "conclude_steps", "interpret", "read"]


def _usage(raw: dict[str, Any] | None) -> Usage | None:
    if raw is None:
        return None
    details = raw.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        token_count(raw.get("prompt_tokens")), token_count(raw.get("completion_tokens")), token_count(cached)
    )


class _Judgement(NamedTuple):
    state: State
    code: str | None = None
    message: str | None = None
    reasons: tuple[str, ...] = ()


def _network(end: str, detail: str) -> _Judgement | None:
    """What ended the exchange, where that alone decides."""
    match end:
        case "cancelled":
            return _Judgement("cancelled")
        case "timeout":
            return _Judgement("failed", "timeout", "no end of the response in time", ("timeout",))
        case "reset":
            return _Judgement("failed", "connection_reset", detail, ("connection_reset",))
        case "refused":
            return _Judgement("failed", "connection_refused", detail, ("connection_refused",))
        case "unreachable":
            return _Judgement("failed", "unreachable", detail, ("connection_refused",))
        case _:
            return None


def _judge(  # noqa: PLR0911 -- one return for each way a request can end
    end: str, detail: str, response: Response, reading: Reading, expect_tokens: int | None
) -> _Judgement:
    ended = response.complete or (reading.done and reading.finish is not None)
    network = _network(end, detail) if end == "cancelled" or not ended else None
    whole_json = response.body.lstrip().startswith(b"{")
    foreign = whole_json or response.content_type not in {"", "text/event-stream"}
    if network is not None:
        if reading.error is None or network.state == "cancelled":
            return network
        return _Judgement("failed", *reading.error, network.reasons)
    if response.error is not None or response.status is None:
        return _Judgement("failed", "bad_http", response.error or "the server closed without an answer")
    if response.status != 200:
        return _Judgement("failed", *_body_error(response, f"{response.status}"))
    if not reading.events and foreign:
        return _Judgement("failed", *_body_error(response, "not_a_stream"))
    if reading.error is not None:
        return _Judgement("failed", *reading.error)
    return _ending(response, reading, expect_tokens)


def _ending(response: Response, reading: Reading, expect_tokens: int | None) -> _Judgement:
    """State of a stream without an error."""
    cut = bool(reading.tail) or (response.framed and not response.complete)
    if cut and not reading.done:
        return _Judgement("truncated")
    proven = reading.done or (response.complete and response.framed)
    if not proven or (reading.finish is None and (reading.at or not reading.done)):
        return _Judgement("incomplete")
    if not reading.at:
        return _Judgement("empty", reasons=("no_tokens",))
    usage = _usage(reading.usage)
    got = usage.completion_tokens if usage is not None else None
    reasons = () if got is not None else ("no_usage",)
    if expect_tokens is not None and got is not None and got < expect_tokens:
        return _Judgement("short", reasons=(*reasons, "short"))
    return _Judgement("ok", reasons=reasons)


def _body_error(response: Response, default: str) -> tuple[str, str]:
    text = response.body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return default, text[:ERROR_LENGTH]
    code, message = error_of(value, default)
    return code, message[:ERROR_LENGTH]


@dataclass(frozen=True, slots=True)
class Interpreted:
    """The summary that crosses Ray, and what the sidecar files keep."""

    outcome: Outcome
    reading: Reading
    response: Response


def interpret(request_id: str, exchange: Exchange, expect_tokens: int | None = None) -> Interpreted:
    """Read one exchange. Never raises for what the server sent."""
    return conclude(request_id, exchange, parse_response(exchange.reads), expect_tokens)


def conclude(
    request_id: str, exchange: Exchange, response: Response, expect_tokens: int | None = None
) -> Interpreted:
    """As `interpret`, of a response whose HTTP framing is off already."""
    return finish(conclude_steps(request_id, exchange, response, expect_tokens))


def conclude_steps(
    request_id: str, exchange: Exchange, response: Response, expect_tokens: int | None = None
) -> Generator[None, None, Interpreted]:
    """As `conclude`, in short steps."""
    reading = yield from read_steps(response)
    judged = _judge(exchange.end, exchange.detail, response, reading, expect_tokens)
    outcome = Outcome(
        request_id=request_id,
        state=judged.state,
        sent_ns=exchange.sent_ns,
        sent_utc_ns=exchange.sent_utc_ns,
        first_ns=reading.at[0] if reading.at else None,
        last_ns=reading.at[-1] if reading.at else None,
        done_ns=response.complete_ns if response.complete_ns is not None else exchange.end_ns,
        stamp_source=exchange.stamp_source,
        reads=len(response.pieces),
        events=reading.events,
        content_chunks=len(set(reading.index)),
        usage=_usage(reading.usage),
        first_chunk_tokens=reading.tokens[0] if reading.at else None,
        finish=reading.finish,
        http_status=response.status,
        error_code=judged.code,
        error=judged.message,
        text_sha256=hashlib.sha256(reading.text.encode("utf-8")).hexdigest() if reading.at else None,
        timings=reading.report or None,
        reasons=(*judged.reasons, "clock_step") if exchange.clock_step else judged.reasons,
        segments=exchange.segments,
        merged_reads=reading.merged_reads,
        start_error_us=None
        if exchange.planned_ns is None
        else (exchange.sent_ns - exchange.planned_ns) / 1e3,
        lag=lag_counts(exchange.lags_ns),
        user_lag=lag_counts(exchange.user_lags_ns),
        retry_after=response.retry_after,
    )
    return Interpreted(outcome, reading, response)
