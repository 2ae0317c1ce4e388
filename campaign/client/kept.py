"""TLS and HTTP proxies: aiohttp speaks, and stamps are those of user space.

aiohttp is told to add nothing of its own: no retry, redirect, compression, cookie, or proxy of the environment.
A stamp is taken when the body's next bytes reach the waiting coroutine, so it holds the lag of the event loop.
`sent_ns` is taken when the connection stands, TLS and the proxy's CONNECT included.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import aiohttp

from campaign.client.http1 import Response, Target
from campaign.client.reader import End, Exchange

_BUFFER = 1 << 20


class Kept:
    """Sessions of aiohttp: one that reuses connections, one that does not."""

    def __init__(self) -> None:
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    def session(self, *, reuse: bool) -> aiohttp.ClientSession:
        """Made when first asked for."""
        found = self._sessions.get(reuse)
        if found is None:
            trace = aiohttp.TraceConfig()
            # Two of them, since one comes with a new connection and the other with a kept one.
            trace.on_connection_create_end.append(_stands)
            trace.on_connection_reuseconn.append(_stands)
            found = self._sessions[reuse] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=not reuse),
                trace_configs=[trace],
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                auto_decompress=False,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_BUFFER,
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
        return found

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()


@lru_cache(maxsize=4)
def _trust(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    """The authorities of the system, or those that the environment names: reading them takes milliseconds."""
    return ssl.create_default_context()


async def _stands(_session: aiohttp.ClientSession, context: Any, _params: object) -> None:
    flight = context.trace_request_ctx
    flight.sent_ns, flight.sent_utc_ns = time.monotonic_ns(), time.time_ns()


class KeptFlight:
    """One request through aiohttp. `stop` ends it from outside at any moment."""

    def __init__(self) -> None:
        self.sent_ns, self.sent_utc_ns = time.monotonic_ns(), time.time_ns()
        self.reads: list[tuple[int, bytes]] = []
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.end: End | None = None
        self.end_ns = 0
        self.detail = ""
        self._task: asyncio.Task[None] | None = None

    def stop(self, end: End) -> None:
        """End now: what comes later is not read."""
        self._over(end)
        if self._task is not None:
            self._task.cancel()

    def _over(self, end: End, detail: str = "") -> None:
        if self.end is None:
            self.end, self.end_ns, self.detail = end, time.monotonic_ns(), detail

    async def run(
        self,
        session: aiohttp.ClientSession,
        where: Target,
        payload: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        proxy: str | None,
    ) -> tuple[Exchange, Response]:
        """Send it and read it to its end. Never raises for what server, proxy or network do."""
        self._task = asyncio.create_task(self._talk(session, where, payload, headers, proxy))
        try:
            await asyncio.wait({self._task}, timeout=timeout_s)
            if not self._task.done():
                self.stop("timeout")
        finally:
            if not self._task.done():
                self.stop("cancelled")
            results = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        end = self.end or "cancelled"
        last = self.reads[-1][0] if self.reads else self.end_ns
        names = {name.lower(): value for name, value in self.headers.items()}
        chunked = "chunked" in names.get("transfer-encoding", "").lower()
        framed = self.status is not None and ("content-length" in names or chunked)
        response = Response(
            status=self.status,
            content_type=names.get("content-type", "").partition(";")[0].strip().lower(),
            pieces=tuple(self.reads),
            framed=framed,
            complete=end == "complete" and framed,
            complete_ns=last if end == "complete" and framed else None,
            error=None,
            retry_after=names.get("retry-after"),
        )
        if end == "complete" and not framed:
            end = "eof"
        seen = Exchange(
            self.sent_ns, self.sent_utc_ns, tuple(self.reads), end, max(last, self.end_ns), self.detail
        )
        return seen, response

    async def _talk(
        self,
        session: aiohttp.ClientSession,
        where: Target,
        payload: bytes,
        headers: Mapping[str, str],
        proxy: str | None,
    ) -> None:
        host = f"[{where.host}]" if ":" in where.host else where.host
        url = f"{'https' if where.tls else 'http'}://{host}:{where.port}{where.path}"
        own = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
        }
        try:
            async with session.post(
                url,
                data=payload,
                headers={**own, **headers},
                proxy=proxy,
                ssl=_trust(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
                allow_redirects=False,
                trace_request_ctx=self,
            ) as response:
                self.status, self.headers = response.status, response.headers
                async for data in response.content.iter_any():
                    self.reads.append((time.monotonic_ns(), data))
            self._over("complete")
        except aiohttp.ClientPayloadError as error:
            # The body ended before its length, or was reset.
            reset = isinstance(error.__cause__, OSError)
            self._over("reset" if reset else "eof", str(error))
        except (aiohttp.ClientProxyConnectionError, aiohttp.ClientConnectorError) as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            self._over("refused" if refused else "unreachable", str(error))
        except aiohttp.ServerDisconnectedError as error:
            self._over("eof", str(error))
        except aiohttp.ClientOSError as error:
            self._over("reset", str(error))
        except (aiohttp.ClientError, OSError) as error:
            self._over("unreachable", str(error) or type(error).__name__)
