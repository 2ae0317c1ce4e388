"""The request row: one line per request sent, whatever became of it.

The contract of everything downstream: the client and the cell runner fill it, the store keeps it,
analysis reads nothing else. A field that is not known is None, with the reason in `reasons`; never 0 or
NaN. Quantities and units are those of docs/CONTRACTS.md; `decode_tok_s = 1000 * accept_len / step_ms`
holds exactly.
"""

from dataclasses import dataclass, field
from typing import Literal

SCHEMA_VERSION = 1

State = Literal["ok", "empty", "short", "incomplete", "truncated", "failed", "cancelled"]
Phase = Literal["warmup", "anchor", "measure", "probe"]
Validity = Literal["valid", "void", "superseded"]
StampSource = Literal["kernel", "user"]
RateDefinition = Literal["after-first-chunk", "all-but-one"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One request. Times `*_ns` are CLOCK_MONOTONIC of the client's host unless named `utc`."""

    schema_version: int = SCHEMA_VERSION
    # --- where it belongs
    run: str
    """Run id: the folder name under results/."""
    campaign: str
    session: str
    lease: str
    node: str
    """Identity of the physical node (machine id, instance id)."""
    gpu_set: str
    """GPU indexes of the engine, `0,1,2,3`; `cpu` without GPUs."""
    boot_id: str
    """Planned boot plus attempt: `SESSION/GROUP/rROUND/ARM@ATTEMPT`."""
    boot_index: int
    """Planned index of the boot among the boots of its arm in its group, from 0."""
    boot_attempt: int
    """0 for the first try; an interrupted round is redone under the next."""
    arm: str
    """Name in the plan. The second side of an A/A is `NAME#2` with the same `arm_hash`."""
    arm_hash: str
    """SHA-256 (first 16 hex digits) of the arm's canonical configuration."""
    group: str
    """The pair, ladder or anchor that planned it: `ladder.depth`, `pair.kv`, `anchor.first`."""
    cell: str
    """`GROUP/ARM/WORKLOAD/cCONCURRENCY/bBOOT_INDEX`."""
    phase: Phase
    workload: str
    concurrency: int
    block: str
    """What pairing is done on: `sSLOT` at concurrency 1, `wWAVE` above."""
    round: int
    """Residency round inside the group: the boots that were measured together."""
    order: int
    """Position in the round's measured sequence, from 0."""
    half: str
    """Place of the engine on the node (`p0`, `p1`, ...): two places are not the same machine."""
    slot: int
    """Index of the prompt in the workload."""
    seed: int
    attempt: int
    """0. Only a request that a provider refused with 429 is sent again, as 1, 2, ...; the refused ones are void."""
    context: int | None = None
    """Context length the arm declares, tokens; with arm, workload and concurrency a cell's identity."""
    # --- stamps
    sent_ns: int
    """Before the first byte of the request is written."""
    first_ns: int | None = None
    """Read that completed the first generated token of any channel."""
    last_ns: int | None = None
    """Read that completed the last generated token."""
    done_ns: int | None = None
    """End of the response."""
    sent_utc_ns: int
    ttft_ms: float | None = None
    window_ms: float | None = None
    """last - first: the decode window."""
    e2e_ms: float | None = None
    stamp_source: StampSource = "user"
    reads: int = 0
    """Socket reads of the response body."""
    events: int = 0
    """Server-sent events, `[DONE]` included."""
    content_chunks: int = 0
    """Events that carried generated text."""
    segments: int | None = None
    """TCP data segments received (TCP_INFO); None where the kernel does not say."""
    merged_reads: int | None = None
    """Reads that completed more than one event: these share the stamp of the last segment."""
    start_error_us: float | None = None
    """Sent minus planned; None where no time was planned."""
    lag_p50_us: float | None = None
    """Lag of the stamp used, by probes sent while the request was in flight."""
    lag_p99_us: float | None = None
    user_lag_p50_us: float | None = None
    """Lag of the user-space stamp of the same reads."""
    user_lag_p99_us: float | None = None
    # --- usage, from the server's `usage`, never from counting chunks
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_chunk_tokens: int | None = None
    """Tokens in the first content chunk: from continuous usage, else 1."""
    cached_tokens: int | None = None
    """Prompt tokens served from a prefix cache; None when the server does not say."""
    # --- steps, from the engine's own counters
    steps: int | None = None
    """Verify steps in the window plus undrafted steps; without speculation, tokens in the window."""
    drafts: int | None = None
    """Verify steps that had a draft."""
    undrafted: int | None = None
    """Steps where the drafter offered nothing."""
    drafted: int | None = None
    """Draft tokens offered."""
    accepted: int | None = None
    """Draft tokens accepted; the bonus token is not counted."""
    accept_pos: tuple[int, ...] | None = None
    """Accepted at draft position 0, 1, ..."""
    counter_source: str | None = None
    """Where steps come from: `none`, `timings`, `metrics`, `meta_info`, joined by `+`."""
    # --- derived
    rate_definition: RateDefinition | None = None
    tokens_in_window: int | None = None
    decode_tok_s: float | None = None
    accept_len: float | None = None
    step_ms: float | None = None
    tpot_ms: float | None = None
    joules: float | None = None
    """Energy of the engine's GPUs from sending to the end; None where other requests were in flight."""
    gpu_w: float | None = None
    """Mean power of the engine's GPUs together while the request ran; the next ones over its GPUs likewise."""
    gpu_sm_mhz: float | None = None
    gpu_mem_mhz: float | None = None
    gpu_throttle: float | None = None
    """Share of samples slowed by heat, power brake or hardware."""
    gpu_power_cap: float | None = None
    """Share of samples held by the power cap, a normal state of a busy GPU."""
    # --- what became of it
    state: State
    finish: str | None = None
    http_status: int | None = None
    error_code: str | None = None
    error: str | None = None
    prompt_sha256: str | None = None
    text_sha256: str | None = None
    simulated: bool = False
    validity: Validity = "valid"
    reasons: tuple[str, ...] = field(default=())
    """Codes: why it is void, or why a field is None."""

    @property
    def key(self) -> tuple[str, str, int, int, int, int]:
        """(cell, phase, boot_attempt, slot, seed, attempt): unique in a run."""
        return (
            f"{self.session}/{self.cell}",
            self.phase,
            self.boot_attempt,
            self.slot,
            self.seed,
            self.attempt,
        )
