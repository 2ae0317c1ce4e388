"""Shipped fakes and conformance suites."""
