"""Which flags and variables a version of an engine knows, read from its source without importing it."""
