"""`python -m sglang.launch_server` as the adapter meets it, after pages and log of a real 0.5.14.

The pages come from the recorded ones (in the folder that fixtures.txt beside this file names), with what the command line asked for put in. A token takes
STEP_S, a verify step twice that. Generation is per request: batching is not imitated.
"""

import argparse
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STEP_S = 0.002
PREFILL_S = 0.004


def options() -> argparse.Namespace:
    """The flags that the adapter writes; an unknown one ends the start, as in SGLang."""
    p = argparse.ArgumentParser(allow_abbrev=False)
    for flag, kind in (
        ("--model-path", str), ("--served-model-name", str), ("--host", str), ("--port", int),
        ("--sampling-defaults", str), ("--context-length", int), ("--kv-cache-dtype", str), ("--tp-size", int),
        ("--attention-backend", str), ("--mem-fraction-static", float), ("--load-format", str),
        ("--max-running-requests", int), ("--sampling-backend", str), ("--grammar-backend", str),
        ("--random-seed", int), ("--max-total-tokens", int), ("--speculative-algorithm", str),
        ("--speculative-num-draft-tokens", int), ("--speculative-ngram-min-bfs-breadth", int),
        ("--speculative-ngram-max-bfs-breadth", int),
    ):  # fmt: skip
        p.add_argument(flag, type=kind)
    for flag in ("--enable-metrics", "--disable-radix-cache", "--disable-prefill-cuda-graph"):
        p.add_argument(flag, action="store_true")
    p.add_argument("--cuda-graph-bs-decode", type=int, nargs="+")
    return p.parse_args()


class Server:
    """State of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.lock = args, threading.Lock()
        self.drafts = args.speculative_algorithm == "NGRAM"
        folder = Path(Path(__file__).with_name("fixtures.txt").read_text())
        kind = "ngram4" if self.drafts else "base"
        self.info = json.loads((folder / f"sglang_{kind}.server_info.json").read_text())
        self.loads = json.loads((folder / f"sglang_{kind}.v1_loads.json").read_text())
        self.capacity = args.max_total_tokens or 572_948
        asked = {k: v for k, v in vars(args).items() if v is not None and k in self.info}
        self.info |= asked | {
            "mem_fraction_static": args.mem_fraction_static,
            "kv_cache_dtype": args.kv_cache_dtype,
            "tp_size": args.tp_size,
            "max_total_num_tokens": self.capacity,
        }
        self.accept = float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "1"))
        self.generated = self.verifies = self.prompted = self.requests = 0

    def log(self) -> None:
        """The lines that the adapter reads."""
        of = {"bf16": "bfloat16", "fp8_e5m2": "float8_e5m2", "fp8_e4m3": "float8_e4m3fn"}
        print(
            f"KV Cache is allocated. dtype: torch.{of[self.args.kv_cache_dtype]}, #tokens: {self.capacity}, K size: 1.00 GB, V size: 1.00 GB",
            flush=True,
        )
        if self.drafts:
            width = self.args.speculative_num_draft_tokens
            print(
                f"Capture target verify CUDA graph begin. backend=full, num_tokens_per_bs={width}, bs=[1]",
                flush=True,
            )

    def metrics(self) -> str:
        """The counters, by their real names and labels."""
        labels = '{engine_type="unified",model_name="m"}'
        lines = [
            f"sglang:prompt_tokens_total{labels} {float(self.prompted)}",
            f"sglang:generation_tokens_total{labels} {float(self.generated)}",
            f"sglang:num_requests_total{labels} {float(self.requests)}",
        ]
        if self.verifies:
            lines.append(f"sglang:spec_verify_calls_total{labels} {float(self.verifies)}")
        return "\n".join(lines) + "\n"


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    """The request handler of one server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_args: Any) -> None:
            pass

        def page(self, body: str, kind: str = "application/json") -> None:
            data = body.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:  # the name is http.server's
            name = server.args.served_model_name
            match self.path:
                case "/health":
                    self.page("")
                case "/v1/models":
                    self.page(json.dumps({"object": "list", "data": [{"id": name}]}))
                case "/server_info":
                    self.page(json.dumps(server.info))
                case "/model_info":
                    self.page(json.dumps({"model_path": server.args.model_path}))
                case "/v1/loads":
                    self.page(json.dumps(server.loads))
                case "/metrics":
                    self.page(server.metrics(), "text/plain")
                case _:
                    self.send_error(404)

        def do_POST(self) -> None:  # the name is http.server's
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat = self.path == "/v1/chat/completions"
            text = body["messages"][0]["content"] if chat else body["prompt"]
            prompt, wanted = len(text.split()), int(body["max_tokens"])
            usage = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + wanted,
                "completion_tokens": wanted,
                "prompt_tokens_details": None,
                "reasoning_tokens": 0,
            }
            if not body.get("stream"):
                self.count(prompt, wanted, 0)
                self.page(
                    json.dumps(
                        {"choices": [{"index": 0, "text": " t3", "finish_reason": "length"}], "usage": usage}
                    )
                )
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.stream(chat, wanted, prompt, usage)

        def stream(self, chat: bool, wanted: int, prompt: int, usage: dict[str, Any]) -> None:
            time.sleep(PREFILL_S)
            if chat:
                self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            self.event({"choices": [piece(" t9", chat=chat)]})
            done, verifies, owed = 1, 0, 0.0
            while done < wanted:
                time.sleep(STEP_S * (2 if server.drafts else 1))
                owed += server.accept if server.drafts else 1.0
                n = min(int(owed), wanted - done)
                owed -= n
                verifies += server.drafts
                done += n
                self.event({"choices": [piece(" t9" * n, chat=chat)]})
            self.count(prompt, wanted, verifies)
            last = {"index": 0, "finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}
            self.event({"choices": [last]})
            self.event({"choices": [], "usage": usage})
            self.raw(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def count(self, prompt: int, generated: int, verifies: int) -> None:
            with server.lock:
                server.prompted += prompt
                server.generated += generated
                server.verifies += verifies
                server.requests += 1

        def event(self, data: dict[str, Any]) -> None:
            self.raw(b"data: " + json.dumps({"id": "x", "model": "m", **data}).encode() + b"\n\n")

        def raw(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    return Handler


def piece(text: str, *, chat: bool) -> dict[str, Any]:
    """One choice of a chunk with text."""
    return {"index": 0, "finish_reason": None, **({"delta": {"content": text}} if chat else {"text": text})}


def main() -> None:
    """Serve until ended."""
    args = options()
    server = Server(args)
    http = ThreadingHTTPServer((args.host, args.port), handler(server))
    http.daemon_threads = True
    server.log()
    http.serve_forever()


if __name__ == "__main__":
    main()
