"""A server that knows when it sent what: the truth that clients are held against. A process of its own.

It speaks the OpenAI streaming API (`/v1/chat/completions`, `/v1/completions`, `/v1/models`) and emits tokens
on a known schedule: token k is due `ttft_ms + k * 1000 / rate` after the request reached its kernel. Every
send is stamped just before it is made (negative: the send was interrupted, so leave it out of lags). `GET /stamps` gives the stamps of finished answers and forgets them;
`GET /stats` gives its own load: chunks, CPU seconds, and how late sends were against the schedule.

    python -m campaign.testing.reference_server [--ttft-ms 50] [--rate 93] [--cpu N]

prints `{"port": N}` and serves on 127.0.0.1 until it is ended. A request may bring its own `schedule`
(fields of `Schedule`); a body without one gets that of the command line, `max_tokens` tokens long.
"""

import argparse
import contextlib
import gc
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

from campaign.client import stamps
from campaign.client.pacer import PACING, fine_timer, prompt

MODEL = "reference"
_POLL_NS = 1_000_000
_BLOCK = 1 << 16
_LATE_KEPT = 1 << 20
_CLEAN_NS = 100_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one answer is sent."""

    ttft_ms: float = 50.0
    rate: float = 93.0
    """Events per second."""
    tokens: int = 128
    per_event: int = 1
    """Tokens in one event; above 1 every event carries running usage."""
    cut_seed: int | None = None
    """Events are cut at a random place into two sends, half a period apart."""
    stall_at: int | None = None
    """Event before which `stall_ms` pass."""
    stall_ms: float = 0.0
    reset_at: int | None = None
    """Event instead of which the connection is reset."""
    paced: bool = True
    """False: as fast as the client reads, in blocks of many events; nothing is stamped."""

    @property
    def events(self) -> int:
        """Events that carry text."""
        return -(-self.tokens // self.per_event)


def chunk(identity: str, text: str, *, chat: bool, finish: str | None = None, usage: Any = None) -> bytes:
    """One event with its HTTP chunk framing."""
    part: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
    part |= {"delta": {"content": text} if text else {}} if chat else {"text": text}
    value: dict[str, Any] = {
        "id": identity,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [part] if usage is None or text else [],
    }
    if usage is not None:
        value["usage"] = usage
    return framed(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


def framed(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def usage_of(tokens: int) -> dict[str, int]:
    """A usage object."""
    return {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": tokens + 8}


class Answer:
    """One response under way."""

    def __init__(self, identity: str, schedule: Schedule, arrival_ns: int, *, chat: bool) -> None:
        self.identity = identity
        self.schedule = schedule
        self.arrival_ns = arrival_ns
        self.chat = chat
        self.sends = array("q")
        """Stamp of the send that completed each event; negative where the send took so long that this process
        must have been interrupted in it, and its stamp says little about when the bytes left."""
        self.rest = b""
        self._steps = self._plan()
        self.due, self.data, self.whole = next(self._steps)

    def advance(self) -> bool:
        """Go to the next send; False after the last."""
        step = next(self._steps, None)
        if step is None:
            return False
        self.due, self.data, self.whole = step
        return True

    def _plan(self) -> Iterator[tuple[int, bytes, bool]]:
        """(due ns, bytes, whether they complete an event); empty bytes ask for a reset."""
        plan = self.schedule
        period = 1e9 / plan.rate
        start = self.arrival_ns + int(plan.ttft_ms * 1e6)
        shift = 0
        cuts = None if plan.cut_seed is None else random.Random(plan.cut_seed)  # noqa: S311 -- places of cuts
        plain = chunk(self.identity, " token" * plan.per_event, chat=self.chat)
        for k in range(plan.events):
            if k == plan.stall_at:
                shift += int(plan.stall_ms * 1e6)
            due = start + int(k * period) + shift
            if k == plan.reset_at:
                yield due, b"", False
                return
            data = plain
            if plan.per_event > 1:
                held = min(plan.per_event, plan.tokens - k * plan.per_event)
                so_far = usage_of(k * plan.per_event + held)
                data = chunk(self.identity, " token" * held, chat=self.chat, usage=so_far)
            if cuts is not None:
                at = cuts.randrange(1, len(data))
                yield due, data[:at], False
                yield due + int(period / 2), data[at:], True
            else:
                yield due, data, True
        last = chunk(self.identity, "", chat=self.chat, finish="length")
        used = chunk(self.identity, "", chat=self.chat, usage=usage_of(plan.tokens))
        end = last + used + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        yield start + int(plan.events * period) + shift, end, False

    def unpaced(self) -> Iterator[bytes]:
        """All of it, in blocks."""
        plain = chunk(self.identity, " token", chat=self.chat)
        each = max(1, _BLOCK // len(plain))
        left = self.schedule.events
        while left:
            n = min(each, left)
            left -= n
            yield plain * n
        *_, (_, end, _) = self._plan()
        yield end


class _Peer:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.held = b""
        self.answer: Answer | None = None
        self.blocks: Iterator[bytes] | None = None
        self.keep = True


class Server:
    """One thread: sends what is due, and looks for requests at least once a millisecond."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)  # noqa: FBT003 -- the name of the argument in the standard library is `flag`
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._peers: dict[int, _Peer] = {}
        self._due: list[tuple[int, int, _Peer]] = []
        self._count = 0
        self._finished: dict[str, dict[str, Any]] = {}
        self._late = array("q")
        self._chunks = 0
        self._cpu = time.process_time()

    def run(self) -> None:
        """Serve until the process is ended."""
        fine_timer()
        prompt(PACING)
        due, looked = self._due, 0
        while True:
            now = time.monotonic_ns()
            while due and due[0][0] <= now and now - looked < _POLL_NS:
                self._send(heapq.heappop(due)[2])
                now = time.monotonic_ns()
            wait = min(due[0][0], looked + _POLL_NS) - now if due else -1
            if wait > 20_000:
                time.sleep(wait / 1e9)
                continue
            if not due or now - looked >= _POLL_NS:
                self._look(-1 if not due else 0)
                looked = time.monotonic_ns()

    def _look(self, timeout: float) -> None:
        for fd, events in self._epoll.poll(timeout):
            if fd == self._listener.fileno():
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._accept()
                continue
            peer = self._peers.get(fd)
            if peer is None:
                continue
            if events & select.EPOLLOUT:
                self._blast(peer)
            if events & ~select.EPOLLOUT:
                self._receive(peer)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stamps.enable(sock)
        self._peers[sock.fileno()] = _Peer(sock)
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _drop(self, peer: _Peer) -> None:
        fd = peer.sock.fileno()
        if self._peers.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            peer.sock.close()
        peer.answer = None

    def _receive(self, peer: _Peer) -> None:
        try:
            data, ancillary, _, _ = peer.sock.recvmsg(1 << 16, stamps.ANCILLARY)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        real = stamps.realtime_ns(ancillary)
        arrival = real - stamps.offset().ns if real else time.monotonic_ns()
        peer.held += data
        head, found, rest = peer.held.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            return
        peer.held = rest[length:]
        peer.keep = headers.get("connection", "").lower() != "close"
        method, path, _ = first.split(" ", 2)
        self._answer(peer, method, path.partition("?")[0], rest[:length], arrival)

    def _answer(self, peer: _Peer, method: str, path: str, body: bytes, arrival: int) -> None:
        if method == "POST" and path.endswith("/completions"):
            self._begin(peer, json.loads(body), arrival, chat=path.endswith("/chat/completions"))
        elif path == "/stamps":
            found, self._finished = self._finished, {}
            self._page(peer, found)
        elif path == "/stats":
            self._page(peer, self._stats())
        elif path.endswith("/models"):
            self._page(
                peer, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "campaign"}]}
            )
        else:
            self._page(peer, {"status": "ok"})

    def _begin(self, peer: _Peer, body: dict[str, Any], arrival: int, *, chat: bool) -> None:
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or self.schedule.tokens
        schedule = replace(self.schedule, **{"tokens": asked, **body.get("schedule", {})})
        self._count += 1
        identity = f"cmpl-{self._count}"
        if not body.get("stream"):
            text = " token" * schedule.tokens
            part = {"index": 0, "finish_reason": "length"}
            part |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            kind = "chat.completion" if chat else "text_completion"
            value = {"id": identity, "object": kind, "created": 1700000000, "model": MODEL, "choices": [part]}
            self._page(peer, {**value, "usage": usage_of(schedule.tokens)})
            return
        answer = peer.answer = Answer(identity, schedule, arrival, chat=chat)
        kept = b"" if peer.keep else b"Connection: close\r\n"
        self._push(
            peer,
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            + kept
            + b"Transfer-Encoding: chunked\r\n\r\n",
        )
        if schedule.paced:
            heapq.heappush(self._due, (answer.due, id(peer), peer))
        else:
            peer.blocks = answer.unpaced()
            self._epoll.modify(peer.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _push(self, peer: _Peer, data: bytes) -> bytes:
        """Send; returns what did not fit."""
        try:
            return data[peer.sock.send(data) :]
        except BlockingIOError:
            return data
        except OSError:
            self._drop(peer)
            return b""

    def _send(self, peer: _Peer) -> None:
        answer = peer.answer
        if answer is None:
            return
        if answer.rest:
            answer.rest = self._push(peer, answer.rest)
            if answer.rest:
                heapq.heappush(self._due, (time.monotonic_ns() + 1_000_000, id(peer), peer))
                return
        elif not answer.data:
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._keep(answer)
            self._drop(peer)
            return
        else:
            now = time.monotonic_ns()
            answer.rest = self._push(peer, answer.data)
            if answer.whole:
                clean = time.monotonic_ns() - now <= _CLEAN_NS
                answer.sends.append(now if clean else -now)
                self._chunks += 1
            if len(self._late) < _LATE_KEPT:
                self._late.append(now - answer.due)
            if answer.rest:
                heapq.heappush(self._due, (now + 1_000_000, id(peer), peer))
                return
        if answer.advance():
            heapq.heappush(self._due, (answer.due, id(peer), peer))
        else:
            self._done(peer, answer)

    def _blast(self, peer: _Peer) -> None:
        answer = peer.answer
        if answer is None or peer.blocks is None:
            return
        data = answer.rest or next(peer.blocks, b"")
        if data:
            answer.rest = self._push(peer, data)
            return
        if peer.answer is not None:
            self._epoll.modify(peer.sock.fileno(), select.EPOLLIN)
            peer.blocks = None
            self._done(peer, answer)

    def _done(self, peer: _Peer, answer: Answer) -> None:
        self._keep(answer)
        peer.answer = None
        if not peer.keep:
            self._drop(peer)

    def _keep(self, answer: Answer) -> None:
        self._finished[answer.identity] = {"arrival_ns": answer.arrival_ns, "send_ns": answer.sends.tolist()}

    def _stats(self) -> dict[str, Any]:
        """Since the last call: chunks sent, CPU seconds, lateness of sends in us (p50, p99, max)."""
        cpu = time.process_time()
        late = sorted(self._late)
        chunks, used = self._chunks, cpu - self._cpu
        self._chunks, self._cpu, self._late = 0, cpu, array("q")

        def at(share: float) -> float | None:
            return late[min(len(late) - 1, int(share * len(late)))] / 1e3 if late else None

        return {
            "chunks": chunks,
            "cpu_s": used,
            "late_p50_us": at(0.5),
            "late_p99_us": at(0.99),
            "late_max_us": at(1.0),
            "schedule": asdict(self.schedule),
        }

    def _page(self, peer: _Peer, value: Any) -> None:
        data = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        peer.sock.settimeout(30)
        with contextlib.suppress(OSError):
            peer.sock.sendall(head + data)
        if peer.keep:
            peer.sock.settimeout(0)
        else:
            self._drop(peer)


class ReferenceServer:
    """Context manager: the server in a process of its own.

    `url` is its base URL. `cpu` pins it. Raises OSError where it cannot be started.
    """

    def __init__(self, schedule: Schedule | None = None, *, cpu: int | None = None) -> None:
        plan = schedule or Schedule()
        self._argv = [sys.executable, "-m", "campaign.testing.reference_server"]
        self._argv += ["--ttft-ms", str(plan.ttft_ms), "--rate", str(plan.rate), "--tokens", str(plan.tokens)]
        if cpu is not None:
            self._argv += ["--cpu", str(cpu)]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        """Of the server."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._argv, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._close()
            raise OSError("the reference server did not start")
        self.url = f"http://127.0.0.1:{json.loads(line)['port']}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.close()
        process.kill()
        process.wait(10)
        process.stdout.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A reference server for clients of streamed tokens.")
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--rate", type=float, default=93.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--cpu", type=int, help="pin to this CPU")
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    # Not to outlive whoever started it.
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    server = Server(Schedule(options.ttft_ms, options.rate, options.tokens))
    gc.collect()
    gc.freeze()
    gc.disable()
    print(json.dumps({"port": server.port}), flush=True)
    server.run()


if __name__ == "__main__":
    main()
