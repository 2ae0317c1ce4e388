"""Published files as a run folder that `report`, `verify` and `cells` read like any other.

One session per file, one group per cell name, one boot per arm, every two arms that share a cell compared, the
earlier one `a`. Rows follow docs/CONTRACTS.md; what the file does not say is None. Stamps are order only: the
files hold no times of day. The published statistics are kept beside the rows, in `published/SESSION.json`, with
their hash in the ledger.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from campaign import __version__
from campaign.clock import SystemClock
from campaign.errors import UserError
from campaign.interop.published import PublishedArm, PublishedFile, PublishedRow
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.money import MicroUsd, micro
from campaign.plan import codec
from campaign.plan.model import (
    ArmPlan,
    BootPlan,
    CampaignPlan,
    Comparison,
    GroupPlan,
    RequestPlan,
    RoundPlan,
    SessionPlan,
)
from campaign.spec.load import Loaded, load_bytes
from campaign.spec.models import Arm, Spec, Speculation
from campaign.spec.resolve import arm_hash
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir
from campaign.store.row import RequestRow

FOLDER = "published"
MARGIN = 0.02
PLAIN = ("none", "")
"""Methods that draft nothing."""


def write(files: Sequence[PublishedFile], into: Path) -> RunDir:
    """Write the run folder `into`, which must not exist or be empty. Raises UserError."""
    stems = [f.session for f in files]
    twice = next((s for s in stems if stems.count(s) > 1), None)
    if twice is not None:
        raise UserError(
            f"two files are called {twice}: a session is named by its file. Fix: rename one, or import it into another folder"
        )
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise UserError(f"--into {into}: something is there already. Fix: give a new folder")
    plan = _plan(files, into.name)
    loaded = load_bytes(_spec_text(files).encode(), "imported.yaml")
    run_dir, clock = RunDir(into.resolve()), SystemClock()
    with Ledger.open(run_dir, clock, create=True) as ledger:
        _fill(run_dir, ledger, files, plan, loaded)
    return run_dir


def _fill(
    run_dir: RunDir, ledger: Ledger, files: Sequence[PublishedFile], plan: CampaignPlan, loaded: Loaded
) -> None:
    spec: Spec = loaded.spec
    run_dir.spec.write_text(loaded.source, encoding="utf-8")
    run_dir.canonical.write_bytes(loaded.canonical)
    run_dir.plan.write_bytes(codec.dump(plan))

    def say(type_: str, session: str | None = None, **payload: Any) -> None:
        ledger.append(NewEvent(type_, payload, session))

    say(
        "run_created",
        run=run_dir.name,
        campaign=plan.campaign,
        spec_sha256=loaded.source_sha256,
        canonical_sha256=loaded.canonical_sha256,
        plan_sha256=codec.plan_hash(plan),
        cap_usd_micro=plan.cap_usd,
        gates=spec.gates.model_dump(mode="json"),
        rules={"anchor": spec.anchor.model_dump(mode="json")},
        version=__version__,
        install_id="0" * 12,
        simulated=False,
        imported=[{"file": f.name, "sha256": f.sha256, "campaign": f.campaign} for f in files],
    )
    store = FolderStore(run_dir)
    for nth, (file, session) in enumerate(zip(files, plan.sessions, strict=True)):
        kept = store.put_json(FOLDER, file.session, _published(file))
        for group in session.groups:
            for round_ in group.rounds:
                arm = next(a for a in file.arms if a.tag == round_.boots[0].arm)
                rows = _rows(file, session, group, round_, arm, run_dir.name, plan.campaign, nth)
                writer = store.open_cell(session.name, rows[0].cell, 0)
                for row in rows:
                    writer.begin({"phase": row.phase, "slot": row.slot, "seed": row.seed, "attempt": 0})
                    writer.finish(row)
                sealed = [asdict(f) for f in writer.seal()] + [asdict(kept)]
                cells = [{"cell": rows[0].cell, "attempt": 0, "files": sealed}]
                say("round_started", session.name, round_id=round_.id, attempt=0)
                say("round_committed", session.name, round_id=round_.id, attempt=0, cells=cells)
    say("run_finished", exit_code=0, reason="imported")


def _published(file: PublishedFile) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "file": file.name,
        "sha256": file.sha256,
        "campaign": file.campaign,
        "engine": file.engine,
        "extra": dict(file.extra),
        "marks": list(file.marks),
        "arms": {
            a.tag: {
                "settings": dict(a.settings),
                "command": a.command,
                "error": a.error,
                "cells": {
                    c.name: {
                        "stats": dict(c.stats),
                        "row_tau": {str(r.slot): r.tau for r in c.rows},
                        "tok_s": {str(r.slot): r.tok_s for r in c.rows},
                    }
                    for c in a.cells
                },
            }
            for a in file.arms
        },
    }


# --- the plan


def _plan(files: Sequence[PublishedFile], name: str) -> CampaignPlan:
    marks = [m for f in files for m in f.marks]
    return CampaignPlan(
        campaign=f"imported-{name}",
        cap_usd=MicroUsd(sum(_dollars(f.extra.get("hard_cap_usd")) for f in files)),
        sessions=tuple(_session(f) for f in files),
        admitted=tuple(f.session for f in files),
        power=(),
        warnings=tuple(marks),
        cut=(),
        assumptions=(
            "Imported: rows were measured by others; stamps are order only, windows come from printed rates.",
        ),
    )


def _dollars(value: object) -> int:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
    return micro(Decimal(str(value))) if known else 0


def _session(file: PublishedFile) -> SessionPlan:
    arms = {a.tag: _arm_plan(file, a) for a in file.arms if any(c.rows for c in a.cells)}
    names = dict.fromkeys(c.name for a in file.arms for c in a.cells if c.rows)
    groups, comparisons = [], []
    for cell in names:
        sharing = [a.tag for a in file.arms if any(c.name == cell and c.rows for c in a.cells)]
        groups.append(_group(file, cell, sharing))
        comparisons += [
            Comparison(f"{cell}:{a}|{b}", "pair", cell, f"cell.{cell}", a, b, cell, 1, "step_ms", MARGIN)
            for i, a in enumerate(sharing)
            for b in sharing[i + 1 :]
        ]
    zero = MicroUsd(0)
    return SessionPlan(
        name=file.session,
        node="published",
        priority=1,
        arms=arms,
        groups=tuple(groups),
        comparisons=tuple(comparisons),
        boots=len(arms),
        requests=sum(len(r.sequence) for g in groups for r in g.rounds),
        seconds=0.0,
        usd_per_hour=MicroUsd(_dollars(file.extra.get("hourly_usd"))),
        price_source="declared",
        usd_expected=zero,
        usd_worst=zero,
        worst_seconds=0.0,
    )


def _group(file: PublishedFile, cell: str, sharing: Sequence[str]) -> GroupPlan:
    rounds = []
    for i, tag in enumerate(sharing):
        arm = next(a for a in file.arms if a.tag == tag)
        rows = next(c for c in arm.cells if c.name == cell).rows
        rounds.append(
            RoundPlan(
                id=f"cell.{cell}/r{i}",
                index=i,
                boots=(BootPlan(tag, 0, "p0", ()),),
                warmup=(),
                sequence=tuple(RequestPlan(tag, r.slot, r.slot, n, 0) for n, r in enumerate(rows)),
            )
        )
    return GroupPlan(
        name=f"cell.{cell}",
        kind="pair",
        design="bracketed",
        why="published: one boot an arm, one arm after another, no anchors",
        arms=tuple(sharing),
        workload=cell,
        concurrency=1,
        rounds=tuple(rounds),
        seconds=0.0,
        usd_expected=MicroUsd(0),
    )


def flags(command: str) -> dict[str, str]:
    """`--name value` and `--name=value` of a recorded command; a flag without a value is empty text.

    A recorded command is text of somebody else: it is read, never run.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    # A recorded command may hold JSON without quotes: its braces are put together again.
    found: dict[str, str] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found[name] = value
        elif name is not None:
            found[name] = f"{found[name]} {word}".strip()
    return found


