"""The grammar of experiments.yaml (version 1).

Frozen models; an unknown field is an error. What is left out gets the default written here, and `plan`
prints it. Fractions are fractions (0.02). Every attribute's docstring is its description in the JSON
Schema that editors read and in docs/SPEC.md. Rules between fields are in `campaign.spec.check`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from campaign.spec.arm_models import (
    Arm,
    CounterName,
    Endpoint,
    Estimate,
    Model,
    Patch,
    Runtime,
    Server,
    Speculation,
    Strict,
)
from campaign.spec.types import (
    Count,
    Duration,
    Flag,
    Fraction,
    Hours,
    Name,
    Natural,
    One,
    Positive,
    Seconds,
    Sha256,
    Share,
    Temperature,
    Text,
    Usd,
    UsdOrFree,
)

__all__ = [
    "Anchor",
    "AnchorReference",
    "Arm",
    "AttachNode",
    "Budget",
    "Candidate",
    "Concurrency",
    "CounterName",
    "Design",
    "Endpoint",
    "Estimate",
    "FailOn",
    "Gates",
    "Ladder",
    "Load",
    "LocalNode",
    "Metric",
    "Model",
    "Node",
    "Pair",
    "Patch",
    "RayOptions",
    "Reference",
    "Runtime",
    "Server",
    "Session",
    "SkyNode",
    "Spec",
    "Speculation",
    "Statistics",
    "Strict",
    "Workload",
]
"""The whole grammar; what engines run on is written in `campaign.spec.arm_models`."""

Metric = Literal["step_ms", "accept_len", "decode_tok_s", "ttft_ms"]
Design = Literal["auto", "alternated", "duet", "blocks", "bracketed"]


class Budget(Strict):
    """What the whole campaign may cost."""

    cap_usd: Usd
    """Hard cap in dollars over every session, boots and teardown included."""
    wait_for_capacity: Duration | None = None
    """How long to wait for a node to be had, e.g. 6h. Waiting costs nothing."""


class LocalNode(Strict):
    """This machine."""

    provider: Literal["local"]
    """This machine; never taken down."""
    usd_per_hour: UsdOrFree
    """Declared price in dollars per hour; 0 is allowed."""
    max_hours: Hours
    """Longest lease of one session."""
    gpus: tuple[Natural, ...] = ()
    """GPU indexes that may be used; none means CPU only."""
    boot_stagger: Duration | None = None
    """Engines that share a GPU start so long after one another; left out, each waits until the one before is ready."""


class AttachNode(Strict):
    """A host you already have, over SSH, or an existing SkyPilot cluster. Never taken down."""

    provider: Literal["attach"]
    """A node you have; never taken down."""
    ssh: Text | None = None
    """user@host[:port]."""
    cluster: Text | None = None
    """Name of an existing SkyPilot cluster."""
    usd_per_hour: UsdOrFree
    """Declared price in dollars per hour; 0 is allowed."""
    max_hours: Hours
    """Longest lease of one session."""
    gpus: tuple[Natural, ...] = ()
    """GPU indexes that may be used."""


class Candidate(Strict):
    """One way to get a rented node; what is left out is taken from the node."""

    accelerators: Text | None = None
    """NAME:COUNT, e.g. H200:1."""
    infra: Text | None = None
    """Cloud, region and zone in SkyPilot's notation, e.g. aws/us-east-1."""
    instance_type: Text | None = None
    """The cloud's own name of the machine."""
    use_spot: Flag | None = None
    """Preemptible capacity."""
    disk_gb: Count | None = None
    """Size of the system disk in GB."""
    image: Text | None = None
    """Image the node boots from."""


class SkyNode(Strict):
    """A node rented through SkyPilot."""

    provider: Literal["sky"]
    """Rented and taken down through SkyPilot."""
    accelerators: Text
    """NAME:COUNT in SkyPilot's words, e.g. B200:4."""
    max_usd_per_hour: Usd
    """A launch at a higher price is refused, or taken down at once."""
    max_hours: Hours
    """Longest lease of one session; the dead-men are set from it."""
    any_of: tuple[Candidate, ...] = ()
    """Candidates, the cheapest that can be had first (SkyPilot's `any_of`)."""
    ordered: tuple[Candidate, ...] = ()
    """Candidates in this order (SkyPilot's `ordered`)."""
    infra: Text | None = None
    """Cloud, region and zone in SkyPilot's notation, e.g. aws/us-east-1."""
    use_spot: Flag = False
    """Preemptible capacity."""
    disk_gb: Count | None = None
    """Size of the system disk in GB."""
    image: Text | None = None
    """Image the node boots from."""
    secrets: tuple[Text, ...] = ()
    """Names of variables set here, e.g. HF_TOKEN, for the download of hub weights alone; no engine sees them."""


Node = Annotated[LocalNode | AttachNode | SkyNode, Field(discriminator="provider")]


