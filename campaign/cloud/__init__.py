"""The Provider contract and its implementations."""
