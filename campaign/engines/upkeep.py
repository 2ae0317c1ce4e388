"""Between cells: a server that holds no request, forgets earlier ones where its API can, and is still the same one."""

from collections.abc import Mapping
from typing import Any

from campaign.clock import Clock
from campaign.engines import fetch
from campaign.engines.base import Engine
from campaign.spec.models import Arm

DRAIN_S = 30.0
"""Longest wait for requests that we dropped and the server still works on."""
_POLL_S = 0.2
_HTTP_S = 10.0
_BUSY = frozenset({400, 409, 503})
"""Answers of a server that resets only when idle (SGLang: 400 while requests run)."""
_MOVING = frozenset(
    {"internal_states", "created", "permission", "id_task", "is_processing", "timestamp", "loads"}
)
"""Keys of info pages that change with traffic, not with configuration."""
_MOVING_PAGES = frozenset({"/slots", "/v1/loads"})


async def settle(
    engine: Engine,
    arm: Arm,
    base_url: str,
    headers: Mapping[str, str],
    clock: Clock,
    timeout_s: float = DRAIN_S,
) -> dict[str, Any]:
    """Drain, then reset. Returns `{drained: true|false|null, cache_reset: done|none|failed, why}`.

    `drained` is null where no page says how many requests run; `cache_reset` is `none` where the engine or the arm
    has nothing to reset.
    """
    end = clock.monotonic_ns() + timeout_s * 1e9
    drained = await _drain(engine, base_url, headers, clock, end)
    path = engine.reset_path(arm)
    if path is None:
        return {"drained": drained, "cache_reset": "none", "why": None}
    why = ""
    while True:
        try:
            status, _ = await fetch.post(base_url + path, headers, {}, _HTTP_S)
        except (OSError, TimeoutError) as error:
            status, why = None, f"{path}: {error}"
        else:
            why = f"{path} answers {status}"
        if status == 200:
            return {"drained": drained, "cache_reset": "done", "why": None}
        if status not in _BUSY or clock.monotonic_ns() >= end:
            return {"drained": drained, "cache_reset": "failed", "why": why}
        await clock.sleep(_POLL_S)


async def _drain(
    engine: Engine, base_url: str, headers: Mapping[str, str], clock: Clock, end_ns: float
) -> bool | None:
    path = engine.running_path()
    while path is not None:
        try:
            status, page = await fetch.get(base_url + path, headers, _HTTP_S)
        except (OSError, TimeoutError):
            return None
        held = engine.running(page) if status == 200 else None
        if held is None:
            return None
        if held == 0:
            return True
        if clock.monotonic_ns() >= end_ns:
            return False
        await clock.sleep(_POLL_S)
    return None


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Members of info pages that are not what they were: `{page, key, before, after}`. A page that is gone is one."""
    out: list[dict[str, Any]] = []
    for page, old in before.items():
        if page == "log" or page in _MOVING_PAGES or old is None:
            continue
        was, now = _flat(old), _flat(after.get(page))
        out += [
            {"page": page, "key": key, "before": was.get(key), "after": now.get(key)}
            for key in sorted(was.keys() | now.keys())
            if was.get(key) != now.get(key)
        ]
    return out


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        members = [(str(k), v) for k, v in value.items() if str(k) not in _MOVING]
    elif isinstance(value, list):
        members = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, member in members:
        out |= _flat(member, f"{prefix}.{key}" if prefix else key)
    return out
