"""Engines by the name that an arm gives."""

from campaign.engines.base import Engine
from campaign.errors import PreflightError

NAMES = ("llamacpp",)
"""Engines of this version."""


def get(name: str) -> Engine:
    """The adapter of an engine. Raises PreflightError for one that this version does not have."""
    if name == "llamacpp":
        from campaign.engines.llamacpp import LlamaCpp

        return LlamaCpp()
    raise PreflightError(
        f"engine = {name}: its adapter is not in this version of campaign. Fix: use one of {', '.join(NAMES)}"
    )
