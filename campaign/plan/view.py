"""The plan as JSON and as text."""

from typing import Any

from campaign.money import usd
from campaign.plan.model import CampaignPlan


def plan_json(plan: CampaignPlan) -> dict[str, Any]:
    """The contract of `campaign plan --json`."""
    return {
        "campaign": plan.campaign,
        "cap_usd": usd(plan.cap_usd),
        "usd_expected": usd(sum(s.usd_expected for s in plan.sessions)),
        "usd_worst": usd(sum(s.usd_worst for s in plan.sessions)),
        "minutes": round(sum(s.seconds for s in plan.sessions) / 60, 2),
        "admitted": list(plan.admitted),
        "sessions": [
            {
                "name": s.name,
                "node": s.node,
                "boots": s.boots,
                "requests": s.requests,
                "minutes": round(s.seconds / 60, 2),
                "usd_expected": usd(s.usd_expected),
                "usd_worst": usd(s.usd_worst),
            }
            for s in plan.sessions
        ],
        "power": [
            {
                "pair": p.pair,
                "metric": p.metric,
                "n": p.n,
                "boots": p.boots,
                "resolvable_pct": p.resolvable_pct,
                "rule_pct": p.rule_pct,
                "source": p.source,
            }
            for p in plan.power
        ],
        "warnings": list(plan.warnings),
    }
