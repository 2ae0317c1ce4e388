"""One client of the instrument benchmark; run by bench/instrument.py in that client's own environment.

    python instrument_client.py NAME URL STREAMS TOKENS RATE [--unpaced] [--cpu N]

prints one JSON object: CPU seconds and wall seconds of the requests (imports aside), peak memory, and of each
request the id its server gave it, when it was sent, and the stamp of every content event. All stamps are
CLOCK_MONOTONIC ns. Every client decodes every event's JSON and keeps its text, as a benchmark must.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

PATH = "/v1/chat/completions"


def body(tokens, rate, *, paced):
    return {
        "model": "reference",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "max_tokens": tokens,
        "schedule": {"tokens": tokens, "rate": rate, "paced": paced},
    }


def peak_mb():
    """Of this process alone: ru_maxrss remembers the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


class Seen:
    def __init__(self):
        self.id, self.sent, self.stamps, self.text = None, 0, [], []

    def event(self, ns, data):
        if data == "[DONE]" or data == b"[DONE]":
            return
        value = json.loads(data)
        for choice in value["choices"]:
            text = choice["delta"].get("content")
            if text:
                self.id = value["id"]
                self.stamps.append(ns)
                self.text.append(text)


async def campaign(url, payload, seen):
    from campaign.client.base import Job

    await CLIENT.run(Job(str(id(seen)), url, PATH, payload, 300, None, sidecar_dir=str(id(seen))))


class Keep:
    """In place of the sidecar files: keeps the stamps, as the other clients here do."""

    def __init__(self):
        self.seen = {}

    def write(self, folder, exchange, read):
        one = self.seen[folder]
        one.sent = exchange.sent_ns
        one.stamps = read.reading.at
        one.user = exchange.user_ns
        one.merged = read.outcome.merged_reads
        one.source = read.outcome.stamp_source
        one.id = json.loads(read.response.body[6 : read.response.body.index(b"\n\n")])["id"]
        by_read = {ns: user for (ns, _), user in zip(exchange.reads, exchange.user_ns, strict=False)}
        one.user = [by_read.get(ns, ns) for ns in one.stamps]

    def close(self):
        pass


async def httpx_lines(url, payload, seen):
    seen.sent = time.monotonic_ns()
    async with CLIENT.stream("POST", url + PATH, json=payload) as response:
        async for line in response.aiter_lines():
            ns = time.monotonic_ns()
            if line.startswith("data: "):
                seen.event(ns, line[6:])


async def aiohttp_vllm(url, payload, seen):
    """As `vllm bench serve` reads: `content.iter_any()`, messages split at blank lines, a stamp for each."""
    held = b""
    seen.sent = time.monotonic_ns()
    async with CLIENT.post(url + PATH, json=payload) as response:
        async for part in response.content.iter_any():
            held += part
            while (cut := held.find(b"\n\n")) >= 0:
                message, held = held[:cut].strip(), held[cut + 2 :]
                if message.startswith(b"data: "):
                    seen.event(time.monotonic_ns(), message[6:].decode())


async def openai_sdk(_url, payload, seen):
    seen.sent = time.monotonic_ns()
    extra = {"schedule": payload["schedule"]}
    known = {k: payload[k] for k in ("model", "messages", "max_tokens")}
    async for value in await CLIENT.chat.completions.create(**known, stream=True, extra_body=extra):
        ns = time.monotonic_ns()
        for choice in value.choices:
            if choice.delta.content:
                seen.id = value.id
                seen.stamps.append(ns)
                seen.text.append(choice.delta.content)


async def main(options):
    global CLIENT  # noqa: PLW0603 -- one client a process
    name, n = options.name, options.streams
    if name == "campaign":
        from campaign import __version__ as version
        from campaign.client.http import HttpClient

        CLIENT = HttpClient()
        CLIENT._sidecars = Keep()
        one, close = campaign, CLIENT.close
    elif name == "httpx":
        import httpx

        version = httpx.__version__
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        CLIENT = httpx.AsyncClient(timeout=300, limits=limits, trust_env=False)
        one, close = httpx_lines, CLIENT.aclose
    elif name == "aiohttp":
        import aiohttp

        version = aiohttp.__version__
        CLIENT = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=6 * 3600),
            read_bufsize=10 * 1024**2,
        )
        one, close = aiohttp_vllm, CLIENT.close
    else:
        import openai

        version = openai.__version__
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        transport = httpx.AsyncClient(timeout=300, limits=limits, trust_env=False)
        CLIENT = openai.AsyncOpenAI(
            base_url=options.url + "/v1", api_key="none", http_client=transport, max_retries=0
        )
        one, close = openai_sdk, CLIENT.close
    warm = Seen()
    await start(one, options.url, body(4, 500, paced=True), warm, 0)
    payload = body(options.tokens, options.rate, paced=not options.unpaced)
    seen = [Seen() for _ in range(n)]
    cpu, wall = time.process_time(), time.monotonic()
    # Streams start over one second, so that their events do not come in bursts.
    await asyncio.gather(
        *(start(one, options.url, payload, s, 0 if n == 1 else i / n) for i, s in enumerate(seen))
    )
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    await close()
    out = {
        "version": version,
        "cpu_s": cpu,
        "wall_s": wall,
        "rss_mb": peak_mb(),
        "streams": [
            {"id": s.id, "sent": s.sent, "stamps": s.stamps, "user": getattr(s, "user", None)} for s in seen
        ],
        "merged": sum(getattr(s, "merged", 0) for s in seen),
        "source": sorted({getattr(s, "source", "user") for s in seen}),
    }
    json.dump(out, sys.stdout)


async def start(one, url, payload, seen, after):
    if options.name == "campaign":
        CLIENT._sidecars.seen[str(id(seen))] = seen
    await asyncio.sleep(after)
    await one(url, payload, seen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("url")
    parser.add_argument("streams", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("rate", type=float)
    parser.add_argument("--unpaced", action="store_true")
    parser.add_argument("--cpu", type=int)
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    asyncio.run(main(options))
