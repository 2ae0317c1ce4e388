"""Every flag and variable of every arm of a spec, held against the source of the engine that will start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from campaign.engines import gpu, sglang, vllm
from campaign.engines.flags import check as flag_check
from campaign.engines.flags import table as tables
from campaign.engines.flags.table import FlagTable
from campaign.errors import PreflightError, Problem, SpecError
from campaign.spec.load import Loaded
from campaign.spec.models import Arm, Spec
from campaign.spec.resolve import with_fields


@dataclass(frozen=True)
class Report:
    """What a check of a spec found."""

    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    """Arms that could not be checked here, and why."""
    checked: tuple[tuple[str, str, str, int], ...]
    """(arm, engine, version and where its table is from, words checked)."""

    def require(self) -> "Report":
        """Itself, where nothing must be fixed. Raises SpecError."""
        if self.problems:
            raise SpecError(self.problems)
        return self


@dataclass(frozen=True, slots=True)
class _Use:
    """One configuration that will be booted, and where the file says it."""

    label: str
    source: str
    """The arm of the file that it is made from."""
    arm: Arm
    at: tuple[str, ...]
    """Where a varied field was written."""
    varied: frozenset[str]


def check_spec(loaded: Loaded, wheels: Sequence[str] = ()) -> Report:
    """Check all arms, rungs and varied sides. `wheels` are sources that replace the table of their own version.

    A wheel is used for the arms of its engine whose version it is, and for those of unknown version.
    Raises PreflightError where a wheel cannot be read.
    """
    spec = loaded.spec
    given = [_given(wheel) for wheel in wheels]
    problems: dict[tuple[str, int | None, str, str], Problem] = {}
    warnings: dict[str, None] = {}
    checked: list[tuple[str, str, str, int]] = []
    for use in _uses(spec):
        engine = use.arm.engine or ""
        if engine not in tables.PACKAGES:
            continue
        table = _table(spec, use, given)
        if table is None:
            runtime = use.arm.runtime or "none"
            warnings[
                f"arm {use.label}: no source of {engine} is known (runtime {runtime}); its flags are checked on the node, "
                "before weights load. Give `version:` or `source:` in the runtime, or --engine-wheel"
            ] = None
            continue
        try:
            argv, env = _words(spec, use.arm, table)
        except PreflightError as error:
            at = _place(loaded, use, "speculation")
            problem = loaded.problem(
                at, "", str(error).rpartition(". Fix: ")[0] or str(error), str(error).rpartition("Fix: ")[2]
            )
            problems.setdefault((problem.file, problem.line, problem.field, problem.why), problem)
            continue
        checked.append((use.label, engine, f"{table.version} ({table.source})", len(argv) + len(env)))
        for finding in flag_check.check(
            table, argv, env, others=tables.others(engine, table.version), allow=use.arm.allow_unknown
        ):
            problem = _problem(loaded, use, finding, env)
            problems.setdefault((problem.file, problem.line, problem.field, problem.why), problem)
    ordered = sorted(problems.values(), key=lambda p: (p.file, p.line or 0, p.field))
    return Report(tuple(ordered), tuple(warnings), tuple(checked))


def _given(wheel: str) -> FlagTable:
    """The table of a wheel whose engine its own name tells. Raises PreflightError."""
    failures = []
    for engine in tables.PACKAGES:
        try:
            return tables.of_source(wheel, engine)
        except PreflightError as error:
            failures.append(str(error))
    raise PreflightError(failures[0])


def _table(spec: Spec, use: _Use, given: Sequence[FlagTable]) -> FlagTable | None:
    from campaign.engines import runtimes

    engine = use.arm.engine or ""
    runtime = spec.runtimes.get(use.arm.runtime or "")
    version = runtimes.version(runtime, engine)
    for table in given:
        if table.engine == engine and (version in {None, table.version} or table.version == "unknown"):
            return table
    return gpu.flag_table(engine, runtime)


def _words(spec: Spec, arm: Arm, table: FlagTable) -> tuple[list[str], dict[str, str]]:
    runtime = spec.runtimes.get(arm.runtime or "")
    if arm.engine == "sglang":
        own = sglang.arguments(arm, spec.models, 1)
        env = {**sglang.own_env(arm), **arm.env}
    else:
        own = vllm.arguments(arm, spec.models, 1, runtime)[1:]
        if (
            "--per-request-spec-decode-metrics" in own
            and "--per-request-spec-decode-metrics" not in table.flags
        ):
            own = own[: own.index("--per-request-spec-decode-metrics")]
        env = dict(arm.env)
    gpu.doubled(arm, own)
    return [*own, *arm.extra_args], env


_FIELDS: Mapping[str, str] = {
    "--kv-cache-dtype": "kv_dtype", "--attention-backend": "attention_backend", "--moe-runner-backend": "moe_backend",
    "--moe-backend": "moe_backend", "--quantization": "quantization", "--dtype": "dtype", "--load-format": "load_format",
    "--speculative-algorithm": "speculation", "--speculative-config": "speculation",
    "--speculative-draft-model-quantization": "speculation", "--cuda-graph-bs-decode": "graph_sizes",
    "--cudagraph-capture-sizes": "graph_sizes", "--disable-prefill-cuda-graph": "prefill_graphs",
    "--disable-decode-cuda-graph": "graphs", "--enforce-eager": "graphs", "--tp-size": "tp", "--ep-size": "ep",
    "--speculative-adaptive": "speculation", "--chat-template": "chat_template",
}  # fmt: skip
"""Flag -> the field of the arm that it came from."""


def _problem(loaded: Loaded, use: _Use, finding: flag_check.Finding, env: Mapping[str, str]) -> Problem:
    if finding.kind == "unread":
        at, value = _place(loaded, use, "env", finding.word), env[finding.word]
        return loaded.problem(at, value, f"{finding.word}: {finding.why}", finding.fix)
    extra = use.arm.extra_args
    words = {w.partition("=")[0] for w in extra if w.startswith("-")}
    if finding.word in words:
        index = next(i for i, w in enumerate(extra) if w.partition("=")[0] == finding.word)
        at = _place(loaded, use, "extra_args", str(index))
        shown = f"{finding.word} {finding.value}".strip()
        return loaded.problem(at, shown, finding.why, finding.fix)
    field = _FIELDS.get(finding.word, "engine")
    return loaded.problem(
        _place(loaded, use, field), finding.value, f"becomes {finding.word}, which {finding.why}", finding.fix
    )


def _place(loaded: Loaded, use: _Use, field: str, inner: str | None = None) -> tuple[str, ...]:
    """Path of a field as written: where it was varied, else in the arm (or its parent) that writes it."""
    tail = () if inner is None else (inner,)
    if any(name.split(".")[0] == field for name in use.varied):
        return use.at
    arms = loaded.places
    at, seen = use.source, set()
    parents = _parents(loaded)
    while at and at not in seen:
        seen.add(at)
        if ("arms", at, field) in arms:
            return ("arms", at, field, *tail)
        at = parents.get(at, "")
    return ("arms", use.source, field, *tail)


def _parents(loaded: Loaded) -> dict[str, str]:
    """`from` of each arm, as written: the resolved spec has none left."""
    import re

    found: dict[str, str] = {}
    lines = loaded.source.splitlines()
    for path, place in loaded.places.items():
        if len(path) == 3 and path[0] == "arms" and path[2] == "from" and place.line is not None:
            match = re.search(r"\bfrom:\s*[\"']?([A-Za-z0-9_.-]+)", lines[place.line - 1])
            if match:
                found[path[1]] = match[1]
    return found


def _uses(spec: Spec) -> list[_Use]:
    """Every configuration that a session would boot: arms of the file, rungs and varied sides."""
    found = [_Use(name, name, arm, ("arms", name), frozenset()) for name, arm in spec.arms.items()]
    for name, ladder in spec.ladders.items():
        source = ladder.from_ or ladder.base
        for i, value in enumerate(ladder.values):
            arm = with_fields(spec.arms[source], {ladder.field: value})
            at = ("ladders", name, "values", str(i))
            found.append(_Use(f"{name}={value}", source, arm, at, frozenset({ladder.field})))
    for name, pair in spec.pairs.items():
        if pair.vary:
            arm = with_fields(spec.arms[pair.a], pair.vary)
            found.append(_Use(f"{name}.b", pair.a, arm, ("pairs", name, "vary"), frozenset(pair.vary)))
    return found
