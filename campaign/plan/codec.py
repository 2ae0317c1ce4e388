"""A plan as canonical JSON, and back."""

import hashlib
import json
from functools import cache

from pydantic import TypeAdapter

from campaign.plan.model import CampaignPlan


@cache
def _adapter() -> TypeAdapter[CampaignPlan]:
    return TypeAdapter(CampaignPlan)


def dump(plan: CampaignPlan) -> bytes:
    """Canonical JSON, UTF-8: sorted keys, no spaces; equal plans give equal bytes. Refuses NaN and infinity."""
    data = _adapter().dump_python(plan, mode="json", by_alias=True)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def load(data: bytes) -> CampaignPlan:
    """The plan that `dump` wrote. Raises ValueError where the bytes are no plan."""
    return _adapter().validate_json(data)


def plan_hash(plan: CampaignPlan) -> str:
    """SHA-256 of the canonical JSON: what the ledger holds a run to."""
    return hashlib.sha256(dump(plan)).hexdigest()
