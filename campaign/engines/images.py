"""Container images by digest: a tag is resolved once, when a campaign is planned, by the registry's own API.

Anonymous, over HTTPS (plain HTTP for a registry on this machine): `GET /v2/NAME/manifests/TAG` of the OCI
distribution specification, with the token that the registry asks for. What is hashed is what came: a digest that the
registry only claims is not believed.
"""

import hashlib
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from campaign.errors import SpecError
from campaign.spec.load import Loaded, canonical_json, parse_canonical
from campaign.spec.load import load as load_spec

_HUB = "registry-1.docker.io"
_TYPES = (
    "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json",
)  # fmt: skip
_TIMEOUT_S = 15.0
_LIMIT = 4 * 1024 * 1024
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


class Unresolved(Exception):
    """The registry does not say which digest a tag has; the text says why."""


@dataclass(frozen=True, slots=True)
class Reference:
    """`[HOST[:PORT]/]NAME[:TAG]`, as container tools read it."""

    host: str
    name: str
    tag: str

    @classmethod
    def parse(cls, image: str) -> "Reference":
        """Read a reference without a digest."""
        first, slash, rest = image.partition("/")
        if slash and ("." in first or ":" in first or first == "localhost"):
            host, path = first, rest
        else:
            host, path = _HUB, image
        if host == "docker.io":
            host = _HUB
        name, colon, tag = path.rpartition(":")
        if not colon:
            name, tag = path, "latest"
        if host == _HUB and "/" not in name:
            name = f"library/{name}"
        return cls(host, name, tag)

    @property
    def url(self) -> str:
        """Address of its manifest."""
        local = self.host.rpartition(":")[0] in {"127.0.0.1", "localhost"} or self.host == "localhost"
        return f"{'http' if local else 'https'}://{self.host}/v2/{self.name}/manifests/{self.tag}"


def resolve(image: str) -> str:
    """`NAME:TAG@sha256:...` of a tagged image; one that has a digest is given back. Raises Unresolved."""
    if DIGEST.search(image):
        return image
    reference = Reference.parse(image)
    try:
        status, headers, body = _get(reference.url, {"Accept": ", ".join(_TYPES)})
        if status == 401:
            token = _token(headers.get("www-authenticate", ""))
            status, headers, body = _get(
                reference.url, {"Accept": ", ".join(_TYPES), "Authorization": f"Bearer {token}"}
            )
    except (OSError, ValueError) as error:
        raise Unresolved(f"{reference.host}: {error}") from None
    if status != 200:
        raise Unresolved(f"{reference.host} answers {status} for {reference.name}:{reference.tag}")
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    said = headers.get("docker-content-digest", digest)
    if said != digest:
        raise Unresolved(f"{reference.host} says {said}, and what it sent is {digest}")
    return f"{image}@{digest}"


def pinned(loaded: Loaded, ask: Callable[[str], str] = resolve) -> Loaded:
    """The spec with every image of a runtime by digest. Raises SpecError at the line of one that cannot be resolved."""
    problems, runtimes = [], dict(loaded.spec.runtimes)
    for name, runtime in loaded.spec.runtimes.items():
        if runtime.image is None or DIGEST.search(runtime.image):
            continue
        try:
            runtimes[name] = runtime.model_copy(update={"image": ask(runtime.image)})
        except Unresolved as error:
            fix = "write NAME@sha256:64_HEX_DIGITS, or make the registry reachable"
            problems.append(
                loaded.problem(
                    ("runtimes", name, "image"), runtime.image, f"the tag has no digest: {error}", fix
                )
            )
    if problems:
        raise SpecError(tuple(problems))
    if runtimes == dict(loaded.spec.runtimes):
        return loaded
    canonical = canonical_json(loaded.spec.model_copy(update={"runtimes": runtimes}))
    return replace(
        loaded,
        spec=parse_canonical(canonical),
        canonical=canonical,
        canonical_sha256=hashlib.sha256(canonical).hexdigest(),
    )


def load(path: Path, sets: Sequence[str] = ()) -> Loaded:
    """`campaign.spec.load.load` with images pinned. Raises SpecError."""
    return pinned(load_spec(path, sets))


def _token(challenge: str) -> str:
    """An anonymous token, as the registry's challenge says. Raises ValueError or OSError."""
    fields = dict(_CHALLENGE.findall(challenge))
    if not challenge.lower().startswith("bearer ") or "realm" not in fields:
        raise ValueError("asks for a login; only anonymous access is tried")
    query = urllib.parse.urlencode({k: v for k, v in fields.items() if k in {"service", "scope"}})
    status, _, body = _get(f"{fields['realm']}?{query}", {})
    if status != 200:
        raise ValueError(f"its token service answers {status}")
    answer = json.loads(body)
    token = answer.get("token") or answer.get("access_token") if isinstance(answer, dict) else None
    if not isinstance(token, str):
        raise ValueError("its token service gives no token")
    return token


def _get(url: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise ValueError(f"{url}: not an address")
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  # http(s), checked above
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # likewise
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read(_LIMIT)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read(_LIMIT)
