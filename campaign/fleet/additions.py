"""`campaign add`: what another process asks the controller to run on a node that is held.

A request is a folder `added/ID/` of the run: the file as given, its canonical form, and `added.json`, what the agent
gets. It counts once `request.json` stands there; the controller answers with `answer.json`, once.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from campaign.errors import CampaignError
from campaign.ledger.model import RunState
from campaign.session import added
from campaign.session.added import Added
from campaign.store import atomic
from campaign.store.layout import RunDir, flat


@dataclass(frozen=True, slots=True)
class Request:
    """One addition that somebody asks for."""

    id: str
    what: Added
    file: str
    canonical_sha256: str
    session: str | None = None
    """The session to add to; None: the one that is held."""


class Inbox(Protocol):
    """Where requests come in."""

    def take(self) -> Sequence[Request]:
        """Requests that were not taken before."""
        ...

    def answer(self, id_: str, session: str | None, error: str | None) -> None:
        """The name it runs under, or why it does not."""
        ...


class FolderInbox:
    """Requests in the run folder."""

    def __init__(self, run_dir: RunDir) -> None:
        self._root = run_dir.root / "added"
        self._taken: set[str] = set()

    def take(self) -> Sequence[Request]:
        found = []
        for path in sorted(self._root.glob("*/request.json")):
            id_ = path.parent.name
            if id_ in self._taken or (path.parent / "answer.json").exists():
                continue
            self._taken.add(id_)
            try:
                said = json.loads(path.read_text(encoding="utf-8"))
                what = added.load((path.parent / "added.json").read_bytes())
                found.append(Request(id_, what, said["file"], said["canonical_sha256"], said["session"]))
            except (CampaignError, OSError, ValueError, KeyError, TypeError) as error:
                self.answer(id_, None, f"it cannot be read: {error}")
        return found

    def answer(self, id_: str, session: str | None, error: str | None) -> None:
        with suppress(CampaignError):
            document = json.dumps({"session": session, "error": error}).encode()
            atomic.write(self._root / flat(id_) / "answer.json", document)


def write(run_dir: RunDir, request: Request, source: str, canonical: bytes) -> None:
    """Ask. Raises StoreError."""
    folder = run_dir.root / "added" / flat(request.id)
    atomic.write(folder / "spec.yaml", source.encode())
    atomic.write(folder / "canonical.json", canonical)
    atomic.write(folder / "added.json", request.what.dump())
    said = {"file": request.file, "canonical_sha256": request.canonical_sha256, "session": request.session}
    atomic.write(folder / "request.json", json.dumps(said).encode())


def answered(run_dir: RunDir, id_: str) -> dict[str, Any] | None:
    """The controller's answer, if there is one."""
    try:
        found: dict[str, Any] = json.loads((run_dir.root / "added" / flat(id_) / "answer.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found


def held(state: RunState, now_utc_ns: int) -> list[str]:
    """Sessions whose nodes are kept for what is added."""
    return [s.name for s in state.sessions.values() if (s.held_until_utc_ns or 0) > now_utc_ns]


def refusal(state: RunState, request: Request, now_utc_ns: int) -> tuple[str | None, str | None]:
    """(the held session, None), or (None, why it cannot be added)."""
    there = held(state, now_utc_ns)
    name = request.session or (there[0] if len(there) == 1 else "?")
    if name not in there:
        return None, f"session {name} is not held; held are: {', '.join(there) or 'none'}"
    lease = state.leases.get(state.sessions[name].lease or "")
    if lease is None or lease.deadline_utc_ns is None:
        return None, f"session {name} has no lease"
    others = (s for s in state.sessions.values() if s.state == "running" and s.lease == lease.id)
    busy = next((s.name for s in others if s.name != name), None)
    # The set-up of the node is behind it; what is left must fit before the lease ends.
    needs_s = sum(g.seconds for g in request.what.plan.groups)
    left_s = max(0.0, (lease.deadline_utc_ns - now_utc_ns) / 1e9 - added.MARGIN_S)
    why = None
    if request.what.plan.tokens_usd:
        why = "tokens of a priced endpoint are not part of what was admitted"
    elif not request.what.plan.comparisons:
        why = "nothing is compared"
    elif busy is not None:
        why = f"{busy} is still running there"
    elif needs_s > left_s:
        why = f"it needs {needs_s:.0f} s and the lease has {left_s:.0f} s left: silence never extends"
    return (name, None) if why is None else (None, why)


def next_addition(session: str, state: RunState) -> str:
    """`SESSION.addN`, a name the ledger has never named."""
    numbers = (
        name.removeprefix(f"{session}.add") for name in state.sessions if name.startswith(f"{session}.add")
    )
    return f"{session}.add{1 + max((int(n) for n in numbers if n.isdigit()), default=0)}"
