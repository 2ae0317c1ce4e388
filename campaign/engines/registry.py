"""Engines by the name that an arm gives."""

from campaign.engines.base import Engine
from campaign.errors import PreflightError

NAMES = ("llamacpp", "sglang", "vllm", "command", "api")
"""Engines of this version."""


def get(name: str) -> Engine:
    """The adapter of an engine. Raises PreflightError for one that this version does not have."""
    if name == "llamacpp":
        from campaign.engines.llamacpp import LlamaCpp

        return LlamaCpp()
    if name == "sglang":
        from campaign.engines.sglang import SGLang

        return SGLang()
    if name == "vllm":
        from campaign.engines.vllm import VLLM

        return VLLM()
    if name == "command":
        from campaign.engines.command import CommandServer

        return CommandServer()
    if name == "api":
        from campaign.engines.api import Api

        return Api()
    raise PreflightError(
        f"engine = {name}: its adapter is not in this version of campaign. Fix: use one of {', '.join(NAMES)}"
    )
