"""From reads to an outcome: tokens, usage, times, and what became of the request. Pure.

An event is timed by the read that completes it. A token is generated text on any channel: content,
reasoning, refusal, tool call; a role, null or empty text is none. Token counts come from the server's
`usage` alone, never from counting chunks or tokenising text.

States: `failed` an error, a reset, a timeout, or not a stream; `cancelled` by us; `truncated` the body was
cut inside an event or against its HTTP length; `incomplete` it ended between events without a finish
reason, or without any proof that it had ended; `empty` it ended well without a token; `short` fewer tokens
than `ignore_eos` asked for; else `ok`.
"""

import hashlib
import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

import orjson

from campaign.client.base import Outcome, Usage
from campaign.client.http1 import Response, finish, parse_response
from campaign.client.lag import lag_counts
from campaign.client.reader import Exchange
from campaign.client.sse import parse
from campaign.store.row import State

Channel = Literal["content", "reasoning", "tool_call"]

_DONE: Final = b"[DONE]"
_STEP_EVENTS: Final = 32
_ERROR_LENGTH: Final = 2000
_REPORTS: Final = frozenset({"timings", "sglext", "meta_info"})
_PLAIN_KEYS: Final = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier"}
)
_PLAIN_CHOICE: Final = frozenset({"index", "delta", "text", "finish_reason", "logprobs"})
_PLAIN_TEXT: Final = re.compile(rb'[^"\\\x00-\x1f]+')
_WORDS: Final[Mapping[str, Channel]] = {
    "content": "content",
    "refusal": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
}


class Chunk(NamedTuple):
    """One event that carried generated text."""

    ns: int
    channel: Channel
    text: str
    tokens: int | None
    """Completion tokens so far, where this event says so (continuous usage)."""
    event: int
    """Which event it came in: one event may carry several channels or choices."""


@dataclass(slots=True)
class Reading:
    """Everything read out of one response."""

    chunks: list[Chunk] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    finish: str | None = None
    done: bool = False
    """`[DONE]` arrived."""
    events: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    """(code, message) of the first error object, or of the first event that is not what it should be."""
    tail: bytes = b""
    read_events: list[int] = field(default_factory=list)
    """Events that each read of the body completed."""
    merged_reads: int = 0
    """Reads that completed more than one event with generated text."""

    @property
    def text(self) -> str:
        """All generated text in order of arrival, every channel."""
        return join(chunk.text for chunk in self.chunks)

    def channel(self, name: Channel) -> str:
        """Generated text of one channel."""
        return join(chunk.text for chunk in self.chunks if chunk.channel == name)


def join(parts: Any) -> str:
    """Join text pieces; surrogate pairs that were cut between pieces become the character they mean."""
    text = "".join(parts)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def read(response: Response) -> Reading:
    """Read the events of a body, each timed by the read that completes it. Never raises."""
    return finish(read_steps(response))


def read_steps(response: Response) -> Generator[None, None, Reading]:  # noqa: C901 -- the hot loop: calls cost
    """As `read`, in short steps."""
    reading = Reading()
    stream = parse(response.body)
    ends = list(accumulate(len(piece.data) for piece in response.pieces))
    reading.events = len(stream.events)
    reading.tail = stream.tail
    reading.read_events = [0] * len(ends)
    piece, last_piece, held = 0, -1, 0
    like: _Like | None = None
    for index, event in enumerate(stream.events):
        if index % _STEP_EVENTS == _STEP_EVENTS - 1:
            yield
        data, kind, _, end = event
        while ends[piece] < end:
            piece += 1
        reading.read_events[piece] += 1
        if data[:1] != b"{" and data.strip() == _DONE:
            reading.done = True
            continue
        before = len(reading.chunks)
        if like is not None and kind == "message" and (text := like.text(data)) is not None:
            reading.chunks.append(Chunk(response.pieces[piece].ns, "content", text, None, index))
            held = held + 1 if piece == last_piece else 1
            reading.merged_reads += held == 2
            last_piece = piece
            continue
        try:
            value = _loads(data)
        except (ValueError, RecursionError):
            _fail(reading, "bad_event", data.decode("utf-8", "replace"))
            continue
        if kind == "error":
            _fail(reading, *_error_of(value, "error"))
        elif not isinstance(value, dict):
            _fail(reading, "bad_event", data.decode("utf-8", "replace"))
        else:
            _take(reading, value, response.pieces[piece].ns, index)
            if len(reading.chunks) > before:
                like = _Like.of(data, value, reading.chunks[before:])
                held = held + 1 if piece == last_piece else 1
                reading.merged_reads += held == 2
                last_piece = piece
    if reading.tail.strip() in {b"data:[DONE]", b"data: [DONE]"}:
        # Some servers close right after the last word, without its blank line.
        reading.done, reading.tail, reading.events = True, b"", reading.events + 1
    return reading


