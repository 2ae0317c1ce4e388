"""The append-only journal of a run in SQLite, hash-chained, folded to state."""
