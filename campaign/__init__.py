"""Budgeted, paired LLM-serving experiments, with verdicts that re-derive from raw rows."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from campaign.store.run import Run, open_run

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "open_run"]


def __getattr__(name: str) -> Any:
    # pyarrow costs 0.3 s: `campaign --help` must not pay for it.
    if name in {"Run", "open_run"}:
        from campaign.store import run

        return getattr(run, name)
    raise AttributeError(f"module 'campaign' has no attribute {name!r}")
