"""Amounts and times in words, as the plan prints them."""


def dollars(micro_usd: int) -> str:
    """`$12.34`, `$0.0123`; two significant digits below a cent, so that nothing that costs reads as free."""
    amount = micro_usd / 1_000_000
    if micro_usd == 0:
        return "$0"
    if amount >= 0.995 or micro_usd % 10_000 == 0:
        return f"${amount:,.2f}"
    if amount >= 0.01:
        return f"${amount:.3f}"
    return f"${amount:.2g}" if amount >= 0.0001 else f"${amount:.6f}"


def span(seconds: float) -> str:
    """`40 s`, `5.2 min`, `3.1 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
