"""The Engine contract, its implementations, and the host that owns server processes."""
