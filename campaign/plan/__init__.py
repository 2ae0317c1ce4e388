"""Expansion, ordering, cost and power of a campaign. Pure."""
