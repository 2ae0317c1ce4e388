"""Flags and variables of vLLM: `add_argument` calls whose kwargs come from fields of its config classes.

`group.add_argument("--x", "-y", **some_kwargs["field"])` takes type and choices from `field` of the class
that `some_kwargs = get_kwargs(Class)` names. The server's own flags are the fields of `FrontendArgs`.
"""

import ast
from collections.abc import Iterator, Mapping

from campaign.engines.flags.envs import read_by
from campaign.engines.flags.literals import Names, Unknown, assignments, keywords, literals, value
from campaign.engines.flags.source import Source
from campaign.engines.flags.table import Flag, Values

_ARGS = r"vllm/engine/arg_utils\.py$"
_FRONT = r"vllm/entrypoints/(openai|common)/cli_args\.py$"
_TYPES = (
    r"vllm/(config/\w+|model_executor/layers/quantization/__init__|model_executor/model_loader/__init__"
    r"|v1/attention/backends/registry)\.py$"
)
_ENVS = "vllm/envs.py"
Fields = Mapping[str, Mapping[str, ast.expr]]
"""Class -> field -> annotation."""


def extract(source: Source) -> tuple[dict[str, Flag], frozenset[str]]:
    """Flags and variables."""
    names: dict[str, ast.expr] = {}
    fields: dict[str, dict[str, ast.expr]] = {}
    trees = {p: ast.parse(source.read(p)) for k in (_TYPES, _ARGS, _FRONT) for p in source.matching(k)}
    for tree in trees.values():
        names |= {k: v for k, v in assignments(tree).items() if k not in names}
        for owner in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
            own = {
                f.target.id: f.annotation
                for f in owner.body
                if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
            }
            fields.setdefault(owner.name, own)
            if any("Enum" in ast.unparse(base) for base in owner.bases):
                names.setdefault(owner.name, _enum(owner))
    flags: dict[str, Flag] = {}
    for tree in trees.values():
        for name, flag in _calls(tree, names, fields):
            flags.setdefault(name, flag)
    for front in ("BaseFrontendArgs", "FrontendArgs"):
        for field, kind in fields.get(front, {}).items():
            for name, flag in _spellings([f"--{field.replace('_', '-')}"], kind, names):
                flags.setdefault(name, flag)
    # 0.33 annotates the field as text and checks it against this alias, which platform plugins may extend.
    if "CacheDType" in names and "--kv-cache-dtype" in flags and flags["--kv-cache-dtype"].choices is None:
        flags["--kv-cache-dtype"] = Flag(
            "one", tuple(sorted(literals(names["CacheDType"], names) or ())) or None
        )
    declared = assignments(ast.parse(source.read(_ENVS))) if _ENVS in source.paths else {}
    table = declared.get("environment_variables")
    env = (
        {k.value for k in table.keys if isinstance(k, ast.Constant)} if isinstance(table, ast.Dict) else set()
    )
    return flags, frozenset(str(n) for n in env) | read_by(source, source.matching(r"vllm/"))


def _enum(owner: ast.ClassDef) -> ast.expr:
    """The members of an enum as a `Literal`; vLLM looks them up whatever their case."""
    members = [
        f.targets[0].id
        for f in owner.body
        if isinstance(f, ast.Assign) and isinstance(f.targets[0], ast.Name) and f.targets[0].id[:1] != "_"
    ]
    spelt = dict.fromkeys(x for m in members for x in (m, m.lower()))
    return ast.parse(f"Literal[{', '.join(map(repr, spelt))}]" if spelt else "str", mode="eval").body


def _calls(tree: ast.Module, names: Names, fields: Fields) -> Iterator[tuple[str, Flag]]:
    owners = {
        name: ast.unparse(node.args[0])
        for name, node in assignments(tree).items()
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_kwargs" and node.args
    }
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
            continue
        words = [
            str(a.value) for a in call.args if isinstance(a, ast.Constant) and str(a.value).startswith("-")
        ]
        if not words:
            continue
        kind = _kind(call, owners, fields)
        given = keywords(call)
        if kind is not None and "action" not in given:
            yield from _spellings(words, kind, names)
        else:
            for word in words:
                yield word, _given(given, names)


def _kind(call: ast.Call, owners: Mapping[str, str], fields: Fields) -> ast.expr | None:
    """Annotation of the field that `**kwargs["field"]` names."""
    for word in call.keywords:
        node = word.value
        if word.arg is None and isinstance(node, ast.Dict):  # {**kwargs["field"], "default": None}
            node = next((v for k, v in zip(node.keys, node.values, strict=True) if k is None), node)
        if word.arg is None and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return fields.get(owners.get(ast.unparse(node.value), ""), {}).get(str(node.slice.value))
        if word.arg is None and isinstance(node, ast.Name) and node.id.endswith("_kwargs"):
            # `moe_backend_kwargs = kernel_kwargs["moe_backend"]`, with the type changed in between.
            field = node.id.removesuffix("_kwargs")
            return next((own[field] for own in fields.values() if field in own), None)
    return None


def _spellings(words: list[str], kind: ast.expr, names: Names) -> Iterator[tuple[str, Flag]]:
    choices = literals(kind, names)
    values = _values(kind, names)
    flag = Flag(values, tuple(sorted({*choices, *_none(kind)})) if choices and values == "one" else None)
    for word in words:
        yield word, flag
        if flag.values == "none" and word.startswith("--"):
            yield f"--no-{word[2:]}", flag


def _none(kind: ast.expr) -> tuple[str, ...]:
    return ("None",) if "None" in ast.unparse(kind) else ()


def _values(kind: ast.expr, names: Names) -> Values:
    text = ast.unparse(kind)
    parts = {p.strip() for p in text.split("|")}
    if parts == {"bool", "str", "None"}:
        return "optional"
    if "bool" in parts:
        return "none"
    if any(p.startswith(("list[", "tuple[", "set[", "List[")) for p in parts):
        return "many"
    if isinstance(kind, ast.Name) and kind.id in names:
        return _values(names[kind.id], names) if not isinstance(names[kind.id], ast.Call) else "one"
    return "one"


def _given(given: Mapping[str, ast.expr], names: Names) -> Flag:
    action = str(_known(given.get("action"), names) or "")
    nargs = _known(given.get("nargs"), names)
    values: Values = "one"
    made = ast.unparse(given["action"]) if "action" in given else ""
    if action in {"store_true", "store_false"} or "BooleanOptionalAction" in made:
        values = "none"
    elif nargs in {"+", "*"}:
        values = "many"
    elif nargs == "?":
        values = "optional"
    choices = _known(given.get("choices"), names)
    deprecated = _known(given.get("deprecated"), names) is True
    return Flag(
        values, tuple(sorted(map(str, choices))) if isinstance(choices, list) else None, None, deprecated
    )


def _known(node: ast.expr | None, names: Names) -> object:
    try:
        return value(node, names)
    except (Unknown, TypeError):
        return None
