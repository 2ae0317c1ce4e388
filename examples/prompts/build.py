"""Rebuild the long prompts of the examples: `python examples/prompts/build.py`. Original text, seeded, no data set.

Two domains of 13 prompts (12 slots and one for warm-up), 9,000 to 11,000 tokens each with common tokenizers
(about 4 characters a token; the exact count is the server's `prompt_tokens`).
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
PROMPTS = 13
CHARACTERS = 38_000
VERBS = [
    "list",
    "create",
    "update",
    "delete",
    "archive",
    "restore",
    "export",
    "import",
    "merge",
    "split",
    "assign",
    "close",
    "open",
    "approve",
    "reject",
]
NOUNS = [
    "invoice",
    "order",
    "shipment",
    "customer",
    "ticket",
    "contract",
    "sensor",
    "recipe",
    "route",
    "booking",
    "claim",
    "asset",
    "job",
    "user",
    "report",
]
KINDS = {"string": '"text"', "integer": "17", "number": "2.5", "boolean": "true"}


def catalogue(rng: random.Random) -> str:
    """Tools as JSON, and a request that needs some of them."""
    tools, size, n = [], 0, 0
    while size < CHARACTERS:
        verb, noun, n = rng.choice(VERBS), rng.choice(NOUNS), n + 1
        fields = {
            f"{rng.choice(NOUNS)}_{rng.choice(('id', 'name', 'limit', 'total', 'date'))}_{i}": {
                "type": rng.choice(list(KINDS)),
                "description": f"The {rng.choice(NOUNS)} that the {noun} belongs to, if it has one.",
            }
            for i in range(rng.randint(2, 5))
        }
        tool = {
            "name": f"{verb}_{noun}_{n}",
            "description": f"Use it to {verb} one {noun}.",
            "parameters": fields,
        }
        tools.append(tool)
        size += len(json.dumps(tool))
    wanted = ", ".join(rng.choice(tools)["name"] for _ in range(6))
    return (
        f"These are the tools you have:\n{json.dumps(tools)}\n\nPlan how to use {wanted} together for one customer. "
        "For each step write the call as JSON, with every parameter, and one sentence that says why."
    )


def code(rng: random.Random) -> str:
    """Small functions, and a request to review them."""
    parts, size, n = [], 0, 0
    while size < CHARACTERS:
        n += 1
        noun, other = rng.choice(NOUNS), rng.choice(NOUNS)
        text = (
            f"def {rng.choice(VERBS)}_{noun}_{n}({noun}s, {other}_limit={rng.randint(1, 99)}):\n"
            f'    """Keep each {noun} whose {other} is below the limit."""\n'
            f"    kept = []\n    for position, {noun} in enumerate({noun}s):\n"
            f"        if {noun}.{other}_count * {rng.randint(2, 9)} < {other}_limit + position:\n"
            f"            kept.append(({noun}.name, {noun}.{other}_count - {rng.randint(1, 5)}))\n"
            f"    return sorted(kept, key=lambda pair: (pair[1], pair[0]))[: {rng.randint(3, 40)}]\n\n\n"
        )
        parts.append(text)
        size += len(text)
    return (
        f"Here is a Python module:\n\n{''.join(parts)}\nRewrite the last eight functions as one class with type hints, "
        "then write tests for it. Show all of the code."
    )


def main() -> None:
    """Write both files."""
    for name, make in (("tool-catalogue-10k", catalogue), ("code-10k", code)):
        rng = random.Random(f"{name} 1")  # noqa: S311  # text, not secrets
        lines = [json.dumps({"prompt": make(rng)}) for _ in range(PROMPTS)]
        (HERE / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
