"""Flag tables, their extraction from source, and the check against them."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.engines.flags import table as tables
from campaign.engines.flags.check import check, options
from campaign.engines.flags.source import open_source
from campaign.engines.flags.table import Flag, FlagTable
from campaign.errors import PreflightError

SGLANG = {
    "sglang/__init__.py": "",
    "sglang/srt/environ.py": "class Envs:\n    SGLANG_A = EnvBool(False)\n    SGLANG_B = EnvInt(1, deprecated_name='SGLANG_OLD_B')\n",
    "sglang/srt/server_args.py": """
from typing import Optional, List
KV = ["auto", "fp8_e5m2"]
MORE = KV + ["bf16"]
class ServerArgs:
    model_path: A[str, Arg(help="x", aliases=["--model"])]
    kv_cache_dtype: A[str, Arg(help="x", choices=MORE)] = "auto"
    cuda_graph_bs_decode: A[Optional[List[int]], "sizes"] = None
    enable_metrics: A[bool, "on"] = False
    hidden: A[str, Arg(no_cli=True)] = ""
    plain: int = 3
    def add_cli_args(parser):
        parser.add_argument("--old-flag", action=DeprecatedAliasStoreAction, new_flag="--new-flag")
        parser.add_argument("--computed", choices=[m.name for m in Enum])