class Workload(Strict):
    """A pinned set of prompts and how they are sampled."""

    pack: Text
    """A shipped pack, or a JSONL file relative to the spec."""
    n: Count
    """Prompts (slots) measured per boot."""
    max_tokens: Count
    """Output tokens; every request is asked to generate exactly these (`ignore_eos`)."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Share = 1.0
    """Nucleus sampling."""
    seed: Natural = 1
    """Seeds of all requests derive from it."""
    endpoint: Literal["chat", "completions"] = "chat"
    """/v1/chat/completions or /v1/completions."""
    ignore_eos: Flag = True
    """Generate on past the end of the answer, so that lengths are equal."""
    tokens: tuple[Count, Count] | None = None
    """Prompt length bounds in tokens."""
    sha256: Sha256 | None = None
    """Pin of the rendered prompts; another value stops the run."""


class Reference(Strict):
    """A fixed value the first anchor is held against."""

    step_ms: Positive
    """Expected decode step of the anchor, ms."""


def _shape(value: Any) -> str:
    """Which member of a union a value is: told by its YAML kind, so that errors speak of that one only."""
    if isinstance(value, (list, tuple)):
        return "list"
    return "mapping" if isinstance(value, (dict, BaseModel)) else "scalar"


AnchorReference = Annotated[
    Annotated[Literal["establish", "store"], Tag("scalar")] | Annotated[Reference, Tag("mapping")],
    Discriminator(
        _shape,
        custom_error_type="campaign_choice",
        custom_error_message="must be `establish`, `store` or {step_ms: VALUE}",
    ),
]
Concurrency = Annotated[
    Annotated[Count, Tag("scalar")] | Annotated[tuple[Count, ...], Tag("list")],
    Discriminator(
        _shape,
        custom_error_type="campaign_choice",
        custom_error_message="must be a whole number or a list of them",
    ),
]


class Anchor(Strict):
    """A short cell of one reference arm, run first, last, and between where a boot is cheap."""

    arm: Name
    """The reference arm."""
    workload: Name
    """Its prompts."""
    reference: AnchorReference = "establish"
    """What the first anchor is compared with: nothing yet, past anchors of the store, or a value."""
    drift_delta: Fraction
    """Drift in step time that matters; only proven drift beyond it stops the session."""
    boots: Count = 2
    """Boots of each anchor."""
    between: Flag = True
    """Also between groups, where the plan finds a boot cheap."""


class Load(Strict):
    """How requests are sent above concurrency 1."""

    shape: Literal["waves", "steady", "constant", "poisson", "ramp", "schedule"] = "waves"
    """waves: the slot set at once, again and again; steady: a closed loop whose ramp and tail are cut; constant, poisson, ramp, schedule: an open loop at planned times, `concurrency` at most in flight."""
    rate: Positive | None = None
    """Requests per second of `constant` and `poisson`; of the start of a `ramp`."""
    to_rate: Positive | None = None
    """Requests per second at the end of a `ramp`."""
    at_s: tuple[Seconds, ...] = ()
    """Start times of `schedule` in seconds, in order; slots take turns."""


class Ladder(Strict):
    """Arms along one field: each against the base, and adjacent ones against each other."""

    base: Name
    """The arm every rung is compared with."""
    from_: Name | None = Field(default=None, alias="from")
    """The arm the rungs are made from; the base itself if left out."""
    field: Text
    """Dotted field of the arm that changes, e.g. speculation.depth or env.NAME."""
    values: tuple[Any, ...]
    """One rung each, in this order."""
    workload: Name
    """Prompts."""
    primary: Metric = "step_ms"
    """The one metric that decides."""
    margin: Fraction = 0.02
    """Difference that matters."""
    concurrency: Count = 1
    """Requests in flight."""
    load: Load | None = None
    """Load shape above concurrency 1; waves if left out."""
    boots: Count = 2
    """Boots of each arm."""
    design: Design = "auto"
    """How arms share the node; auto lets the plan choose the strongest that fits."""
    looks: tuple[Count, ...] = ()
    """Rounds after which the ladder may stop early, once every comparison of it is decided; all arms must be resident."""
    look_quads: tuple[Count, ...] = ()
    """The same inside rounds: after so many whole A B B A quads (two prompts on every arm), all rounds counted together."""
    staged: Flag = False
    """Run rungs in stages, two first, then one at a time; stop where the forecast says that no deeper one can win."""


def _null_word(value: object) -> object:
    """YAML reads an unquoted null as nothing; here it is the name of a test."""
    return "null" if value is None else value


class Pair(Strict):
    """Two arms on the same slots in the same session."""

    kind: Annotated[Literal["pair", "null", "aa"], BeforeValidator(_null_word)] = "pair"
    """pair: a difference is sought; null: equality is expected; aa: the same arm twice."""
    a: Name
    """First arm."""
    b: Name | None = None
    """Second arm."""
    vary: dict[Text, Any] | None = None
    """Instead of b: the (dotted) fields in which b differs from a, e.g. {kv_dtype: q8_0}."""
    workload: Name
    """Prompts."""
    concurrency: Concurrency = 1
    """Requests in flight; a list makes one cell each."""
    load: Load | None = None
    """Load shape above concurrency 1; waves if left out."""
    primary: Metric = "step_ms"
    """The one metric that decides."""
    margin: Fraction = 0.02
    """Difference that matters."""
    boots: Count = 2
    """Boots of each arm."""
    design: Design = "auto"
    """How the two arms share the node."""
    looks: tuple[Count, ...] = ()
    """Rounds (boots of each arm) after which the pair may stop early; both arms must be resident. None: it runs whole."""
    look_quads: tuple[Count, ...] = ()
    """The same inside rounds: after so many whole A B B A quads (two prompts on both arms), all rounds counted together."""


class Session(Strict):
    """One lease of one node."""

    node: Name
    """Entry of `nodes`."""
    pairs: tuple[Name, ...] = ()
    """Pairs to run, in this order."""
    ladders: tuple[Name, ...] = ()
    """Ladders to run, in this order."""
    priority: Natural = 1
    """Lower runs first."""
    anchor: Flag = True
    """Run the anchor first and last; false only where every arm is a provider's endpoint and no node is measured."""


