"""From reads to generated text: the events of a body, each with the time of its read. Pure.

An event is timed by the read that completes it. A token is generated text on any channel: content,
reasoning, refusal, tool call; a role, null or empty text is none.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

import orjson

from campaign.client.http1 import Response, finish
from campaign.client.sse import parse

Channel = Literal["content", "reasoning", "tool_call"]

_DONE: Final = b"[DONE]"
_STEP_EVENTS: Final = 32
_STEP_BYTES: Final = 1 << 14
ERROR_LENGTH: Final = 2000
_REPORTS: Final = frozenset({"timings", "sglext", "meta_info"})
_PLAIN_KEYS: Final = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier"}
)
_PLAIN_CHOICE: Final = frozenset({"index", "delta", "text", "finish_reason", "logprobs"})
_PLAIN_TEXT: Final = re.compile(rb'[^"\\\x00-\x1f]+')
_PLAIN_LINES: Final = re.compile(rb'[^"\\\x00-\x09\x0b-\x1f]+')
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
    """Everything read out of one response. What each chunk says stands in columns: there may be a million."""

    at: list[int] = field(default_factory=list)
    """Stamp of each chunk, ns."""
    texts: list[str] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    """Number of the event that each chunk came in."""
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
    def chunks(self) -> list[Chunk]:
        """The chunks as rows."""
        return list(map(Chunk, self.at, self.channels, self.texts, self.tokens, self.index))

    @property
    def text(self) -> str:
        """All generated text in order of arrival, every channel."""
        return join(self.texts)

    def channel(self, name: Channel) -> str:
        """Generated text of one channel."""
        if self.channels.count(name) == len(self.channels):
            return join(self.texts)
        return join(text for text, of in zip(self.texts, self.channels, strict=True) if of == name)


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


def read_steps(response: Response) -> Generator[None, None, Reading]:
    """As `read`, in short steps."""
    take, body = _Taker(response), response.body
    done = yield from _plain_steps(take, body)
    if done < len(body):
        # What is not made of whole events of one line each is read as the standard says.
        stream = parse(body[done:], first=not done)
        for number, event in enumerate(stream.events):
            if number % _STEP_EVENTS == _STEP_EVENTS - 1:
                yield
            take.event(event.data, event.type, done + event.end)
        take.reading.tail = stream.tail
    return take.finished()


def _plain_steps(take: "_Taker", body: bytes) -> Generator[None, None, int]:
    """Take whole events of one data line and LF, up to the first that is another; returns the bytes taken.

    Most events of a stream differ in nothing but the text of one chunk. Once one has been parsed, those like
    it are found by splitting the body at what stands between two such texts, hundreds at a time.
    """
    if b"\r" in body:
        return 0
    at = 0
    while True:
        end = body.find(b"\n\n", at)
        if end < 0 or not body.startswith(b"data:", at) or body.find(b"\n", at, end) >= 0:
            return at
        begin = at + 6 if body.startswith(b" ", at + 5) else at + 5
        like = take.event(body[begin:end], "message", end + 2)
        prefix, at = body[at:begin], end + 2
        if take.events % _STEP_EVENTS == 0:
            yield
        if like is None:
            continue
        head, tail = prefix + like.head, like.tail + b"\n\n"
        while body.startswith(head, at):
            start = at + len(head)
            cut = body.find(tail + head, at + _STEP_BYTES)
            texts = body[start : cut if cut >= 0 else len(body)].split(tail + head)
            if cut < 0:
                texts[-1], found, _ = texts[-1].partition(tail)
                if not found:
                    texts.pop()
            taken = take.alike(texts, start, len(head), len(tail))
            yield
            at += taken
            if not taken:
                break


class _Like(NamedTuple):
    """An event that was parsed, for those that differ from it in nothing but the text of their one chunk."""

    head: bytes
    tail: bytes

    @classmethod
    def of(cls, data: bytes, value: dict[str, Any], text: str) -> "_Like | None":
        """None where the event says more than its text."""
        if not _PLAIN_KEYS.issuperset(value) or len(value["choices"]) != 1:
            return None
        choice = value["choices"][0]
        if not _PLAIN_CHOICE.issuperset(choice) or choice.get("finish_reason") or value.get("usage"):
            return None
        word = b'"' + text.encode("utf-8", "replace") + b'"'
        head, _, tail = data.partition(word)
        # Elsewhere the same word would be left as it was.
        if data.count(word) != 1 or not head.endswith(
            (b'"content":', b'"content": ', b'"text":', b'"text": ')
        ):
            return None
        return cls(head + b'"', b'"' + tail)


def _plain_texts(parts: list[bytes]) -> list[str]:
    """Texts of JSON strings, up to the first that needs more than a look."""
    whole = b"\n".join(parts)
    if _PLAIN_LINES.fullmatch(whole) and b"" not in parts:
        try:
            texts = whole.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            texts = []
        if len(texts) == len(parts):
            return texts
    texts = []
    for part in parts:
        try:
            text = part.decode() if _PLAIN_TEXT.fullmatch(part) else orjson.loads(b'"%b"' % part)
        except ValueError:
            break
        if not text:
            break
        texts.append(text)
    return texts


class _Taker:
    """Takes the events of one body in order."""

    def __init__(self, response: Response) -> None:
        self.reading = Reading()
        self.events = 0
        self._stamps = [ns for ns, _ in response.pieces]
        self._ends = list(accumulate([len(data) for _, data in response.pieces]))
        self._piece = 0
        self._said = [0] * len(self._ends)
        """Events with text that each read completed."""
        self._silent = [0] * len(self._ends)
        """Other events."""

    def event(self, data: bytes, kind: str, end: int) -> _Like | None:
        """One event, whatever it is; what its like look like, where that can be told."""
        reading, index = self.reading, self.events
        self.events += 1
        while self._ends[self._piece] < end:
            self._piece += 1
        before = len(reading.at)
        like = None
        if data[:1] != b"{" and data.strip() == _DONE:
            reading.done = True
        else:
            like = self._read(data, kind, index, before)
        (self._said if len(reading.at) > before else self._silent)[self._piece] += 1
        return like

    def _read(self, data: bytes, kind: str, index: int, before: int) -> _Like | None:
        reading = self.reading
        try:
            value = _loads(data)
        except (ValueError, RecursionError):
            _fail(reading, "bad_event", data.decode("utf-8", "replace"))
            return None
        if kind == "error":
            _fail(reading, *error_of(value, "error"))
        elif not isinstance(value, dict):
            _fail(reading, "bad_event", data.decode("utf-8", "replace"))
        else:
            _take(reading, value, self._stamps[self._piece], index)
            if len(reading.at) == before + 1 and reading.channels[-1] == "content":
                return _Like.of(data, value, reading.texts[-1])
        return None

    def alike(self, parts: list[bytes], start: int, head: int, tail: int) -> int:
        """Events with nothing but a text each, between a head and a tail of so many bytes; bytes taken."""
        texts = _plain_texts(parts)
        count = len(texts)
        if not count:
            return 0
        ends = list(accumulate([len(part) + head + tail for part in parts[:count]], initial=start - head))
        taken = ends.pop(0)
        taken = ends[-1] - taken
        reading, piece, bounds = self.reading, self._piece, self._ends
        while bounds[piece] < ends[0]:
            piece += 1
        if ends == bounds[piece : piece + count]:
            # One event a read.
            reading.at += self._stamps[piece : piece + count]
            self._said[piece : piece + count] = [n + 1 for n in self._said[piece : piece + count]]
            piece += count - 1
        else:
            done = 0
            while True:
                upto = bisect_right(ends, bounds[piece], done)
                self._said[piece] += upto - done
                reading.at += [self._stamps[piece]] * (upto - done)
                done = upto
                if done == count:
                    break
                piece += 1
        self._piece = piece
        reading.texts += texts
        reading.channels += ["content"] * count
        reading.tokens += [None] * count
        reading.index += range(self.events, self.events + count)
        self.events += count
        return taken

    def finished(self) -> Reading:
        """All that was read."""
        reading = self.reading
        reading.events = self.events
        reading.read_events = [a + b for a, b in zip(self._said, self._silent, strict=True)]
        reading.merged_reads = sum(n > 1 for n in self._said)
        if reading.tail.strip() in {b"data:[DONE]", b"data: [DONE]"}:
            # Some servers close right after the last word, without its blank line.
            reading.done, reading.tail, reading.events = True, b"", reading.events + 1
        return reading


def _loads(data: bytes) -> Any:
    """JSON of an event; orjson refuses lone surrogates, which servers do send."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data.decode("utf-8"))


