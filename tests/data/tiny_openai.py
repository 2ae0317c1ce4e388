"""A server of one file and no package: it lists a model, and says "w" as often as it is asked to."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ARGS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
KEY = os.environ.get("TINY_KEY", "")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer({"data": [{"id": ARGS["--model"]}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.answer({"error": "key"}, 401)
        usage = {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}
        return self.answer(
            {"choices": [{"text": "w " * body["max_tokens"], "finish_reason": "length"}], "usage": usage}
        )

    def answer(self, value: dict[str, object], status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


print("serving", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(ARGS["--port"])), Handler).serve_forever()