def drafting(arm: PublishedArm, engine: str) -> tuple[str, int, str] | None:
    """(method, depth, draft model) as settings or command say; None without speculation."""
    method, depth = str(arm.settings.get("method") or ""), arm.settings.get("k")
    given = flags(arm.command)
    if engine == "sglang":
        method = given.get("speculative-algorithm", "").lower()
        tokens = given.get("speculative-num-draft-tokens", "")
        steps = given.get("speculative-num-steps", "")
        depth = int(tokens) - 1 if tokens.isdigit() else int(steps) if steps.isdigit() else None
    if method.lower() in PLAIN or isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        return None
    head = arm.settings.get("head") or given.get("speculative-draft-model-path") or ""
    return method, depth, str(head)


def _arm_plan(file: PublishedFile, arm: PublishedArm) -> ArmPlan:
    given = flags(arm.command)
    tp = arm.settings.get("tp") or _whole(given.get("tensor-parallel-size") or given.get("tp-size"))
    how = drafting(arm, file.engine)
    extra: tuple[str, ...] = (f"draft:{how[2]}",) if how is not None and how[2] else ()
    if file.engine == "api":
        extra = (f"model:{arm.settings.get('model')}", f"extra:{arm.settings.get('extra')}")
    config = Arm(
        engine=file.engine,
        kv_dtype=str(arm.settings.get("kv") or given.get("kv-cache-dtype") or "") or None,
        context=_whole(arm.settings.get("ml")) or _whole(given.get("max-model-len")),
        max_running_requests=_whole(given.get("max-running-requests")),
        tp=tp if isinstance(tp, int) and not isinstance(tp, bool) and tp > 0 else None,
        speculation=Speculation(method=how[0], depth=how[1]) if how else None,
        extra_args=extra,
    )
    return ArmPlan(arm.tag, arm_hash(config, {}), config)


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value > 0 else None
    return int(value) if isinstance(value, str) and value.isdigit() and int(value) > 0 else None


