"""What an engine would do silently, refused or made a written field, before anything runs.

Each rule names its source: SGLang 0.5.14 and 0.5.23 (`arg_groups/speculative_hook.py`, `server_args.py`)
and vLLM 0.24.0 and 0.33.0 (`config/speculative.py`, `config/parallel.py`).
"""

from collections.abc import Iterator

from campaign.errors import Problem
from campaign.spec.models import Arm, Speculation
from campaign.spec.parts import Parts

_GPU = frozenset({"sglang", "vllm"})
ONLY: dict[str, frozenset[str]] = {
    "threads": frozenset({"llamacpp", "command"}),
    "tp": _GPU | {"llamacpp", "command"},
    "context": _GPU | {"llamacpp", "command"},
    "kv_dtype": _GPU | {"llamacpp"},
    "prefix_cache": _GPU | {"llamacpp"},
    "speculation": _GPU | {"llamacpp", "command"},
    "runtime": _GPU | {"command"},
    "dp": _GPU,
    "ep": _GPU,
    "pp": _GPU,
    "attention_backend": _GPU,
    "moe_backend": _GPU,
    "graphs": _GPU,
    "graph_sizes": _GPU,
    "prefill_graphs": frozenset({"sglang"}),
    "memory_fraction": _GPU,
    "quantization": _GPU,
    "dtype": _GPU,
    "load_format": _GPU,
    "chat_template": _GPU,
    "trust_remote_code": _GPU,
    "patches": _GPU,
    "extra_args": _GPU | {"llamacpp", "command"},
    "env": _GPU | {"llamacpp", "command"},
    "command": frozenset({"command"}),
    "api": frozenset({"api"}),
}
"""Fields that only some engines take. In another they would be ignored, so they are refused there."""

SPECULATION_ONLY: dict[str, frozenset[str]] = {
    "ngram_size": frozenset({"llamacpp", "vllm"}),
    "steps": frozenset({"sglang"}),
    "topk": frozenset({"sglang"}),
    "draft_tokens": frozenset({"sglang"}),
    "breadth": frozenset({"sglang"}),
    "adaptive": _GPU,
    "draft_quantization": _GPU,
    "draft_tp": frozenset({"vllm"}),
    "simulated_acceptance": _GPU,
}
"""The same for fields of `speculation`."""