class _Like(NamedTuple):
    """An event that was parsed, for those that differ from it in nothing but the text of their one chunk."""

    head: bytes
    tail: bytes

    @classmethod
    def of(cls, data: bytes, value: dict[str, Any], chunks: list[Chunk]) -> "_Like | None":
        """None where the event says more than its text."""
        if len(chunks) != 1 or chunks[0].channel != "content" or not _PLAIN_KEYS.issuperset(value):
            return None
        if len(value["choices"]) != 1:
            return None
        choice = value["choices"][0]
        if not _PLAIN_CHOICE.issuperset(choice) or choice.get("finish_reason") or value.get("usage"):
            return None
        head, found, tail = data.partition(b'"' + chunks[0].text.encode("utf-8", "replace") + b'"')
        if not found or not head.endswith((b'"content":', b'"content": ', b'"text":', b'"text": ')):
            return None
        return cls(head + b'"', b'"' + tail)

    def text(self, data: bytes) -> str | None:
        """The text of an event that is alike; None where it is not, or its text needs a JSON parser."""
        if not data.startswith(self.head) or not data.endswith(self.tail):
            return None
        part = data[len(self.head) : -len(self.tail)]
        if not _PLAIN_TEXT.fullmatch(part):
            return None
        try:
            return part.decode("utf-8")
        except UnicodeDecodeError:
            return None


def _loads(data: bytes) -> Any:
    """JSON of an event; orjson refuses lone surrogates, which servers do send."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data.decode("utf-8"))


def _take(reading: Reading, value: dict[str, Any], ns: int, index: int) -> None:
    if value.get("error") is not None or value.get("object") == "error":
        _fail(reading, *_error_of(value, "error"))
        return
    usage = value.get("usage")
    tokens = None
    if isinstance(usage, dict):
        reading.usage = usage
        tokens = _count(usage.get("completion_tokens"))
    if not _REPORTS.isdisjoint(value):
        _report(reading, value)
    choices = value.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        if not _REPORTS.isdisjoint(choice):
            _report(reading, choice)
        for channel, text in _generated(choice):
            reading.chunks.append(Chunk(ns, channel, text, tokens, index))
        finish = choice.get("finish_reason")
        if isinstance(finish, str):
            reading.finish = finish
            if finish in {"error", "abort"}:
                _fail(reading, f"finish_{finish}", f"the server ended the request with {finish!r}")


def _report(reading: Reading, value: dict[str, Any]) -> None:
    """Keep the engine's own words: llama.cpp `timings` flat, SGLang `sglext` and `meta_info`, vLLM `metrics` by name."""
    timings = value.get("timings")
    if isinstance(timings, dict):
        reading.report.update(timings)
    for name in ("sglext", "meta_info", "metrics"):
        if isinstance(value.get(name), dict):
            # SGLang sends two `sglext`: of cached tokens, and of speculation.
            reading.report[name] = {**reading.report.get(name, {}), **value[name]}


def _generated(choice: dict[str, Any]) -> list[tuple[Channel, str]]:
    out: list[tuple[Channel, str]] = []
    if isinstance(text := choice.get("text"), str) and text:
        out.append(("content", text))
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return out
    if len(delta) == 1 and isinstance(word := delta.get("content"), str):
        # The usual delta.
        if word:
            out.append(("content", word))
        return out
    said: set[tuple[Channel, str]] = set()
    for name, channel in _WORDS.items():
        word = delta.get(name)
        # vLLM sends the same text as `reasoning` and `reasoning_content`.
        if isinstance(word, str) and word and (channel, word) not in said:
            said.add((channel, word))
            out.append((channel, word))
    calls = delta.get("tool_calls")
    functions = [c.get("function") for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
    for function in [*functions, delta.get("function_call")]:
        if isinstance(function, dict):
            words = (function.get("name"), function.get("arguments"))
            called = "".join(w for w in words if isinstance(w, str))
            if called:
                out.append(("tool_call", called))
    return out


def _fail(reading: Reading, code: str, message: str) -> None:
    if reading.error is None:
        reading.error = (code, message[:_ERROR_LENGTH])


def _error_of(value: Any, default: str) -> tuple[str, str]:
    """(code, message) of an error object in any of the shapes servers use."""
    found = value.get("error", value) if isinstance(value, dict) else value
    if found is None:
        found = value
    if not isinstance(found, dict):
        return default, str(found)
    code = next((found[k] for k in ("code", "type", "status") if found.get(k) not in (None, "")), default)
    message = found.get("message", found.get("detail"))
    return str(code), message if isinstance(message, str) else json.dumps(found)


def _count(value: Any) -> int | None:
    """A count that a server could mean; anything else is unknown."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < 2**31 else None


def _usage(raw: dict[str, Any] | None) -> Usage | None:
    if raw is None:
        return None
    details = raw.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(_count(raw.get("prompt_tokens")), _count(raw.get("completion_tokens")), _count(cached))


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
    if not proven or (reading.finish is None and (reading.chunks or not reading.done)):
        return _Judgement("incomplete")
    if not reading.chunks:
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
        return default, text[:_ERROR_LENGTH]
    code, message = _error_of(value, default)
    return code, message[:_ERROR_LENGTH]


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
    chunks = reading.chunks
    outcome = Outcome(
        request_id=request_id,
        state=judged.state,
        sent_ns=exchange.sent_ns,
        sent_utc_ns=exchange.sent_utc_ns,
        first_ns=chunks[0].ns if chunks else None,
        last_ns=chunks[-1].ns if chunks else None,
        done_ns=response.complete_ns if response.complete_ns is not None else exchange.end_ns,
        stamp_source=exchange.stamp_source,
        reads=len(response.pieces),
        events=reading.events,
        content_chunks=len({chunk.event for chunk in chunks}),
        usage=_usage(reading.usage),
        first_chunk_tokens=chunks[0].tokens if chunks else None,
        finish=reading.finish,
        http_status=response.status,
        error_code=judged.code,
        error=judged.message,
        text_sha256=hashlib.sha256(reading.text.encode("utf-8")).hexdigest() if chunks else None,
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
