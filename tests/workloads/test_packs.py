"""Prompt packs: shipped ones rebuild, files stay in their folder, pins hold, bodies are complete."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.errors import SpecError
from campaign.spec.models import Workload
from campaign.workloads import build
from campaign.workloads.packs import body, load, shipped

DATA = Path(build.__file__).parent / "data"


def workload(**fields) -> Workload:
    return Workload(**{"pack": "health", "n": 2, "max_tokens": 8, **fields})


def test_shipped_packs_rebuild_byte_for_byte():
    assert set(shipped()) == set(build.packs()) == {"quickstart-chat", "quickstart-copy", "health"}
    for name, data in build.packs().items():
        assert (DATA / f"{name}.jsonl").read_bytes() == data


@pytest.mark.parametrize(("pack", "n"), [("quickstart-chat", 20), ("quickstart-copy", 16), ("health", 8)])
def test_shipped_packs_hold_enough_distinct_plain_prompts(pack, n, tmp_path):
    prompts = load(workload(pack=pack, n=n), tmp_path)
    assert len({p.sha256 for p in prompts.items}) == n
    assert [p.slot for p in prompts.items] == list(range(n))
    for prompt in prompts.items:
        assert prompt.messages is not None
        assert prompt.messages[0]["content"].isascii()
    with pytest.raises(SpecError, match=f"has {n} prompts"):
        load(workload(pack=pack, n=n + 1), tmp_path)


def test_copy_prompts_hold_a_list_worth_copying():
    for prompt in build.copy():
        json.loads(prompt[prompt.index("{") :])


def test_pins_are_of_rendered_prompts_not_of_the_spelling(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "h\\u00e9", "id": 1}\n')
    (tmp_path / "b.jsonl").write_bytes('﻿\r\n{ "id":2, "prompt":"hé" }\r\n'.encode())
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "hé"}]}')
    pins = {load(workload(pack=f"{x}.jsonl", n=1), tmp_path).sha256 for x in "abc"}
    assert len(pins) == 1
    (pin,) = pins
    assert load(workload(pack="a.jsonl", n=1, sha256=pin), tmp_path).sha256 == pin
    text = load(workload(pack="a.jsonl", n=1, endpoint="completions"), tmp_path)
    assert (text.items[0].text, text.items[0].messages) == ("hé", None)
    assert text.sha256 != pin


def test_another_pin_names_expected_and_found(tmp_path):
    found = load(workload(), tmp_path).sha256
    with pytest.raises(SpecError) as caught:
        load(workload(sha256="0" * 64), tmp_path)
    assert found in str(caught.value)
    assert "0" * 64 in str(caught.value)


def test_pins_of_the_shipped_packs_never_change(tmp_path):
    # Stored rows are compared by prompt: new prompts belong in a new pack.
    pins = {p: load(workload(pack=p, n=6), tmp_path).sha256[:12] for p in shipped()}
    assert pins == {
        "health": "0d08daf4b986",
        "quickstart-chat": "c06f0a2b0d3a",
        "quickstart-copy": "4be8d3ab00bd",
    }


def test_a_file_may_not_leave_the_folder_of_the_spec(tmp_path):
    inside = tmp_path / "in"
    inside.mkdir()
    (tmp_path / "out.jsonl").write_text('{"prompt": "x"}\n')
    (inside / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    for pack in ("../out.jsonl", str(tmp_path / "out.jsonl"), "link.jsonl", "x/../../out.jsonl"):
        with pytest.raises(SpecError, match="leaves the folder"):
            load(workload(pack=pack, n=1), inside)


@pytest.mark.parametrize("pack", ["healt", "none.jsonl", "sub/none.jsonl", ".jsonl", "./"])
def test_unknown_packs_and_missing_files(pack, tmp_path):
    with pytest.raises(SpecError) as caught:
        load(workload(pack=pack, n=1), tmp_path)
    assert caught.value.problems[0].field == "workloads.pack"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{}", "exactly one"),
        ('{"prompt": "x", "messages": []}', "exactly one"),
        ("[1]", "exactly one"),
        ('{"prompt": ""}', "not text, or empty"),
        ('{"prompt": 3}', "not text, or empty"),
        ('{"prompt": "\\ud800"}', "Unicode"),
        ('{"messages": []}', "list of objects"),
        ('{"messages": ["x"]}', "list of objects"),
        ('{"messages": [{"role": "x", "content": "y"}]}', "role"),
        ('{"messages": [{"role": "user", "content": "y", "name": "z"}]}', "not one"),
        ('{"prompt": "x"', "not JSON"),
    ],
)
def test_bad_lines_are_refused_by_number(line, says, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "ok"}\n' + line + "\n")
    with pytest.raises(SpecError) as caught:
        load(workload(pack="p.jsonl", n=2), tmp_path)
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == ("p.jsonl", 2)
    assert says in problem.why + problem.fix


def test_messages_do_not_fit_the_completions_endpoint(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "y"}]}')
    with pytest.raises(SpecError, match="completions"):
        load(workload(pack="p.jsonl", n=1, endpoint="completions"), tmp_path)


def test_the_body_is_complete(tmp_path):
    w = workload(temperature=0.6, top_p=0.9)
    prompt = load(w, tmp_path).items[1]
    assert body(w, prompt, 7, "m") == {
        "model": "m",
        "messages": [{"role": "user", "content": build.HEALTH[1]}],
        "max_tokens": 8,
        "temperature": 0.6,
        "top_p": 0.9,
        "seed": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    w = workload(endpoint="completions")
    assert body(w, load(w, tmp_path).items[0], 7, "m")["prompt"] == build.HEALTH[0]


@given(st.binary(max_size=200))
def test_arbitrary_files_raise_nothing_but_spec_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("p")
    (folder / "p.jsonl").write_bytes(data)
    with pytest.raises(SpecError):
        load(workload(pack="p.jsonl", n=3), folder)
