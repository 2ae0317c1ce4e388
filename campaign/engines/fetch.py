"""Plain HTTP to our own servers, outside every timed window. One connection a call, no proxy, no redirect."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

_LIMIT = 32 * 1024 * 1024


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


# A proxy variable of the user's shell must not see requests to loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def _call(url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
    request = urllib.request.Request(url, data=body, headers=dict(headers))  # noqa: S310  # http by construction
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return response.status, response.read(_LIMIT)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(_LIMIT)
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError(str(error)) from error
        raise


def _full(
    url: str, headers: Mapping[str, str], body: bytes, timeout_s: float
) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, data=body, headers=dict(headers))  # noqa: S310  # http(s), checked by preflight
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return response.status, {k.lower(): v for k, v in response.headers.items()}, response.read(_LIMIT)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read(_LIMIT)
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError(str(error)) from error
        raise


async def post_full(
    url: str, headers: Mapping[str, str], body: Any, timeout_s: float
) -> tuple[int, dict[str, str], bytes]:
    """POST of a JSON body: status, response headers by lower-case name, body. Raises OSError or TimeoutError."""
    sent = {**headers, "Content-Type": "application/json"}
    return await asyncio.to_thread(_full, url, sent, json.dumps(body).encode(), timeout_s)


async def get(url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
    """GET. Raises OSError (refused, reset) or TimeoutError."""
    return await asyncio.to_thread(_call, url, headers, None, timeout_s)


async def post(url: str, headers: Mapping[str, str], body: Any, timeout_s: float) -> tuple[int, bytes]:
    """POST of a JSON body. Raises OSError or TimeoutError."""
    sent = {**headers, "Content-Type": "application/json"}
    return await asyncio.to_thread(_call, url, sent, json.dumps(body).encode(), timeout_s)
