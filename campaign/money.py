"""Money: integers of micro-dollars (1 USD = 1,000,000), never binary floats.

Dollars enter as `Decimal` from the spec, are multiplied by durations in nanoseconds, and are always
rounded up, so that a bill is never understated.
"""

from decimal import ROUND_CEILING, Decimal
from typing import NewType

MicroUsd = NewType("MicroUsd", int)
NOTHING = MicroUsd(0)

NS_PER_HOUR = 3_600_000_000_000


def micro(usd: Decimal | int | str) -> MicroUsd:
    """Micro-dollars of an amount in dollars, rounded up. Raises ValueError unless finite."""
    amount = Decimal(usd)
    if not amount.is_finite():
        raise ValueError(f"not an amount of money: {usd}")
    return MicroUsd(int((amount * 1_000_000).to_integral_value(ROUND_CEILING)))


def usd(amount: int) -> float:
    """Dollars as a number with six decimals, for JSON."""
    return round(amount / 1_000_000, 6)


def bill(usd_per_hour: MicroUsd, duration_ns: int, granularity_s: int = 1) -> MicroUsd:
    """Cost of `duration_ns` at a price per hour, billed by whole `granularity_s` seconds, rounded up."""
    if duration_ns <= 0:
        return MicroUsd(0)
    step = granularity_s * 1_000_000_000
    billed = -(-duration_ns // step) * step
    return MicroUsd(-(-usd_per_hour * billed // NS_PER_HOUR))
