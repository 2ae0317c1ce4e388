"""Looks at the clouds a file could use, and launches nothing."""

from typing import Any

from campaign.cloud import deadmen, sky_sdk
from campaign.cloud.sky_calls import candidates_of
from campaign.errors import CampaignError
from campaign.fleet.supervisor import too_few_dead_men
from campaign.money import micro
from campaign.spec.models import SkyNode, Spec


def examine(spec: Spec) -> dict[str, Any]:
    """The shape of `campaign doctor --json`."""
    nodes: list[dict[str, Any]] = []
    ok = True
    for name, node in spec.nodes.items():
        if not isinstance(node, SkyNode):
            note = "a node you have: never taken down, no dead-man"
            nodes.append({"node": name, "provider": node.provider, "note": note, "candidates": []})
            continue
        try:
            found = [_candidate(node, r) for r in candidates_of(node)]
            note = "" if found else "nothing that is enabled offers it"
        except CampaignError as error:
            found, note = [], str(error)
        ok = ok and any(c["fits"] for c in found)
        nodes.append({"node": name, "provider": "sky", "note": note, "candidates": found})
    return {
        "nodes": nodes,
        "ok": ok,
        "skypilot": sky_sdk.version() if any(n["provider"] == "sky" for n in nodes) else None,
    }


def _candidate(node: SkyNode, found: tuple[str, str, float | None]) -> dict[str, Any]:
    what, cloud, price = found
    row = deadmen.row(cloud)
    why = []
    if price is None or price <= 0:
        why.append("no price")
    elif micro(str(price)) > micro(node.max_usd_per_hour):
        why.append(f"dearer than max_usd_per_hour {node.max_usd_per_hour}")
    missing = too_few_dead_men(row.effective(), ours=True)
    if missing is not None:
        why.append(missing)
    return {
        "what": what,
        "cloud": cloud,
        "usd_per_hour": price,
        "fits": not why,
        "why": "; ".join(why),
        "quota": "not known to SkyPilot; a launch tells",
        "dead_men": list(row.effective()),
        "credential": row.credential,
        "sources": {
            deadmen.AUTODOWN: f"{row.autodown} {row.autodown_source}",
            deadmen.NODE_TIMER: f"{row.shutdown} by `{row.how}` {row.shutdown_source}",
            deadmen.TIME_LIMIT: "the scheduler's own time limit" if row.time_limit else "none on this cloud",
        },
    }
