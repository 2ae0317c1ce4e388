"""The client contract: one request in, what was read out.

Every socket read is stamped once, before anything is parsed; parsing happens after the request. Chunk
times and raw text go to files of their own beside the rows; only this summary crosses Ray.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from campaign.client.lag import LagCounts
from campaign.store.row import StampSource, State


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send."""

    request_id: str
    """Unique in the run; names its chunk and text records."""
    base_url: str
    path: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]
    """Complete JSON body, `stream: true` and `stream_options` included."""
    timeout_s: float
    expect_tokens: int | None
    """max_tokens where `ignore_eos`: fewer is state `short`."""
    headers: dict[str, str] = field(default_factory=dict)
    start_ns: int | None = None
    """CLOCK_MONOTONIC ns of the client's host at which it is to be sent; None sends at once. The connection
    is made before."""
    sidecar_dir: str | None = None
    """Folder of the cell's chunk and text files; None keeps nothing but the summary."""
    connection: Literal["new", "reuse"] = "new"
    """Whether a connection that an earlier request left may be used."""
    proxy: str | None = None
    """http:// URL of a proxy; then stamps are those of user space."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The last non-null `usage` of the response."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was read. Stamps are CLOCK_MONOTONIC nanoseconds of the client."""

    request_id: str
    state: State
    sent_ns: int
    sent_utc_ns: int
    first_ns: int | None
    last_ns: int | None
    done_ns: int | None
    stamp_source: StampSource
    reads: int
    events: int
    content_chunks: int
    usage: Usage | None
    first_chunk_tokens: int | None
    """From continuous usage; None where the server gives none."""
    finish: str | None
    http_status: int | None
    error_code: str | None
    error: str | None
    text_sha256: str | None
    timings: dict[str, Any] | None
    """The engine's own per-request report, e.g. llama.cpp `timings`, SGLang `sglext`."""
    reasons: tuple[str, ...] = ()
    segments: int | None = None
    """TCP data segments received; None where the kernel does not say."""
    merged_reads: int = 0
    """Reads of the body that completed more than one event: these share a stamp, that of the last segment."""
    start_error_us: float | None = None
    """Sent minus planned, where a time was planned."""
    lag: LagCounts = ()
    """Lag of the stamp used, as counts by bucket (campaign.client.lag)."""
    user_lag: LagCounts = ()
    """Lag of the user stamp, likewise."""
    retry_after: str | None = None
    """The Retry-After header, as the server wrote it."""


@runtime_checkable
class Client(Protocol):
    """The load client. Several `run` calls may be in flight at once."""

    async def run(self, job: Job) -> Outcome:
        """Send one request and read it to its end. Never raises for what the server does; never retries."""
        ...

    async def fetch(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """GET a page outside any timed window (metrics, server info)."""
        ...

    async def cancel(self) -> None:
        """Drop every request in flight at its next read; their state is `cancelled`."""
        ...

    async def close(self) -> None:
        """Release sockets and files."""
        ...
