"""What is known of a cell as a whole: the server before and after it, and its counters where requests overlap.

Above concurrency 1 the counters of a server belong to no single request. What they gained between the first and the
last request of a cell belongs to the cell, if they gained as many tokens as its requests were given.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from campaign.clock import Clock
from campaign.engines import prometheus
from campaign.engines.base import Counters


def growth(before: Counters | None, after: Counters | None) -> dict[str, int] | None:
    """What a server's counters gained between two scrapes of one process; None where either is missing.

    A counter that was absent before and is there now stood at zero (SGLang makes it at the first draft).
    """
    if before is None or after is None or before.started != after.started:
        return None
    out = {}
    for name in ("drafts", "drafted", "accepted", "verify_steps", "generated", "cached_tokens"):
        first, last = getattr(before, name), getattr(after, name)
        if last is not None:
            out[name] = int(last - (first or 0))
    return out


def whole(windows: Sequence["CellWindow"]) -> "CellWindow":
    """All waves of a cell as one window: nothing else is sent to its server between them."""
    return CellWindow(
        windows[0].before,
        windows[-1].after,
        sum(w.requests for w in windows),
        sum(w.tokens for w in windows),
        sum(w.unknown for w in windows),
    )


LOOK_S = 1.0
"""Between looks at a boot's progress."""


@dataclass(slots=True)
class CellWindow:
    """The scrapes around a cell or a wave, and what its requests were given meanwhile."""

    before: Counters | None = None
    after: Counters | None = None
    requests: int = 0
    tokens: int = 0
    """Completion tokens by usage."""
    unknown: int = 0
    """Requests without usage, or that failed: how many tokens they took is not known."""

    def add(self, completion: int | None, *, finished: bool) -> None:
        """One request that ended between the scrapes."""
        self.requests += 1
        if completion is None or not finished:
            self.unknown += 1
        else:
            self.tokens += completion

    def to_json(self, depth: int | None) -> dict[str, Any]:
        """Steps and acceptance of the window, never of one of its requests; null with codes in `reasons`.

        `steps` counts request-steps (one request in one forward pass), `accept_len` is tokens after the first by
        steps. `depth` is the arm's; 0 or None means that it does not draft, and a token is a step.
        """
        d = prometheus.delta(self.before, self.after)
        # A counter of verify calls that appeared in the window stood at zero before it.
        ignored = {"no_drafts", "absent"} if self.verify is not None or not depth else {"no_drafts"}
        reasons = [r for r in d.reasons if r not in ignored]
        if self.unknown:
            reasons.append("no_usage")
        if d.generated is not None and not self.unknown and d.generated != self.tokens:
            reasons.append("other_traffic")
        decoded = self.tokens - self.requests
        steps: int | None = None
        drafted, accepted = d.drafted, d.accepted
        if not depth:
            steps = decoded
        elif self.verify is not None:
            steps = self.verify
            accepted = decoded - steps
            drafted = steps * depth
        elif d.drafts is not None and accepted is not None:
            # The last step of a request may draft past its end (vLLM counts those tokens): then all steps are drafts.
            over = d.drafts + accepted - decoded
            accepted -= max(0, over) if over <= self.requests * depth else 0
            steps = decoded - accepted
        if not reasons and steps is not None and not (0 < steps <= decoded):
            reasons.append("out_of_range")
        if reasons or steps is None:
            steps = drafted = accepted = None
            reasons = reasons or ["absent"]
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "steps": steps,
            "accept_len": None if not steps else decoded / steps,
            "drafts": self.verify if self.verify is not None else d.drafts,
            "drafted": drafted,
            "accepted": accepted,
            "accept_pos": None if d.accept_pos is None or reasons else list(d.accept_pos),
            "cached_tokens": d.cached_tokens,
            "source": "metrics",
            "reasons": list(dict.fromkeys(reasons)),
        }

    @property
    def verify(self) -> int | None:
        """Verify calls of the window (SGLang); the counter is made at its first event, absent before it is zero."""
        if self.before is None or self.after is None or self.after.verify_steps is None:
            return None
        return self.after.verify_steps - (self.before.verify_steps or 0)


async def asked(host: object, name: str, boot_id: str) -> dict[str, Any] | None:
    """What `host.NAME(boot_id)` says; None of a host that has no such method."""
    method: Callable[[str], Awaitable[dict[str, Any]]] | None = getattr(host, name, None)
    return None if method is None else await method(boot_id)


class Shown(Protocol):
    """What a display reads."""

    state: str


async def show_loading(host: object, boot_id: str, clock: Clock, shown: Shown) -> None:
    """Put shard progress and time left of a boot into the displayed state, until cancelled."""
    with suppress(
        Exception
    ):  # a display must not end a boot; what is wrong with the host, the boot says itself
        while (found := await asked(host, "loading", boot_id)) is not None:
            if found:
                left = f", {found['left']} left" if found["left"] else ""
                shown.state = f"loading shard {found['shards']}/{found['of']}{left}"
            await clock.sleep(LOOK_S)
