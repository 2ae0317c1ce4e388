"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engine", "a server that already runs")
    group.addoption("--engine-url", help="Check an adapter against this server, e.g. http://127.0.0.1:30000.")
    group.addoption("--engine", default="sglang", help="Its adapter: sglang, vllm, llamacpp.")
    group.addoption("--engine-model", help="Name of its model; the first it lists if left out.")
    group.addoption("--engine-key-env", help="Variable that holds its key.")
    group.addoption("--engine-depth", type=int, default=0, help="Speculative depth it was started with.")