def _take(reading: Reading, value: dict[str, Any], ns: int, index: int) -> None:
    if value.get("error") is not None or value.get("object") == "error":
        _fail(reading, *error_of(value, "error"))
        return
    usage = value.get("usage")
    tokens = None
    if isinstance(usage, dict):
        reading.usage = usage
        tokens = token_count(usage.get("completion_tokens"))
    if not _REPORTS.isdisjoint(value):
        _report(reading, value)
    choices = value.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        if not _REPORTS.isdisjoint(choice):
            _report(reading, choice)
        for channel, text in _generated(choice):
            reading.at.append(ns)
            reading.texts.append(text)
            reading.channels.append(channel)
            reading.tokens.append(tokens)
            reading.index.append(index)
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
        reading.error = (code, message[:ERROR_LENGTH])


def error_of(value: Any, default: str) -> tuple[str, str]:
    """(code, message) of an error object in any of the shapes servers use."""
    found = value.get("error", value) if isinstance(value, dict) else value
    if found is None:
        found = value
    if not isinstance(found, dict):
        return default, str(found)
    code = next((found[k] for k in ("code", "type", "status") if found.get(k) not in (None, "")), default)
    message = found.get("message", found.get("detail"))
    return str(code), message if isinstance(message, str) else json.dumps(found)


def token_count(value: Any) -> int | None:
    """A count that a server could mean; anything else is unknown."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < 2**31 else None
