"""Variables that a package reads: every literal name it looks up in its environment."""

import re
from collections.abc import Iterable

from campaign.engines.flags.source import Source

_LOOKED_UP = re.compile(
    r"""(?:environ(?:\.get|\.setdefault|\.pop)?\s*[\[(]\s*|getenv\s*\(\s*|get_bool_env_var\s*\(\s*|get_int_env_var\s*\(\s*"""
    r"""|env_\w+\s*\(\s*)f?["']([A-Z][A-Z0-9_]+)["']|["']([A-Z][A-Z0-9_]+)["']\s*(?:not\s+)?in\s+os\.environ"""
)


def read_by(source: Source, paths: Iterable[str]) -> frozenset[str]:
    """Names looked up in the files; text only, so that a file no parser takes costs nothing."""
    found: set[str] = set()
    for path in paths:
        text = source.read(path)
        if "env" in text:
            found.update(a or b for a, b in _LOOKED_UP.findall(text))
    return frozenset(found)
