"""Launches that a server refuses, ignores or changes: reported failures, and the rules one by one."""

import json
from pathlib import Path
from typing import Any

import pytest

from campaign.engines import effective, failures
from campaign.engines.llamacpp import LlamaCpp
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Speculation

DATA = Path(__file__).parent.parent / "data"


def case(name: str) -> dict[str, Any]:
    return json.loads((DATA / "cases" / f"15_launch_{name}.json").read_text())


@pytest.mark.parametrize("name", ["ignored_env", "truncated_value"])
def test_what_the_log_says_is_not_in_force_stops_the_cell(name: str) -> None:
    document = case(name)
    log, asked = "\n".join(document["child_log"]), document["requested"]
    found = effective.log_differences(log, asked.get("env", {}), asked.get("args", []))
    assert document["expect"] == {"start_cell": False, "reason": "requested_not_effective"}
    assert len(found) == 1
    value = [*asked.get("env", {}).values(), *asked.get("args", [])[1:]]
    assert found[0].requested == value[0]


def test_a_removed_flag_is_a_config_failure() -> None:
    document = case("removed_flag")
    found = LlamaCpp().failure("\n".join(document["child_log"]))
    assert found is not None
    assert found[0] == document["expect"]["failure_class"]
    # The status alone says it too, should the log be empty.
    assert failures.of_status(document["rc"])[0] == document["expect"]["failure_class"]


@pytest.mark.parametrize(
    ("log", "env", "args"),
    [
        ("INFO max capture set to 42", {}, ["--max-capture", "42"]),
        ("WARN max capture cut to 40", {}, ["--max-tokens", "40"]),
        ("WARN env OTHER is not known", {"OTHER_ONE": "1"}, []),
        ("unknown chat template, using the default", {}, ["--poll", "0"]),
        ("max_capture = 42", {}, ["--max-capture=42"]),
    ],
)
def test_lines_that_deny_nothing(log: str, env: dict[str, str], args: list[str]) -> None:
    assert effective.log_differences(log, env, args) == ()


@pytest.mark.parametrize("spelling", ["--max-capture", "max_capture", "Max capture", "max-capture"])
def test_flags_are_found_in_every_spelling(spelling: str) -> None:
    found = effective.log_differences(f"WARN {spelling} is ignored on CPU", {}, ["--max-capture=42"])
    assert [(d.field, d.requested) for d in found] == [("--max-capture", "42")]


ARM = Arm(
    engine="llamacpp",
    kv_dtype="q8_0",
    context=512,
    speculation=Speculation(method="ngram", depth=3, ngram_size=4),
)


def test_a_diff_names_field_and_both_values() -> None:
    asked = effective.requested(ARM)
    in_force = {**asked, "kv_dtype": "f16", "threads": 7}
    assert [str(d) for d in effective.diff(asked, in_force)] == ["kv_dtype: asked for q8_0, in force is f16"]
    assert effective.diff(asked, asked) == ()


def test_speculation_that_is_off_or_uninvited_is_a_difference() -> None:
    asked = effective.requested(ARM)
    off = {"speculation.method": "none"}
    assert [d.field for d in effective.diff(asked, off)] == ["speculation.method"]
    plain = effective.requested(Arm(engine="llamacpp", context=512))
    uninvited = {"context": 512, "speculation.method": "ngram"}
    assert [d.field for d in effective.diff(plain, uninvited)] == ["speculation.method"]
    assert effective.diff(plain, {"context": 512, "speculation.method": "none"}) == ()


def test_depth_zero_asks_for_no_speculation() -> None:
    arm = Arm(engine="llamacpp", speculation=Speculation(method="ngram", depth=0))
    assert effective.requested(arm) == {}


def test_what_a_server_does_not_say_is_unconfirmed_and_not_a_difference() -> None:
    asked = effective.requested(ARM)
    assert effective.diff(asked, {}) == ()
    assert "kv_dtype" in effective.unconfirmed(asked, {})


def test_llamacpp_reads_props_and_log() -> None:
    props = json.loads((DATA / "fixtures" / "llamacpp_props.json").read_text())
    log = (
        "0.00.56 I llama_kv_cache: size =   45.00 MiB (  2048 cells,  30 layers,  1/1 seqs),"
        " K (f16):   22.50 MiB, V (q8_0):   22.50 MiB\n"
        "0.00.57 I cmn          init: llama threadpool init, n_threads = 2\n"
        "0.00.63 I spec common_specu: adding speculative implementation 'ngram-simple'\n"
        "0.00.63 I spec common_specu: - size_n=3, size_m=8, min_hits=1\n"
    )
    assert LlamaCpp().effective({"/props": props, "log": log}) == {
        "context": 2048,
        "max_running_requests": 1,
        "kv_dtype": "f16/q8_0",
        "threads": 2,
        "speculation.method": "ngram",
        "speculation.depth": 8,
        "speculation.ngram_size": 3,
    }
    assert LlamaCpp().effective({"/props": None, "log": ""}) == {}


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("llamacpp_server: error: unrecognized arguments: --bogus 3", "config"),
        ("error: argument --kv-dtype: invalid choice: 'fp8'", "config"),
        ("E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18434", "port_taken"),
        ("E gguf_init_from_reader: invalid magic characters: 'garb', expected 'GGUF'", "missing_model"),
        ("error: model file not found: /x.gguf", "missing_model"),
        ("E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9", "oom"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "oom"),
    ],
)
def test_known_failures_of_llamacpp(log: str, kind: str) -> None:
    found = LlamaCpp().failure(f"0.1 I srv init: initializing ...\n{log}\n")
    assert found == (kind, log)


def test_a_healthy_log_names_no_failure() -> None:
    assert (
        LlamaCpp().failure("I srv init: model loaded\nI srv init: listening on http://127.0.0.1:1\n") is None
    )


@pytest.mark.parametrize(
    ("status", "kind", "word"),
    [
        (0, "died", "status 0"),
        (1, "died", "status 1"),
        (2, "config", "2"),
        (-9, "died", "SIGKILL"),
        (139, "died", "SIGSEGV"),
        (None, "died", "nobody"),
    ],
)
def test_ends_without_words(status: int | None, kind: str, word: str) -> None:
    found = failures.of_status(status)
    assert found[0] == kind
    assert word in found[1]


def test_every_engine_of_the_grammar_has_an_adapter() -> None:
    from typing import get_args

    from campaign.engines import registry
    from campaign.engines.base import Engine

    inside = [a for a in get_args(Arm.model_fields["engine"].annotation) if a is not type(None)]
    assert set(get_args(inside[0])) == set(registry.NAMES)
    for name in registry.NAMES:
        adapter = registry.get(name)
        assert adapter.name == name
        assert isinstance(adapter, Engine)
    with pytest.raises(PreflightError, match=r"no-such.*llamacpp"):
        registry.get("no-such")


def test_requested_beside_in_force() -> None:
    rows = effective.table(
        {"tp": 2, "context": 8, "kv_dtype": "fp8"}, {"tp": 2, "context": 4, "dtype": "bf16"}
    )
    assert {r["field"]: r["state"] for r in rows} == {
        "tp": "honoured", "context": "changed", "kv_dtype": "unconfirmed", "dtype": "resolved",
    }  # fmt: skip
    assert rows[1] == {"field": "context", "requested": 8, "effective": 4, "state": "changed"}
