"""One redactor for argv, URLs, headers, JSON, environments and logs.

Two rules, applied together: a value is hidden when its *name* says that it is a secret, and any text is
scrubbed of what *looks like* one (bearer tokens, provider key prefixes, JWTs, private keys, passwords in
URLs) or equals a secret this process was told about with `hide`. Hiding too much costs a log line; hiding
too little costs an account.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

HIDDEN = "[redacted]"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset(
    [
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "authorization",
        "auth",
        "cookie",
        "signature",
        "sig",
        "token",
        "jwt",
        "bearer",
        "apikey",
        "accesskey",
    ]
)
_SECRET_PAIRS = frozenset(
    {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("session", "key")}
    | {("account", "key"), ("license", "key"), ("encryption", "key"), ("signing", "key"), ("ssh", "key")}
    | {("api", "keys"), ("access", "keys"), ("ssl", "key")}
)
_PLAIN_BEFORE_TOKEN = frozenset(
    [
        "bos",
        "eos",
        "eot",
        "eom",
        "pad",
        "unk",
        "mask",
        "cls",
        "sep",
        "image",
        "audio",
        "video",
        "per",
        "first",
        "last",
        "next",
        "stop",
        "start",
        "end",
        "media",
        "max",
        "min",
        "num",
        "prompt",
        "draft",
        "accepted",
        "each",
    ]
)
"""`eos_token`, `max_token`: the word is about text there, not about access."""
_PLAIN_AFTER_TOKEN = frozenset(
    ["id", "ids", "count", "counts", "limit", "rate", "budget", "per", "s", "capacity", "usage"]
)

_LOOKS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), r"\1 " + HIDDEN),
    (re.compile(r"\b(?:sk|pk|rk|hf|r8|gsk|fw|nvapi|xai|csk)[-_][A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|npm_|pypi-)[A-Za-z0-9_-]{10,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b"), HIDDEN),
    (re.compile(r"\bAIza[A-Za-z0-9_-]{30,}"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), HIDDEN),
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
        ),
        HIDDEN,
    ),
    (re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"), HIDDEN),
)
_ASSIGNED = re.compile(
    r"""(?P<name>[A-Za-z][A-Za-z0-9_.-]*)(?P<mid>["']?\s*[=:]\s*["']?)(?P<value>[^\s"'&,;{}\[\]]+)"""
)


def secret_name(name: str) -> bool:
    """Whether a key, flag, header or variable of this name holds a secret."""
    words = [w.lower() for w in _WORDS.findall(name)]
    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        after = words[i + 1] if i + 1 < len(words) else ""
        if (before, word) in _SECRET_PAIRS:
            return True
        if word == "token" and (before in _PLAIN_BEFORE_TOKEN or after in _PLAIN_AFTER_TOKEN):
            continue
        if word in _SECRET_WORDS:
            return True
    return False


class Redactor:
    """Hides secrets. One per process; `hide` teaches it values that must never be written."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._known: set[str] = set()
        for secret in secrets:
            self.hide(secret)

    def hide(self, secret: str) -> None:
        """Never write this value again. Values below 6 characters are ignored: they would hide half a log."""
        if len(secret) >= 6:
            self._known.update({secret, quote(secret, safe="")})

    def text(self, text: str) -> str:
        """Free text: a log line, an error message."""
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        for pattern, put in _LOOKS:
            text = pattern.sub(put, text)
        return _ASSIGNED.sub(_assignment, text)

    def argv(self, argv: Sequence[str]) -> list[str]:
        """A command line: `--api-key X`, `--api-key=X`, `NAME=X` and URLs are covered."""
        out: list[str] = []
        hide_next = False
        for word in argv:
            if hide_next and not word.startswith("--"):
                out.append(HIDDEN)
                hide_next = False
                continue
            name, eq, _ = word.partition("=")
            hide_next = word.startswith("-") and not eq and secret_name(name.lstrip("-"))
            if eq and secret_name(name.lstrip("-")):
                out.append(f"{name}={HIDDEN}")
            else:
                out.append(self.url(word) if "://" in word else self.text(word))
        return out

    def url(self, url: str) -> str:
        """A URL without its password and without secret query values."""
        try:
            parts = urlsplit(url)
            query = parse_qsl(parts.query, keep_blank_values=True)
        except ValueError:
            return self.text(url)
        if not parts.scheme or not parts.netloc:
            return self.text(url)
        host = parts.netloc.rpartition("@")[2]
        netloc = f"{HIDDEN}@{host}" if "@" in parts.netloc else host
        pairs = [f"{k}={HIDDEN if secret_name(k) else self.text(v)}" for k, v in query]
        return urlunsplit((parts.scheme, netloc, self.text(parts.path), "&".join(pairs), ""))

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """HTTP headers."""
        return {k: HIDDEN if secret_name(k) else self.text(v) for k, v in headers.items()}

    def json(self, value: Any) -> Any:
        """A JSON value, keys kept."""
        if isinstance(value, Mapping):
            return {k: self._member(str(k), v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.json(v) for v in value]
        return self.text(value) if isinstance(value, str) else value

    def env(self, env: Mapping[str, str], allowed: Collection[str]) -> dict[str, str | None]:
        """An environment: every name, but values only of allowed names that do not sound secret."""
        return {
            name: self.text(value) if name in allowed and not secret_name(name) else None
            for name, value in sorted(env.items())
        }

    def _member(self, key: str, value: Any) -> Any:
        if secret_name(key) and isinstance(value, (str, list, tuple)) and value:
            return HIDDEN
        return self.json(value)


def _assignment(match: re.Match[str]) -> str:
    if not secret_name(match["name"]) or HIDDEN.startswith(match["value"]):
        return match[0]
    value = match["value"].lower()
    if value in {"bearer", "basic", "none", "null", "true", "false"} or (
        len(value) < 6 and value.isdecimal()
    ):
        return match[0]  # a scheme whose credential is scrubbed by its look, no value, or a token's number
    return f"{match['name']}{match['mid']}{HIDDEN}"


REDACTOR = Redactor()
"""The process's own."""


def secret_values(env: Mapping[str, str]) -> list[str]:
    """Values of the variables whose names say that they hold a secret."""
    return [value for name, value in env.items() if secret_name(name)]