NGRAM = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods that draft from the text, without a model."""

HIDDEN_ENV = {
    "SGLANG_SIMULATE_ACC_LEN": "speculation.simulated_acceptance",
    "SGLANG_SIMULATE_ACC_METHOD": "speculation.simulated_acceptance",
}
"""Variables that change what an arm is and show in no page of the server: they have a field."""


def arm_traps(parts: Parts, key: str, arm: Arm) -> Iterator[Problem]:
    """Traps of one arm, inheritance applied."""
    engine = arm.engine
    if engine is None:
        return
    for name, engines in ONLY.items():
        if engine not in engines and _written(arm, name):
            why = f"means nothing to {engine}: it would be ignored"
            yield _at(parts, key, name, why, f"remove it ({', '.join(sorted(engines))} take it)")
    for name in ("command", "api"):
        if engine == name and getattr(arm, name) is None:
            yield parts.problem(
                ("arms", key), f"has no `{name}:`", f"say what the {name} is, see docs/ENGINES.md"
            )
    yield from _words(parts, key, arm, engine)
    spec = arm.speculation
    if spec is not None:
        yield from _speculation(parts, key, arm, spec)
    yield from _graphs(parts, key, arm)


def _words(parts: Parts, key: str, arm: Arm, engine: str) -> Iterator[Problem]:
    """Values that one engine takes and another does not, and what must stand beside them."""
    if engine == "sglang" and arm.kv_dtype == "fp8":
        why = "is a word of vLLM only; SGLang has two 8-bit types"
        yield _at(parts, key, "kv_dtype", why, "write fp8_e5m2 or fp8_e4m3")
    if engine == "vllm" and arm.ep not in {None, 1, (arm.tp or 1) * (arm.dp or 1)}:
        why = "is no choice in vLLM, where experts are spread over all of tp x dp"
        yield _at(parts, key, "ep", why, f"write {(arm.tp or 1) * (arm.dp or 1)}, or leave it out")
    if arm.trust_remote_code and not _pinned(parts, arm):
        why = "runs code of a repository that is not pinned"
        yield _at(parts, key, "trust_remote_code", why, "give the model `hub` and `revision`")
    for name, field in HIDDEN_ENV.items():
        if engine == "sglang" and name in arm.env:
            why = f"{name} changes the arm and shows in no page of the server"
            yield _at(parts, key, "env", why, f"write {field}", "")
    if arm.graphs is False and arm.graph_sizes is not None:
        yield _at(
            parts, key, "graph_sizes", "captures graphs that `graphs: false` turns off", "keep one of the two"
        )


def _speculation(parts: Parts, key: str, arm: Arm, spec: Speculation) -> Iterator[Problem]:
    engine = str(arm.engine)
    for name, engines in SPECULATION_ONLY.items():
        if engine not in engines and getattr(spec, name) not in {None, False}:
            why = f"speculation.{name} means nothing to {engine}"
            yield _at(parts, key, "speculation", why, "remove it", "")
    if engine not in _GPU or spec.depth == 0:
        return
    yield from _drafter(parts, key, arm, spec)
    if engine == "sglang":
        yield from _sglang(parts, key, spec)


def _drafter(parts: Parts, key: str, arm: Arm, spec: Speculation) -> Iterator[Problem]:
    """Rules of what drafts: a model where one is needed, and never a quantization by inheritance."""
    if spec.method in NGRAM and spec.draft_model is not None:
        yield _at(parts, key, "speculation", f"draft_model has no use with {spec.method}", "remove it", "")
    if spec.method in {"eagle", "eagle3", "draft-model", "dflash"} and spec.draft_model is None:
        yield _at(
            parts, key, "speculation", f"{spec.method} needs a draft_model", "name an entry of `models`", ""
        )
    inherits = arm.engine == "sglang" and arm.quantization is not None
    if spec.draft_model is not None and inherits and spec.draft_quantization is None:
        why = f"the draft model would inherit quantization {arm.quantization} from its target"
        fix = "write speculation.draft_quantization: none (or the word for how the draft is quantized)"
        yield _at(parts, key, "speculation", why, fix, "")


def _sglang(parts: Parts, key: str, spec: Speculation) -> Iterator[Problem]:
    """Width and shape: depth + 1 is what SGLang verifies, and a chain says nothing else."""
    if spec.draft_tokens is not None and spec.draft_tokens != spec.depth + 1:
        why = f"draft_tokens {spec.draft_tokens} counts the bonus token, so depth {spec.depth} makes it {spec.depth + 1}"
        yield _at(
            parts, key, "speculation", why, f"write depth: {spec.draft_tokens - 1}, or leave one out", ""
        )
    if spec.method == "ngram":
        if spec.breadth is None:
            why = "SGLang's n-gram drafter would search a tree of breadth 1 to 10"
            yield _at(
                parts,
                key,
                "speculation",
                why,
                "write speculation.breadth: 1 for a chain, or what you mean",
                "",
            )
        if spec.topk is not None or spec.steps is not None:
            why = "SGLang derives topk and steps of the n-gram drafter from its breadth"
            yield _at(parts, key, "speculation", why, "write breadth instead", "")
        return
    if spec.breadth is not None:
        yield _at(parts, key, "speculation", "breadth belongs to the n-gram drafter", "remove it", "")
    topk = spec.topk or 1
    if topk == 1 and spec.steps is not None and spec.steps != spec.depth:
        why = f"with topk 1 SGLang forces draft tokens to steps + 1, so steps {spec.steps} is depth {spec.steps}"
        yield _at(parts, key, "speculation", why, f"write depth: {spec.steps}, or leave `steps` out", "")
    if topk > 1 and spec.steps is None:
        why = f"topk {topk} makes a tree, and its number of draft passes is not the depth"
        yield _at(parts, key, "speculation", why, "write speculation.steps", "")


def graph_need(max_requests: int, depth: int, concurrency: int | None = None) -> int:
    """Tokens of the largest decode step: every running request (or all in flight, if fewer) verifies 1 + depth."""
    return (max_requests if concurrency is None else min(max_requests, concurrency)) * (1 + depth)


def _graphs(parts: Parts, key: str, arm: Arm) -> Iterator[Problem]:
    """Steps that no captured size covers run eagerly, many times slower, and nothing says so."""
    sizes = arm.graph_sizes
    if not sizes or arm.max_running_requests is None or arm.engine not in _GPU:
        return
    depth = arm.speculation.depth if arm.speculation is not None else 0
    if arm.engine == "sglang":  # counts requests; each is captured at depth + 1 tokens
        if max(sizes) < arm.max_running_requests:
            why = f"captures up to {max(sizes)} requests, and {arm.max_running_requests} may run: those steps are eager"
            yield _at(
                parts,
                key,
                "graph_sizes",
                why,
                f"add {arm.max_running_requests}, or lower max_running_requests",
            )
        return
    missed = [n for n in sizes if n % (1 + depth)]
    if missed:
        why = f"{missed[0]} is no multiple of 1 + depth = {1 + depth} tokens, so no step has that size"
        yield _at(parts, key, "graph_sizes", why, f"write multiples of {1 + depth}")
    need = graph_need(arm.max_running_requests, depth)
    if max(sizes) < need:
        why = f"captures up to {max(sizes)} tokens, and {arm.max_running_requests} requests of 1 + {depth} tokens take {need}: those steps are eager"
        yield _at(parts, key, "graph_sizes", why, f"add {need}, or lower max_running_requests")


def file_traps(parts: Parts) -> Iterator[Problem]:
    """Traps between arms: a base whose speculated partner has another limit, a ladder of what is not fixed."""
    speculated = [n for n, a in parts.resolved.items() if a.engine == "sglang" and a.speculation is not None]
    for name, arm in parts.resolved.items():
        if (
            speculated
            and arm.engine == "sglang"
            and arm.speculation is None
            and arm.max_running_requests is None
        ):
            why = f"has no `max_running_requests`, and SGLang sets 48 in {speculated[0]}, which speculates"
            yield parts.problem(("arms", name), why, "pin it in every arm alike")
    for name, ladder in parts.ladders.items():
        source = parts.resolved.get(ladder.from_ or ladder.base)
        spec = source.speculation if source is not None else None
        if spec is not None and spec.adaptive and ladder.field.startswith("speculation."):
            why = "climbs from an arm whose engine changes its depth by itself"
            yield parts.problem(("ladders", name, "field"), why, "take an arm without `adaptive`")
        if spec is not None and ladder.field == "speculation.depth" and (spec.draft_tokens or spec.steps):
            why = "moves the depth while `draft_tokens` or `steps` of the arm stay"
            yield parts.problem(
                ("ladders", name, "field"), why, "leave both out of the arm; they follow from depth"
            )
    yield from _one_at_a_time(parts)
    yield from _endpoints(parts)


def _endpoints(parts: Parts) -> Iterator[Problem]:
    """Sessions without an anchor measure endpoints only; and an endpoint says nothing of its steps."""
    for name, session in parts.sessions.items():
        arms = [a for p in session.pairs if p in parts.pairs for a in (parts.pairs[p].a, parts.pairs[p].b)]
        arms += [parts.ladders[n].base for n in session.ladders if n in parts.ladders]
        booted = [
            a for a in arms if a is not None and a in parts.resolved and parts.resolved[a].engine != "api"
        ]
        if not session.anchor and booted:
            why = f"runs {booted[0]}, which is booted: without an anchor nothing tells drift"
            yield parts.problem(("sessions", name, "anchor"), why, "leave it out")
    for name, pair in parts.pairs.items():
        sides = [parts.resolved[a] for a in (pair.a, pair.b) if a is not None and a in parts.resolved]
        if any(arm.engine == "api" for arm in sides) and pair.primary in {"step_ms", "accept_len"}:
            why = "cannot be known of a provider's endpoint, which does not say whether it drafts"
            yield parts.problem(
                ("pairs", name, "primary"), why, "write decode_tok_s or ttft_ms", pair.primary
            )


def _one_at_a_time(parts: Parts) -> Iterator[Problem]:
    """A server of one request at a time queues the rest, which would be measured as latency."""
    uses: list[tuple[tuple[str, str], int, tuple[str | None, ...]]] = [
        (("ladders", n), x.concurrency, (x.base, x.from_)) for n, x in parts.ladders.items()
    ]
    for name, pair in parts.pairs.items():
        in_flight = pair.concurrency
        most = max(in_flight, default=1) if isinstance(in_flight, tuple) else in_flight
        uses.append((("pairs", name), most, (pair.a, pair.b)))
    for at, most, sides in uses:
        for side in sides:
            arm = parts.resolved.get(str(side))
            if most > 1 and arm is not None and arm.command is not None and arm.command.one_at_a_time:
                why = f"has {most} requests in flight, and {side} serves one at a time"
                yield parts.problem((*at, "concurrency"), why, "write 1")


def _written(arm: Arm, name: str) -> bool:
    value = getattr(arm, name)
    # `graphs: false` says something; an empty list, and what is off anyway, do not.
    return name in {"graphs", "prefill_graphs"} if value is False else bool(value)


def _pinned(parts: Parts, arm: Arm) -> bool:
    model = parts.models.get(str(arm.model))
    # An entry that is not valid has a problem of its own.
    return model is None or (model.hub is not None and model.revision is not None)


def _at(parts: Parts, key: str, name: str, why: str, fix: str, value: str | None = None) -> Problem:
    return parts.problem(parts.owner(key, name), why, fix, value)