class Gates(Strict):
    """Limits that stop a session. Hashed and written down before the first request."""

    max_consecutive_errors: Count = 3
    """Failed requests in a row."""
    heartbeat: Duration = Field(default="60s", validate_default=True)
    """Longest silence of a session's agent."""
    request_timeout: Duration = Field(default="120s", validate_default=True)
    """Longest single request."""
    boot_timeout: Duration = Field(default="300s", validate_default=True)
    """Longest boot without progress."""
    max_void_share: Fraction = 0.2
    """Share of void rows in a cell above which the cell is void."""
    require_telemetry: tuple[Text, ...] = ()
    """Readings that must be there, e.g. gpu_w; probed before weights load."""
    max_throttled: Fraction | None = None
    """Share of a round in which a GPU was slowed by heat, power brake or hardware; above it the session stops."""
    min_sm_mhz: Count | None = None
    """Mean SM clock of a GPU over a round; below it the session stops."""


class FailOn(Strict):
    """When `run` exits 1 (for CI)."""

    slower: Fraction | None = None
    """A pair is `slower` by more than this."""
    invalid: Flag = False
    """Any pair is invalid."""
    unresolved: Flag = False
    """Any primary verdict is unresolved."""


class RayOptions(Strict):
    """Where the actors run."""

    mode: Literal["local", "inline"] = "local"
    """local: a Ray cluster of our own; inline: the same classes without Ray, in one process."""
    address: Text | None = None
    """Join this existing cluster (host:port) on purpose; `auto` is refused."""


class ClientOptions(Strict):
    """How the load client reaches the servers."""

    connection: Literal["new", "reuse"] = "new"
    """new: each request has a connection of its own; reuse: one that an earlier request left is used again."""
    proxy: Text | None = None
    """http://host:port of an HTTP proxy; stamps are then those of user space. None is ever taken from the environment."""
    processes: Count | None = None
    """Client processes; as many as the self-check says are needed if left out."""


class Statistics(Strict):
    """Declared knowledge that the intervals use."""

    boot_sd: dict[Metric, Fraction] = Field(default={})
    """Between-boot standard deviation on the log scale, by metric; else it is estimated."""
    confidence: Fraction = 0.95
    """Level of the intervals."""


class Spec(Strict):
    """experiments.yaml."""

    version: One
    """Version of this grammar."""
    campaign: Name
    """Name of the campaign."""
    budget: Budget
    """What it may cost."""
    nodes: dict[Name, Node]
    """Where it runs."""
    models: dict[Name, Model] = Field(default={})
    """Weights."""
    runtimes: dict[Name, Runtime] = Field(default={})
    """How engines get onto nodes."""
    arms: dict[Name, Arm]
    """Engine configurations."""
    workloads: dict[Name, Workload]
    """Prompts."""
    anchor: Anchor
    """The health check of every session."""
    ladders: dict[Name, Ladder] = Field(default={})
    """Families of arms."""
    pairs: dict[Name, Pair] = Field(default={})
    """Controlled comparisons."""
    sessions: dict[Name, Session]
    """Leases, and what runs in each."""
    gates: Gates = Gates()
    """Limits that stop."""
    statistics: Statistics = Statistics()
    """Declared knowledge."""
    fail_on: FailOn = FailOn()
    """When `run` exits 1."""
    ray: RayOptions = RayOptions()
    """Where actors run."""
    client: ClientOptions = ClientOptions()
    """How requests are sent and read."""
    series: Name | None = None
    """The thread that survives version changes."""
    store: Text = "results/"
    """Where runs are written."""
