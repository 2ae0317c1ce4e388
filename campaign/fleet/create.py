"""Makes a run: its folder, what was asked, what was planned, and the first ledger entry.

The spec's hash, the gates and the decision rules are written down before the first request: what decides
is fixed before anything is known.
"""

import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from campaign import __version__
from campaign.budget.rules import registration
from campaign.clock import Clock, iso
from campaign.errors import StoreError
from campaign.ledger.events import NewEvent
from campaign.plan import codec
from campaign.plan.model import CampaignPlan
from campaign.session.added import prompts_of
from campaign.spec.load import Loaded
from campaign.store import ballast
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir
from campaign.workloads.packs import Prompts


def state_folder() -> Path:
    """Where this installation keeps what is of no single run."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "campaign"


def install_id() -> str:
    """This installation's name on everything it launches; made once, kept in the user's state folder."""
    base = state_folder()
    path = base / "install-id"
    try:
        text = path.read_text(encoding="ascii").strip()
        if re.fullmatch(r"[0-9a-f]{12}", text):
            return text
    except OSError:
        pass
    fresh = uuid.uuid4().hex[:12]
    try:
        base.mkdir(parents=True, exist_ok=True)
        path.write_text(fresh + "\n", encoding="ascii")
    except OSError:
        # A read-only home: this run has a name of its own, and later ones too.
        return fresh
    return fresh


def registered_id(created: Mapping[str, Any] | None) -> str | None:
    """The installation that made a run, by its `run_created`; None where that is not said.

    Names of its nodes carry this id, also where the run is resumed or reconciled from another account or machine.
    """
    found = (created or {}).get("install_id")
    return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{12}", found) else None


def create_run(
    loaded: Loaded,
    plan: CampaignPlan,
    prompts: Mapping[str, Prompts],
    results: Path,
    clock: Clock,
    only: str | None = None,
) -> tuple[RunDir, NewEvent]:
    """Write the folder of a new run; returns it with the event to open its ledger with. Raises StoreError.

    only: the pair or ladder the plan was cut down to.
    """
    stamp = iso(clock.utc_ns())[:19].replace("-", "").replace(":", "").replace("T", "-")
    try:
        root = _fresh_folder(results, f"{loaded.spec.campaign}-{stamp}")
        run_dir = RunDir(root)
        run_dir.spec.write_text(loaded.source, encoding="utf-8")
        run_dir.canonical.write_bytes(loaded.canonical)
        run_dir.plan.write_bytes(codec.dump(plan))
        for folder in (run_dir.logs, run_dir.telemetry, run_dir.cell_journals, run_dir.chunks, run_dir.text):
            folder.mkdir(parents=True, exist_ok=True)
        ballast.take(run_dir)
        store = FolderStore(run_dir)
        pinned = {
            name: store.put_json("workloads", name, asdict(pack)).sha256 for name, pack in prompts.items()
        }
    except OSError as error:
        raise StoreError(
            f"cannot write under {results}: {error.strerror}. Fix: give `store:` a folder you can write"
        ) from error
    payload = {**_registration(loaded, plan, run_dir.name), "workloads_sha256": pinned, "only": only}
    return run_dir, NewEvent(type="run_created", payload=payload)


def _fresh_folder(results: Path, name: str) -> Path:
    results.mkdir(parents=True, exist_ok=True)
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        folder = results / f"{name}{suffix}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder.resolve()
    raise StoreError(f"no free run name like {name} under {results}")


def _registration(loaded: Loaded, plan: CampaignPlan, run: str) -> dict[str, Any]:
    spec, registered = loaded.spec, registration(loaded.spec)
    return {
        "run": run,
        "campaign": spec.campaign,
        "spec_sha256": loaded.source_sha256,
        "canonical_sha256": loaded.canonical_sha256,
        "plan_sha256": codec.plan_hash(plan),
        "cap_usd_micro": plan.cap_usd,
        "gates": registered["gates"],
        "rules": registered["rules"],
        "rules_sha256": registered["rules_sha256"],
        "comparisons": [asdict(c) for s in plan.sessions for c in s.comparisons],
        "version": __version__,
        "install_id": install_id(),
        "simulated": False,
    }


def read_prompts(run_dir: RunDir) -> dict[str, Prompts]:
    """The prompts as they were rendered when the run was made."""
    found = {}
    for path in sorted((run_dir.root / "workloads").glob("*.json")):
        found[path.stem] = prompts_of(json.loads(path.read_text(encoding="utf-8")))
    return found
