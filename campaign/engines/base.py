"""The Engine contract: how a typed arm becomes a server, and how to read what it did.

An engine is an adapter without state: it builds argv, says what ready means, and reads counters. The
process itself is owned by `campaign.engines.host.EngineHost`, which is the same for every engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from campaign.client.base import Outcome
from campaign.spec.models import Arm, Model, Runtime


@dataclass(frozen=True, slots=True)
class BootOrder:
    """What the host is asked to start."""

    boot_id: str
    arm: str
    arm_hash: str
    config: Arm
    models: Mapping[str, Model]
    place: str
    gpus: tuple[int, ...]
    cpus: tuple[int, ...]
    """CPU cores the server is pinned to; empty means not pinned."""
    log_path: str
    boot_timeout_s: float
    runtime: Runtime | None = None
    """How the engine got onto the node; None is this Python environment."""
    shared: bool = False
    """Other boots of the same round may hold its GPUs too."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one server. argv is a list, never a shell string."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to a minimal environment; values are stored by allow-list only."""
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """What every request must carry, e.g. the key of this boot. Never stored."""


@dataclass(frozen=True, slots=True)
class BootRecord:
    """What really started, read from the live process."""

    boot_id: str
    base_url: str
    model_id: str
    """The name to send as `model`."""
    pid: int
    port: int
    boot_ns: int
    """From spawn to the first token of a probe."""
    gpu_set: str
    provenance: dict[str, Any]
    """argv, exe, env names, versions, requested, effective, host; secrets redacted."""
    headers: dict[str, str] = field(default_factory=dict)
    """What every request to this server must carry (its key). Goes into `Job.headers`; never stored."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative counters of one server at one moment; None is absent, with a reason. Never 0 for absent."""

    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accept_pos: tuple[int, ...] | None = None
    verify_steps: int | None = None
    """Engines that count verify calls of finished requests (SGLang)."""
    generated: int | None = None
    cached_tokens: int | None = None
    started: float | None = None
    """Start time of the process; another value is another process."""
    reasons: tuple[str, ...] = field(default=())
    """`FIELD:CODE` for every field that is None, e.g. `drafts:absent`, `generated:not_finite`."""
    prompt_tokens: int | None = None
    """Prompt tokens, those served from a cache included."""
    cache_queries: int | None = None
    """Prompt tokens looked up in the prefix cache; `cached_tokens` of them were hits."""
    forward_calls: int | None = None
    """Forward passes, prefill batches and decode steps alike (llama.cpp `n_decode_total`)."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Steps of one request (or wave): the difference of two scrapes, or the engine's own report."""

    steps: int | None
    drafts: int | None
    undrafted: int | None
    drafted: int | None
    accepted: int | None
    accept_pos: tuple[int, ...] | None
    cached_tokens: int | None
    source: str
    reasons: tuple[str, ...] = ()
    """Codes such as `counter_reset`, `engine_restarted`, `absent`, `no_drafts`, `out_of_range`,
    `other_traffic` (the scrapes span requests besides this one)."""


@runtime_checkable
class Engine(Protocol):
    """One kind of server."""

    name: str

    def preflight(self, arm: Arm, models: Mapping[str, Model]) -> None:
        """Check, without starting anything, that this arm can be booted here. Raises PreflightError."""
        ...

    def launch(self, order: BootOrder, port: int) -> Launch:
        """Build argv and environment for 127.0.0.1:`port`."""
        ...

    def model_id(self, order: BootOrder) -> str:
        """The name under which the server must list its model."""
        ...

    def metrics_path(self) -> str | None:
        """Path of the Prometheus page, or None."""
        ...

    def effective(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Map server info (JSON pages fetched by the host, log text) to arm fields that are in force."""
        ...

    def info_paths(self) -> tuple[str, ...]:
        """JSON pages the host fetches once ready, e.g. `/props`."""
        ...

    def failure(self, log_tail: str) -> tuple[str, str] | None:
        """(kind, line) of a known failure in the log, kinds as in `campaign.errors.EngineError`."""
        ...

    def read_counters(self, metrics_text: str) -> Counters:
        """Read a scrape of the Prometheus page."""
        ...

    def steps(
        self, arm: Arm, before: Counters | None, after: Counters | None, outcome: Outcome
    ) -> StepCounts:
        """Steps of the request between two scrapes; the engine's per-request report is preferred."""
        ...

    def request_extras(self, arm: Arm) -> Mapping[str, Any]:
        """Fields this engine wants in every request body, e.g. `cache_prompt: false`."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Versions of the packages that make up the engine."""
        ...

    def running_path(self) -> str | None:
        """Page that says how many requests the server holds, or None."""
        ...

    def running(self, page: bytes) -> int | None:
        """Requests that run or wait, read from that page; None where it does not say."""
        ...

    def reset_path(self, arm: Arm) -> str | None:
        """Path to POST to, so that nothing of earlier requests is kept (prefix cache); None where there is none."""
        ...


def model_file(model: Model) -> Path | None:
    """Path of a single-file model given by `path`, if it is one."""
    return Path(model.path) if model.path else None
