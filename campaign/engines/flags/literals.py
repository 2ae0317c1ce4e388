"""Values of Python expressions that can be told from source alone."""

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any


class Unknown(Exception):
    """The expression depends on something that only a run would tell."""


Names = Mapping[str, ast.expr]
"""Module-level names and what they are assigned."""


_COPIES = frozenset({"list", "sorted", "tuple", "set", "frozenset"})


def assignments(tree: ast.Module) -> dict[str, ast.expr]:
    """Names assigned at the top level of a module (also under `if` and `try`)."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found.setdefault(node.target.id, node.value)
    return found


def value(node: ast.expr | None, names: Names, depth: int = 0) -> Any:
    """What an expression evaluates to. Raises Unknown."""
    if node is None or depth > 8:
        raise Unknown
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return value(names[node.id], names, depth + 1)
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [x for item in node.elts for x in _item(item, names, depth)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return value(node.left, names, depth + 1) + value(node.right, names, depth + 1)
    if isinstance(node, ast.Call) and len(node.args) == 1 and ast.unparse(node.func) in _COPIES:
        return list(value(node.args[0], names, depth + 1))
    raise Unknown


def _item(node: ast.expr, names: Names, depth: int) -> Iterator[Any]:
    if isinstance(node, ast.Starred):
        yield from value(node.value, names, depth + 1)
    else:
        yield value(node, names, depth + 1)


def literals(node: ast.expr, names: Names, depth: int = 0) -> list[str] | None:
    """Values of `Literal[...]` inside a type, aliases followed; None where it takes other values too."""
    found: list[str] | None = None
    if depth > 8:
        pass
    elif isinstance(node, ast.Name) and node.id in names:
        found = literals(names[node.id], names, depth + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a quoted annotation
        with suppress(SyntaxError):
            found = literals(ast.parse(node.value, mode="eval").body, names, depth + 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        found = _union([node.left, node.right], names, depth)
    elif isinstance(node, ast.Subscript):
        found = _subscript(node, names, depth)
    return found


def _subscript(node: ast.Subscript, names: Names, depth: int) -> list[str] | None:
    head = ast.unparse(node.value).rpartition(".")[2]
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if head == "Literal":
        return _literal(inner, names, depth)
    if head in {"Optional", "Union"}:
        return _union(inner, names, depth)
    return literals(inner[0], names, depth + 1) if head in {"Annotated", "A"} else None


def _literal(items: list[ast.expr], names: Names, depth: int) -> list[str] | None:
    out: list[str] = []
    for item in items:
        if isinstance(item, ast.Constant):
            out.append(str(item.value))
            continue
        below = literals(item, names, depth + 1)  # a Literal may hold aliases of others
        if below is None:
            return None
        out += below
    return out


def _union(items: list[ast.expr], names: Names, depth: int) -> list[str] | None:
    kinds = [i for i in items if not (isinstance(i, ast.Constant) and i.value is None)]
    found = [literals(kind, names, depth + 1) for kind in kinds]
    out: list[str] = []
    for values in found:
        if values is None:
            return None  # `Literal[...] | str` takes anything
        out += values
    return out or None


def keywords(call: ast.Call) -> dict[str, ast.expr]:
    """Keyword arguments of a call by name."""
    return {k.arg: k.value for k in call.keywords if k.arg is not None}
