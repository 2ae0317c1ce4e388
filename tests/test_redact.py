"""The redactor: what must never be written, and what must stay readable."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaign.redact import HIDDEN, Redactor, secret_name

CANARY = "c4n4ry-V4lue-0123456789abcdef"


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "API-KEY",
        "apiKey",
        "X-Api-Key",
        "Authorization",
        "HF_TOKEN",
        "hfToken",
        "token",
        "password",
        "db_passwd",
        "AWS_SECRET_ACCESS_KEY",
        "aws_session_token",
        "client_secret",
        "Cookie",
        "Set-Cookie",
        "X-Amz-Signature",
        "sig",
        "private_key",
        "OPENAI_API_KEY",
        "WANDB_API_KEY",
        "ssl_key_file",
        "GITHUB_TOKEN",
        "proxy-authorization",
        "api_keys",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "prompt_tokens",
        "tokens",
        "bos_token",
        "eos_token",
        "token_ids",
        "token_count",
        "completion_tokens",
        "tokenizer",
        "tokens_per_second",
        "key",
        "keyboard",
        "author",
        "monkey",
        "cache_key",
        "max_token",
        "draft_token",
        "first_token",
    ],
)
def test_names_that_only_sound_like_it(name: str) -> None:
    assert not secret_name(name)


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--api-key", CANARY, "--port", "1"],
        ["serve", f"--api-key={CANARY}", "--port", "1"],
        ["env", f"HF_TOKEN={CANARY}", "serve", "--port", "1"],
        ["get", f"https://user:{CANARY}@host/x", "--port", "1"],
        ["get", f"https://host/x?token={CANARY}&a=1", "--port", "1"],
        ["curl", "-H", f"Authorization: Bearer {CANARY}", "--port", "1"],
    ],
)
def test_argv(argv: list[str]) -> None:
    out = Redactor().argv(argv)
    assert CANARY not in " ".join(out)
    assert len(out) == len(argv)
    assert out[0] == argv[0]
    assert out[-2:] == ["--port", "1"]


def test_a_flag_without_a_value_hides_nothing_else() -> None:
    assert Redactor().argv(["x", "--api-key", "--port", "80"]) == ["x", "--api-key", "--port", "80"]


@pytest.mark.parametrize(
    "url",
    [
        f"https://u:{CANARY}@h/p",
        f"https://h/p?X-Amz-Signature={CANARY}&x=1",
        f"s3://h/p?sig={CANARY}",
        f"http://h/p#{CANARY}",
    ],
)
def test_urls(url: str) -> None:
    assert CANARY not in Redactor().url(url)
    assert "h/p" in Redactor().url(url)


def test_a_plain_url_is_kept() -> None:
    assert Redactor().url("http://127.0.0.1:8000/v1/models?a=1") == "http://127.0.0.1:8000/v1/models?a=1"


@pytest.mark.parametrize(
    "line",
    [
        f"Authorization: Bearer {CANARY}",
        f"token={CANARY} port=80",
        f'{{"api_key": "{CANARY}", "port": 80}}',
        "key sk-proj-abcdefghijklmnop1234 used",
        "hf_abcdefghijklmnopqrstuvwx",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF123_-x",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_text(line: str) -> None:
    out = Redactor().text(line)
    assert HIDDEN in out
    for secret in (CANARY, "abcdefghijklmnop", "AKIAABCDEFGHIJKLMNOP", "eyJzdWIiOiIxMjM0In0", "MIIEow"):
        assert secret not in out


@pytest.mark.parametrize(
    "line",
    [
        "0.00.57 I llama threadpool init, n_threads = 1",
        "print_info: BOS token = 1 '<|im_start|>'",
        "completion_tokens: 48, prompt_tokens: 20",
        "GET /v1/models 200",
        "max_tokens=64 temperature=0.6",
    ],
)
def test_ordinary_log_lines_are_kept(line: str) -> None:
    assert Redactor().text(line) == line


def test_json_headers_and_env() -> None:
    r = Redactor()
    value = {"a": [{"password": CANARY}], "bos_token": "<s>", "n": 1, "url": f"http://x:{CANARY}@h/"}
    out = r.json(value)
    assert CANARY not in json.dumps(out)
    assert out["bos_token"] == "<s>"
    assert out["n"] == 1
    assert r.headers({"Authorization": f"Bearer {CANARY}", "Accept": "*/*"}) == {
        "Authorization": HIDDEN,
        "Accept": "*/*",
    }
    env = r.env(
        {"OMP_NUM_THREADS": "1", "HF_TOKEN": CANARY, "OTHER": CANARY}, {"OMP_NUM_THREADS", "HF_TOKEN"}
    )
    assert env == {"OMP_NUM_THREADS": "1", "HF_TOKEN": None, "OTHER": None}


def test_a_value_it_was_told_about_is_gone_everywhere() -> None:
    r = Redactor(["p@ss word/1"])
    assert "p@ss" not in r.text("x p@ss word/1 y")
    assert "p%40ss" not in r.text("x=p%40ss%20word%2F1")
    r.hide("abc")
    assert r.text("abc abc") == "abc abc"


@given(
    st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=6, max_size=40),
    st.text(max_size=50),
)
def test_hidden_values_never_survive(secret: str, around: str) -> None:
    r = Redactor([secret])
    if secret in HIDDEN:
        return
    for out in (
        r.text(around + secret + around),
        json.dumps(r.json({"x": [around + secret]})),
        *r.argv([around + secret]),
    ):
        assert secret not in out.replace(HIDDEN, "")


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    )
)
def test_json_keeps_its_shape(value: object) -> None:
    out = Redactor().json(value)
    json.dumps(out)
    if isinstance(value, dict):
        assert set(out) == set(value)
