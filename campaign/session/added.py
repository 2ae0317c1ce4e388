"""What is added to a session that is held: a plan of its own, its spec and its prompts, in one JSON document.

It runs on the same node, inside the same lease, between anchors of its own, and is exploratory: nothing of it was
registered before the run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from campaign.errors import StoreError
from campaign.money import MicroUsd
from campaign.plan import codec
from campaign.plan.model import CampaignPlan, SessionPlan
from campaign.spec.load import canonical_json, parse_canonical
from campaign.spec.models import Spec
from campaign.workloads.packs import Prompt, Prompts

MARGIN_S = 60.0
"""A hold ends so long before the lease does."""


@dataclass(frozen=True, slots=True)
class Added:
    """One addition, as the agent is given it."""

    plan: SessionPlan
    spec: Spec
    prompts: Mapping[str, Prompts]

    def named(self, name: str, node: str) -> "Added":
        """The same under the name the ledger gives it, on the node that is held."""
        return replace(self, plan=replace(self.plan, name=name, node=node, exploratory=True, hold_s=0.0))

    def dump(self) -> bytes:
        """One JSON document."""
        wrapped = CampaignPlan(
            campaign=self.spec.campaign, cap_usd=MicroUsd(0), sessions=(self.plan,), admitted=(), power=(),
            warnings=(), cut=(),
        )  # fmt: skip
        document = {
            "plan": codec.dump(wrapped).decode(),
            "spec": canonical_json(self.spec).decode(),
            "prompts": {name: asdict(pack) for name, pack in self.prompts.items()},
        }
        return json.dumps(document, sort_keys=True, ensure_ascii=False).encode()


def load(data: bytes) -> Added:
    """What `dump` wrote. Raises StoreError."""
    try:
        document: dict[str, Any] = json.loads(data)
        (plan,) = codec.load(document["plan"].encode()).sessions
        prompts = {name: prompts_of(pack) for name, pack in document["prompts"].items()}
        return Added(plan, parse_canonical(document["spec"].encode()), prompts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"an addition that cannot be read: {error!r}") from error


def prompts_of(data: Mapping[str, Any]) -> Prompts:
    """Prompts as they were rendered."""
    spare = data["warmup"]
    return Prompts(
        sha256=data["sha256"],
        items=tuple(_prompt(item) for item in data["items"]),
        warmup=None if spare is None else _prompt(spare),
    )


def _prompt(data: Mapping[str, Any]) -> Prompt:
    messages = data["messages"]
    return Prompt(data["slot"], None if messages is None else tuple(messages), data["text"], data["sha256"])
