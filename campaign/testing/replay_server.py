"""A process that plays recorded answers of a real engine over a real socket, so that an adapter meets its bytes.

    python -m campaign.testing.replay_server RECORDING.json [the engine's own command line]

The recording names files beside it. Its log is printed before the port is bound, pages and answers are sent byte
for byte, and a flag that the engine's version does not know ends the process as the engine's own parser does.
Counters stand at the first recorded page until the first recorded answer went out, and at the second one after
it. One thing is derived and not recorded: a completion of one token (the probe that proves a server ready) is the
recorded one, cut.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from campaign.engines.flags.check import options
from campaign.engines.flags.table import shipped


@dataclass(frozen=True, slots=True)
class Recording:
    """What one server said. File names are relative to the recording's folder."""

    folder: Path
    engine: str
    version: str
    """Whose flag table the command line is held against; empty takes any."""
    log: str | None = None
    log_until: str = ""
    """The log is printed up to the first line that holds this."""
    pages: dict[str, str] = field(default_factory=dict)
    """Path -> file of a JSON page, sent to GET and POST alike."""
    literal: dict[str, Any] = field(default_factory=dict)
    """Path -> JSON value, for pages that nobody recorded."""
    metrics: tuple[str, ...] = ()
    """Pages before and after the answers."""
    answers: dict[str, str] = field(default_factory=dict)
    """`PATH`, `PATH stream` or `PATH stream continuous` -> file: a JSON answer, or raw server-sent events."""
    key_env: str | None = None
    """Variable that holds the key every page but /health asks for."""
    refuses_meta: bool = False
    """Answers 400 to `return_meta_info` in a stream, as SGLang 0.5.14 did."""

    @classmethod
    def load(cls, path: Path) -> "Recording":
        """Read a recording. Raises OSError, ValueError or TypeError."""
        given = json.loads(path.read_text(encoding="utf-8"))
        return cls(folder=path.parent, **{**given, "metrics": tuple(given.get("metrics", ()))})

    def bytes(self, name: str) -> bytes:
        """Content of a file; the body alone where the recorder kept `{status, body}`."""
        raw = (self.folder / name).read_bytes()
        if name.endswith(".json"):
            value = json.loads(raw)
            if isinstance(value, dict) and set(value) == {"status", "body"}:
                return json.dumps(value["body"]).encode()
        return raw


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recording: Recording
    answered = 0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name is the library's
        print(f"INFO: {self.client_address[0]} - {format % args}", flush=True)  # it is a server's log

    def do_GET(self) -> None:
        recording = self.recording
        if self.path == "/health":
            return self._send(200, b"")
        if not self._allowed():
            return self._send(401, b'{"error": "Unauthorized"}')
        if self.path == "/metrics" and recording.metrics:
            page = recording.metrics[min(type(self).answered, len(recording.metrics) - 1)]
            return self._send(200, recording.bytes(page), "text/plain; version=0.0.4")
        if self.path in recording.pages:
            return self._send(200, recording.bytes(recording.pages[self.path]))
        if self.path in recording.literal:
            return self._send(200, json.dumps(recording.literal[self.path]).encode())
        return self._send(404, b'{"detail":"Not Found"}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if not self.path.startswith("/v1/"):
            return self.do_GET()
        if not self._allowed():
            return self._send(401, b'{"error": "Unauthorized"}')
        asked = json.loads(body)
        if asked.get("stream") and asked.get("return_meta_info") and self.recording.refuses_meta:
            return self._send(
                400, b'{"object": "error", "message": "return_meta_info is not supported with streaming."}'
            )
        if asked.get("max_tokens") == 1 and not asked.get("stream"):
            return self._send(200, self._probe(asked))
        words = [self.path, *["stream"] * bool(asked.get("stream"))]
        continuous = (asked.get("stream_options") or {}).get("continuous_usage_stats")
        names = [" ".join([*words, *["continuous"] * bool(continuous)]), " ".join(words)]
        name = next((self.recording.answers[n] for n in names if n in self.recording.answers), None)
        if name is None:
            return self._send(404, b'{"detail":"Not Found"}')
        data = self.recording.bytes(name)
        if asked.get("stream"):
            self._stream(data)
        else:
            self._send(200, data)
        type(self).answered += 1
        return None

    def _probe(self, asked: dict[str, Any]) -> bytes:
        name = self.recording.answers.get("/v1/completions")
        text: dict[str, Any] = {"object": "text_completion", "choices": [{"text": ""}]}
        if name is not None:
            text = json.loads(self.recording.bytes(name))
        usage = text.setdefault("usage", {"prompt_tokens": 5})
        usage |= {"completion_tokens": 1, "total_tokens": usage["prompt_tokens"] + 1}
        text["model"] = asked.get("model")
        text["choices"][0]["text"] = str(text["choices"][0]["text"])[:6]
        return json.dumps(text).encode()

    def _stream(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in re.findall(rb".*?(?:\r?\n\r?\n|\Z)", data, re.DOTALL):
            if event:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _allowed(self) -> bool:
        key = os.environ.get(self.recording.key_env or "", "")
        return not key or self.headers.get("Authorization") == f"Bearer {key}"

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def refuse_unknown(recording: Recording, argv: Sequence[str]) -> None:
    """End with status 2 and the words of the engine's own parser where it does not know a flag."""
    table = shipped(recording.engine, recording.version)
    if table is None:
        return
    for flag, values in options(argv):
        if flag not in table.flags:
            print(
                f"error: unrecognized arguments: {' '.join((flag, *values))}", file=sys.stderr, flush=True
            )  # likewise
            raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Play a recording on 127.0.0.1 at the port of the command line until ended."""
    given = list(sys.argv[1:] if argv is None else argv)
    recording = Recording.load(Path(given[0]))
    refuse_unknown(recording, given[1:])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    port: int = parser.parse_known_args(given[1:])[0].port
    if recording.log is not None:
        for line in (recording.folder / recording.log).read_text(encoding="utf-8").splitlines():
            print(line, flush=True)  # likewise
            if recording.log_until and recording.log_until in line:
                break
    handler = type("Handler", (_Handler,), {"recording": recording})
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()


if __name__ == "__main__":
    main()