""",
    "sglang/srt/other.py": "import os\nx = os.environ.get('SGLANG_C')\ny = os.getenv(\"LIB_D\")\n",
}


def wheel(tmp_path: Path, files: dict[str, str], name: str = "sglang-9.9.9-py3-none-any.whl") -> Path:
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(
            "sglang-9.9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n"
        )
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_wheel_is_read_without_importing_it_and_kept(tmp_path: Path) -> None:
    path = wheel(tmp_path, SGLANG)
    table = tables.of_source(str(path), "sglang")
    assert table.version == "9.9.9"
    assert table.flags["--kv-cache-dtype"].choices == ("auto", "bf16", "fp8_e5m2")
    assert table.flags["--model"] == table.flags["--model-path"] == Flag()
    assert table.flags["--cuda-graph-bs-decode"].values == "many"
    assert table.flags["--enable-metrics"].values == "none"
    assert table.flags["--old-flag"] == Flag(new="--new-flag", deprecated=True)
    assert table.flags["--computed"].choices is None
    assert not {"--hidden", "--plain"} & set(table.flags)
    assert {"SGLANG_A", "SGLANG_B", "SGLANG_OLD_B", "SGLANG_C", "LIB_D"} <= table.env
    assert tables.of_version("sglang", "9.9.9") == table, "the second look is from the cache"
    assert tables.of_source(str(path), "sglang") == table


def test_sdist_folder_and_git_revision_say_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    for name, text in SGLANG.items():
        file = folder / "python" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    sdist = tmp_path / "sglang-9.9.9.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(folder, "sglang-9.9.9")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    wanted = tables.of_source(str(wheel(tmp_path, SGLANG)), "sglang")
    for given_ in (str(folder), str(sdist), f"{folder}@HEAD"):
        table = tables.of_source(given_, "sglang")
        assert (table.flags, table.env) == (wanted.flags, wanted.env), given_
    (folder / "python/sglang/srt/server_args.py").write_text(
        "class ServerArgs:\n    new_one: A[int, 'x'] = 1\n"
    )
    assert "--new-one" in tables.of_source(str(folder), "sglang").flags
    assert "--new-one" not in tables.of_source(f"{folder}@HEAD", "sglang").flags
    with pytest.raises(PreflightError, match="name a revision"):
        tables.of_source(f"{folder}@nope", "sglang")


def test_what_is_no_source_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_text("no zip")
    for given_, words in (
        (str(tmp_path / "x.whl"), "not a wheel"),
        (str(tmp_path / "none"), "no such"),
        (str(tmp_path), "no package"),
    ):
        with pytest.raises(PreflightError, match=words):
            open_source(given_, "sglang")
    with pytest.raises(PreflightError, match="no flag was found"):
        tables.of_source(str(wheel(tmp_path, {"sglang/a.py": ""})), "sglang")


def test_hostile_source_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w').close()\nCHOICES = [open({str(marker)!r}, 'w')]\n"
    tables.of_source(
        str(
            wheel(tmp_path, {**SGLANG, "sglang/__init__.py": evil, "sglang/srt/arg_groups/choices.py": evil})
        ),
        "sglang",
    )
    assert not marker.exists()


@pytest.mark.parametrize(("engine", "version"), tables.SHIPPED)
def test_shipped_tables_name_their_wheel(engine: str, version: str) -> None:
    table = tables.shipped(engine, version)
    assert table is not None
    assert (table.engine, table.version) == (engine, version)
    assert table.source.startswith(f"{engine}-{version}-")
    assert len(table.sha256 or "") == 64
    assert len(table.flags) > 300
    assert len(table.env) > 300
    text = tables.dumps(table)
    assert FlagTable.from_json(json.loads(text)) == table


def known(engine: str, version: str) -> FlagTable:
    table = tables.shipped(engine, version)
    assert table is not None
    return table


@pytest.mark.parametrize(
    ("engine", "version", "argv", "kind", "words"),
    [
        (
            "sglang",
            "0.5.23",
            ["--mem-fraction-statik", "0.6"],
            "unknown",
            "did you mean --mem-fraction-static?",
        ),
        ("sglang", "0.5.23", ["--cuda-graph-max-bs", "8"], "renamed", "--cuda-graph-max-bs-decode"),
        ("sglang", "0.5.14", ["--cuda-graph-max-bs", "8"], "renamed", "--cuda-graph-max-bs-decode"),
        ("sglang", "0.5.23", ["--torchao-config", "x"], "removed", "0.5.14 has it"),
        ("sglang", "0.5.14", ["--speculative-draft-kv-cache-dtype", "auto"], "not_yet", "0.5.23 has it"),
        ("sglang", "0.5.14", ["--tp", "4"], "abbreviated", "--tp-size"),
        ("sglang", "0.5.14", ["--speculative-num", "4"], "ambiguous", "--speculative-num-draft-tokens"),
        ("sglang", "0.5.14", ["--kv-cache-dtype", "fp8"], "choice", "did you mean fp8_e"),
        ("sglang", "0.5.23", ["--kv-cache-dtype", "fp4_e2m1"], "choice", "One of"),
        ("sglang", "0.5.14", ["--enable-metrics", "true"], "value", "takes no value"),
        ("sglang", "0.5.14", ["--tp-size"], "value", "needs a value"),
        ("sglang", "0.5.14", ["--tp-size", "1", "2"], "value", "takes one value"),
        ("vllm", "0.33.0", ["--kv-cache-dtype", "bf16"], "choice", "bfloat16"),
        ("vllm", "0.33.0", ["--max-num-partial-prefills", "2"], "removed", "0.24.0 has it"),
        ("vllm", "0.24.0", ["--per-request-spec-decode-metrics", "summary"], "not_yet", "0.33.0"),
        ("vllm", "0.24.0", ["--max_num_seq", "4"], "abbreviated", "--max-num-seqs"),
    ],
)
def test_findings(engine: str, version: str, argv: list[str], kind: str, words: str) -> None:
    table = known(engine, version)
    found = check(table, argv, {}, others=tables.others(engine, version))
    assert [f.kind for f in found] == [kind]
    assert words in f"{found[0].why}. Fix: {found[0].fix}"
    assert check(table, argv, {}, allow=[argv[0]]) == []


@pytest.mark.parametrize(
    ("engine", "version", "argv"),
    [
        ("sglang", "0.5.14", ["--tp-size=4", "--cuda-graph-bs-decode", "1", "2", "--enable-metrics"]),
        ("sglang", "0.5.14", ["--speculative-accept-threshold-single", "-1"]),
        ("vllm", "0.33.0", ["--max_num_seqs", "4", "--speculative-config.method", "ngram", "-tp", "4"]),
        ("vllm", "0.24.0", ["--attention-backend", "flashinfer", "--no-enable-prefix-caching"]),
    ],
)
def test_what_the_engine_takes_is_left_alone(engine: str, version: str, argv: list[str]) -> None:
    assert check(known(engine, version), argv, {}) == []


@pytest.mark.parametrize(
    ("engine", "version", "name", "unread"),
    [
        ("vllm", "0.33.0", "VLLM_ATTENTION_BACKEND", True),  # was read once; then silently no longer
        ("vllm", "0.33.0", "VLLM_LOGGING_LEVEL", False),
        ("sglang", "0.5.14", "SGLANG_SIMULATE_ACC_LEN", False),
        ("sglang", "0.5.14", "SGLANG_SIMULATE_ACC_LENGTH", True),
        ("sglang", "0.5.14", "NCCL_DEBUG", False),
        ("sglang", "0.5.14", "PYTHONPATH", False),
        ("sglang", "0.5.14", "MY_OWN_SWITCH", True),
    ],
)
def test_a_variable_that_nothing_reads(engine: str, version: str, name: str, *, unread: bool) -> None:
    found = check(known(engine, version), [], {name: "1"}, others=tables.others(engine, version))
    assert [f.kind for f in found] == (["unread"] if unread else [])


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["--tp-size", "--x", "-", "-1", "a=b", "--a=b", "--", ""]), st.text(max_size=6)
        )
    )
)
def test_any_command_line_is_read(argv: list[str]) -> None:
    read = list(options(argv))
    assert all(word.startswith("-") for word, _ in read)
    for finding in check(known("sglang", "0.5.14"), argv, {}, others=tables.others("sglang", "0.5.14")):
        assert finding.why
        assert finding.fix


def test_regenerating_from_no_wheel_fails(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "campaign.engines.flags", str(tmp_path)], check=False)
    assert done.returncode == 1
