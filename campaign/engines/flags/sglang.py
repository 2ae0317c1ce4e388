"""Flags and variables of SGLang: annotated fields of its argument classes, and explicit `add_argument` calls.

0.5.14 keeps one dataclass in `srt/server_args.py`; 0.5.23 keeps structs in `srt/arg_groups/fields/`. Both
write a field as `name: A[type, Arg(...)] = default`, from which the flag's name and kind follow.
"""

import ast
from collections.abc import Iterator

from campaign.engines.flags.envs import read_by
from campaign.engines.flags.literals import Names, Unknown, assignments, keywords, literals, value
from campaign.engines.flags.source import Source
from campaign.engines.flags.table import Flag, Values

_FILES = r"sglang/srt/(server_args|model_executor/cuda_graph_config|arg_groups/(choices|arg_utils|fields/\w+))\.py$"
_ENVIRON = "sglang/srt/environ.py"
_NOTHING = frozenset(
    {
        "store_true",
        "store_false",
        "DeprecatedAction",
        "DeprecatedStoreTrueAction",
        "DeprecatedStoreConstAction",
    }
)


def extract(source: Source) -> tuple[dict[str, Flag], frozenset[str]]:
    """Flags and variables."""
    trees = [ast.parse(source.read(path)) for path in source.matching(_FILES)]
    names: dict[str, ast.expr] = {}
    for tree in trees:
        names |= {k: v for k, v in assignments(tree).items() if k not in names}
    flags: dict[str, Flag] = {}
    for tree in trees:
        flags |= dict(_fields(tree, names))
    for tree in trees:
        for name, flag in _explicit(tree, names):
            flags.setdefault(name, flag)
    read = read_by(source, source.matching(r"sglang/(?!test|multimodal_gen|bench|benchmark)"))
    return flags, read | _declared(source)


def _fields(tree: ast.Module, names: Names) -> Iterator[tuple[str, Flag]]:
    for owner in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
        for field in owner.body:
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            kind = field.annotation
            if not (isinstance(kind, ast.Subscript) and ast.unparse(kind.value) in {"A", "Annotated"}):
                continue
            if not isinstance(kind.slice, ast.Tuple):
                continue
            given: dict[str, ast.expr] = {}
            said = False
            for extra in kind.slice.elts[1:]:
                if isinstance(extra, ast.Call) and ast.unparse(extra.func).endswith("Arg"):
                    given, said = keywords(extra), True
                elif isinstance(extra, ast.Constant) and isinstance(extra.value, str):
                    said = True
            if said and _known(given.get("no_cli"), names) is not True:
                yield from _named(field.target.id, kind.slice.elts[0], given, names)


def _named(
    field: str, kind: ast.expr, given: dict[str, ast.expr], names: Names
) -> Iterator[tuple[str, Flag]]:
    own = _known(given.get("cli_name"), names) or f"--{field.replace('_', '-')}"
    choices = _choices(given.get("choices"), names) or literals(kind, names)
    flag = Flag(_values(kind, given, names), tuple(sorted(choices)) if choices else None)
    aliases = _known(given.get("aliases"), names)
    for name in (own, *(aliases if isinstance(aliases, list) else ())):
        yield str(name), flag


def _values(kind: ast.expr, given: dict[str, ast.expr], names: Names) -> Values:
    text = ast.unparse(kind).replace(" ", "")
    if "action" in given:
        return "none" if _action(given["action"]) in _NOTHING else "many" if "nargs" in given else "one"
    nargs = _known(given.get("nargs"), names)
    if nargs in {"+", "*"}:
        return "many"
    if nargs == "?":
        return "optional"
    if text == "bool" and "type_parser" not in given:
        return "none"
    inner = text.removeprefix("Optional[")
    return "many" if inner.startswith(("List[", "list[")) and "type_parser" not in given else "one"


def _explicit(tree: ast.Module, names: Names) -> Iterator[tuple[str, Flag]]:
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
            continue
        words = keywords(call)
        action = _action(words.get("action"))
        nargs = _known(words.get("nargs"), names)
        values: Values = (
            "none"
            if action in _NOTHING
            else "many"
            if nargs in {"+", "*"}
            else "optional"
            if nargs == "?"
            else "one"
        )
        choices = _choices(words.get("choices"), names)
        new = _known(words.get("new_flag"), names)
        flag = Flag(
            values,
            tuple(sorted(choices)) if choices else None,
            new if isinstance(new, str) else None,
            "Deprecated" in action,
        )
        for word in call.args:
            if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                yield str(word.value), flag


def _choices(node: ast.expr | None, names: Names) -> list[str] | None:
    found = _known(node, names)
    return [str(x) for x in found] if isinstance(found, list) else None


def _known(node: ast.expr | None, names: Names) -> object:
    try:
        return value(node, names)
    except (Unknown, TypeError):
        return None


def _action(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "" if node is None else ast.unparse(node).rpartition(".")[2]


def _declared(source: Source) -> frozenset[str]:
    """`NAME = EnvBool(...)` of `environ.py`, and the old names that it still takes."""
    if _ENVIRON not in source.paths:
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read(_ENVIRON))):
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        made = getattr(node, "value", None)
        if (
            isinstance(target, ast.Name)
            and isinstance(made, ast.Call)
            and ast.unparse(made.func).startswith("Env")
        ):
            found.add(target.id)
            old = keywords(made).get("deprecated_name")
            if isinstance(old, ast.Constant):
                found.add(str(old.value))
    return frozenset(found)
