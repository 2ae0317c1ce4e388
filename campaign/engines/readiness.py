"""When a server is ready, and when it is dead: one pure state machine, and the loops that feed it.

Ready means all of: our own child is alive, our child (and nobody else) listens on the port, `/health` is
ok, `/v1/models` lists our model, and one token was produced. Nothing is sent to a port that another process
owns. A 200 proves nothing about life: only a token does.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from campaign.clock import Clock

Owner = Literal["ours", "foreign", "none"]
Probing = Literal["process", "health", "models", "token"]

POLL_S = 0.1
"""Between looks at a server that boots; also the resolution of `boot_ns` where nothing blocks."""
TOKEN_TIMEOUT_S = 30.0
"""Longest wait for one probe token. With `WATCH_EVERY_S`, a death is found within 60 s."""
WATCH_EVERY_S = 25.0
CEILING = 10
"""A boot that keeps logging is still given up after this many boot timeouts."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a server is not, or no longer, ready. Kinds as in `EngineError`."""

    kind: str
    why: str


@dataclass(slots=True)
class Readiness:
    """Fed with observations in any order; says what to probe next, and the verdict."""

    model_id: str
    started_ns: int
    timeout_s: float
    """Longest time without progress."""
    ready_ns: int | None = None
    failed: Failed | None = None
    requests_sent: int = 0
    """Generation requests sent to the port."""
    _alive: bool = True
    _owner: Owner = "none"
    _health: int | None = None
    _models: tuple[str, ...] | None = None
    _progress_ns: int = field(init=False)
    _mark: object = None
    _wrong_model: bool = False

    def __post_init__(self) -> None:
        self._progress_ns = self.started_ns

    def process(
        self, now_ns: int, *, alive: bool, owner: Owner, progress: int, failure: tuple[str, str] | None = None
    ) -> None:
        """The child, the port, the amount of log, and what the log or exit status says of a failure."""
        if self.failed:
            return
        self._alive, self._owner = alive, owner
        if owner == "foreign":
            # Whatever our child says of the address, the cause is who sits there.
            self.failed = Failed(
                "port_owned_by_other", "another process listens on the port; it was left alone"
            )
        elif not alive or (failure and self.ready_ns is None):
            kind, why = failure or ("died", "the server ended")
            if kind == "port_taken" and self._wrong_model:
                kind = "port_owned_by_other"
            self.failed = Failed(kind, why)
        self._note(now_ns, ("process", alive, owner, progress))

    def answer(
        self, now_ns: int, path: str, status: int | None, models: tuple[str, ...] | None = None
    ) -> None:
        """An answer to GET `/health` or `/v1/models`; status None is no answer."""
        if path == "/health":
            self._health = status
        else:
            self._models = models if status == 200 else None
            self._wrong_model = self._models is not None and self.model_id not in self._models
        self._note(now_ns, (path, status, models))

    def token(self, now_ns: int, *, produced: bool, hung: bool = False) -> None:
        """The outcome of a probe request."""
        self.requests_sent += 1
        if produced and self.failed is None and self._alive and self._owner == "ours":
            self.ready_ns = now_ns if self.ready_ns is None else self.ready_ns
            self._progress_ns = now_ns
        elif hung and self.ready_ns is not None:
            self.failed = Failed("hung", "no token came within the limit, though the process lives")

    @property
    def next(self) -> Probing:
        """What to look at next. HTTP only where our child owns the port; a token only of our model."""
        if self.failed or not self._alive or self._owner != "ours":
            return "process"
        if self._health != 200:
            return "health"
        if self._models is None or self._wrong_model:
            return "models"
        return "token"

    def poll(self, now_ns: int) -> bool:
        """Whether it is ready. Sets `failed` once the boot has made no progress for `timeout_s`."""
        if self.failed or self.ready_ns is not None:
            return self.failed is None
        idle_s, total_s = (now_ns - self._progress_ns) / 1e9, (now_ns - self.started_ns) / 1e9
        if idle_s >= self.timeout_s or total_s >= CEILING * self.timeout_s:
            stage = "never listened on its port"
            if self._owner == "ours":
                stage = f"/health {self._health}, /v1/models {list(self._models or ())}, no token"
            said = (
                f"no progress for {idle_s:.0f} s"
                if idle_s >= self.timeout_s
                else f"not ready in {total_s:.0f} s"
            )
            kind = "port_owned_by_other" if self._wrong_model else "hung"
            self.failed = Failed(kind, f"{said}: {stage}")
        return False

    def _note(self, now_ns: int, mark: tuple[object, ...]) -> None:
        """Progress is anything that was not seen before."""
        seen = self._mark if isinstance(self._mark, dict) else {}
        if seen.get(mark[0]) != mark[1:]:
            self._mark = {**seen, mark[0]: mark[1:]}
            self._progress_ns = now_ns


@dataclass(frozen=True, slots=True)
class Look:
    """What can be seen of the process without asking the server."""

    alive: bool
    owner: Owner
    progress: int
    """Any number that grows while the server makes progress, e.g. lines of its log."""
    failure: tuple[str, str] | None = None


class Probe(Protocol):
    """How the state machine looks at a server. The host's own, or a script in a test."""

    async def look(self) -> Look:
        """The process, the port and the log."""
        ...

    async def get(self, path: str) -> tuple[int | None, tuple[str, ...] | None]:
        """Status of GET `path`, and the listed models where it is `/v1/models`. None: no answer."""
        ...

    async def token(self, timeout_s: float) -> Literal["produced", "refused", "hung"]:
        """Ask for one token."""
        ...


async def _look(state: Readiness, probe: Probe, clock: Clock) -> None:
    seen = await probe.look()
    state.process(
        clock.monotonic_ns(),
        alive=seen.alive,
        owner=seen.owner,
        progress=seen.progress,
        failure=seen.failure,
    )


async def await_ready(state: Readiness, probe: Probe, clock: Clock) -> Failed | None:
    """Probe until ready (None) or failed. Never sends to a port that is not ours."""
    while True:
        await _look(state, probe, clock)
        want = state.next
        if want in {"health", "models"}:
            path = "/health" if want == "health" else "/v1/models"
            status, models = await probe.get(path)
            state.answer(clock.monotonic_ns(), path, status, models)
        elif want == "token":
            outcome = await probe.token(TOKEN_TIMEOUT_S)
            # Proof of life counts only for the process that still owns the port after it.
            await _look(state, probe, clock)
            state.token(clock.monotonic_ns(), produced=outcome == "produced", hung=outcome == "hung")
        if state.poll(clock.monotonic_ns()):
            return None
        if state.failed:
            return state.failed
        if want in {state.next, "process"}:
            await clock.sleep(POLL_S)


async def check_alive(
    state: Readiness, probe: Probe, clock: Clock, timeout_s: float = TOKEN_TIMEOUT_S
) -> Failed | None:
    """One look and one token. None: it lives."""
    await _look(state, probe, clock)
    if state.failed is None:
        outcome = await probe.token(timeout_s)
        await _look(state, probe, clock)
        state.token(clock.monotonic_ns(), produced=outcome == "produced", hung=outcome == "hung")
        if outcome == "refused" and state.failed is None:
            return Failed("died", "the server refuses to generate")
    return state.failed


async def watch(state: Readiness, probe: Probe, clock: Clock) -> Failed:
    """Check an idle server until it fails. Ends within 60 s of its death; cancel to stop watching."""
    while True:
        failed = await check_alive(state, probe, clock)
        if failed:
            return failed
        await clock.sleep(WATCH_EVERY_S)