def _spec_text(files: Sequence[PublishedFile]) -> str:
    """The smallest file that says what an import is: the folder's rules, not a thing that could be run."""
    slug = re.sub(r"[^a-z0-9_-]", "-", files[0].session.lower())[:40]
    name = slug if slug[:1].isalpha() else f"x{slug}"
    return (
        f"version: 1\ncampaign: {name}\nbudget: {{cap_usd: 1}}\n"
        "nodes: {published: {provider: local, usd_per_hour: 0, max_hours: 1}}\n"
        "arms: {published: {engine: command}, again: {from: published, context: 4096}}\n"
        "workloads: {published: {pack: health, n: 3, max_tokens: 1}}\n"
        "anchor: {arm: published, workload: published, drift_delta: 0.01}\n"
        "pairs: {published: {a: published, b: again, workload: published}}\n"
        "sessions: {published: {node: published, pairs: [published]}}\n"
    )


# --- rows


def _rows(
    file: PublishedFile,
    session: SessionPlan,
    group: GroupPlan,
    round_: RoundPlan,
    arm: PublishedArm,
    run: str,
    campaign: str,
    nth: int,
) -> list[RequestRow]:
    cell = next(c for c in arm.cells if f"cell.{c.name}" == group.name)
    how = drafting(arm, file.engine)
    plan = session.arms[arm.tag]
    base = RequestRow(
        run=run,
        campaign=campaign,
        session=session.name,
        lease=f"{session.name}-published",
        node="unknown",
        gpu_set="unknown",
        boot_id=f"{session.name}/{round_.id}/{arm.tag}@0",
        boot_index=0,
        boot_attempt=0,
        arm=arm.tag,
        arm_hash=plan.hash,
        group=group.name,
        cell=f"{group.name}/{arm.tag}/{cell.name}/c1/b0",
        phase="measure",
        workload=cell.name,
        concurrency=1,
        block="s0",
        round=round_.index,
        order=0,
        half="p0",
        slot=0,
        seed=0,
        attempt=0,
        sent_ns=0,
        sent_utc_ns=0,
        state="ok",
    )
    first = (nth * 1_000 + session.groups.index(group)) * 1_000_000 + round_.index * 1_000
    return [
        replace(
            base,
            block=f"s{r.slot}",
            order=i,
            slot=r.slot,
            seed=r.slot,
            sent_ns=first + i,
            sent_utc_ns=first + i,
            **_measured(r, how, file.engine),
        )
        for i, r in enumerate(cell.rows)
    ]


def _measured(row: PublishedRow, how: tuple[str, int, str] | None, engine: str) -> Mapping[str, Any]:
    """The columns that a published row fills. DESIGN's definitions, not the published ones."""
    tokens = None if row.completion_tokens is None else row.completion_tokens - 1
    reasons = ["first_chunk_assumed_one"]
    found: dict[str, Any] = {
        "ttft_ms": row.ttft_ms,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "cached_tokens": row.cached_tokens,
        "first_chunk_tokens": 1,
        "rate_definition": "all-but-one",
    }
    if tokens is None or row.window_ms is None or tokens < 1 or row.window_ms <= 0:
        return found | {"state": "incomplete", "validity": "void", "reasons": (*reasons, "absent")}
    reasons.append("window_from_rate" if engine != "api" else "window_rounded")
    steps = undrafted = drafts = None
    if row.drafts is not None:
        drafts = row.drafts
        left = tokens - (row.accepted or 0) - row.drafts
        undrafted = max(0, left)
        if left < 0:
            # The last draft reached beyond the last token that was asked for.
            reasons.append("draft_overshoot")
        steps = drafts + undrafted
    elif row.verify_calls is not None:
        steps = drafts = row.verify_calls
        undrafted = 0
        reasons.append("drafted_not_counted")
    elif how is None and engine != "api":
        steps = tokens
    else:
        reasons.append("absent")
    found |= {
        "window_ms": row.window_ms,
        "tokens_in_window": tokens,
        "decode_tok_s": row.tok_s if engine != "api" else 1000 * tokens / row.window_ms,
        "tpot_ms": row.window_ms / tokens,
        "steps": steps or None,
        "drafts": drafts,
        "undrafted": undrafted,
        "drafted": row.drafted,
        "accepted": row.accepted,
        "accept_pos": row.accept_pos,
        "counter_source": "published" if drafts is not None else "none",
    }
    if steps:
        found |= {"accept_len": tokens / steps, "step_ms": row.window_ms / steps}
    return found | {"reasons": tuple(reasons)}
