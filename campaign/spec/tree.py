"""YAML as a tree of what was written, with the line of every key and value. Nothing is converted here.

YAML's own typing is where configuration goes wrong (`no`, `010`, `1e3`, `695e0514`), so only the parser's
events are used: mappings, sequences, and scalars as text. The type of a field decides later what its text
means. Refused: duplicate keys, merge keys (`<<`), tags, keys that are not scalars, more than one document,
values left empty. Anchors and aliases work, bounded by the size of the expanded tree.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from campaign.errors import Problem
from campaign.spec.types import Scalar

MAX_BYTES = 256 * 1024
MAX_NODES = 20_000
MAX_DEPTH = 24

_VARIABLE = re.compile(r"\$(\$\{)|\$\{([^{}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"(?i)(^|_)(token|secret|password|passwd|credentials?|(api|access|private|secret)_?key)$")
"""Names of variables whose values must not be written into a run folder."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands: a file and a line, or `--set KEY` and no line."""

    file: str
    line: int | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar."""

    at: Place
    text: str
    plain: bool
    null: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """A sequence."""

    at: Place
    items: "tuple[Tree, ...]"


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping: key to (place of the key, value)."""

    at: Place
    entries: "dict[str, tuple[Place, Tree]]"


Tree = Leaf | Items | Table


class _Unreadable(Exception):
    """The text is not YAML that can be gone on with."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def shown(text: object) -> str:
    """A value as an error shows it: one line, not too long, nothing a terminal would act on."""
    line = "".join(c if c.isprintable() else "?" for c in str(text))
    return line if len(line) <= 60 else f"{line[:57]}..."


def parse(data: bytes | str, file: str, first_line: int | None = 1) -> tuple[Tree | None, list[Problem]]:
    """Read one YAML document; `first_line=None` for text that has no lines (`--set`).

    The tree is None where reading could not go on; the last problem says why. Raises nothing.
    """
    if len(data) > MAX_BYTES:
        return None, [Problem(file, None, "file", "", f"is longer than {MAX_BYTES} bytes", "shorten it")]
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        return None, [Problem(file, line, "file", "", "is not UTF-8", "save it as UTF-8")]
    builder = _Builder(file, first_line)
    try:
        return builder.document(text), builder.problems
    except _Unreadable as unreadable:
        return None, [*builder.problems, unreadable.problem]
    except Exception as error:  # the YAML library raises many kinds on hostile text
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        at = None if first_line is None or mark is None else int(mark.line) + first_line
        why = shown(getattr(error, "problem", None) or "cannot be read")
        fix = "check the indentation, the quotes and the brackets of this line and the one above"
        around = text.splitlines()[max(mark.line - 1, 0) : mark.line + 1] if mark is not None else []
        if any("${" in line for line in around):
            fix = 'inside { } and [ ] a variable needs quotes: "${NAME}"'
        return None, [*builder.problems, Problem(file, at, "file", "", f"is not valid YAML: {why}", fix)]


def _joined(text: str) -> str:
    """Pairs of surrogate escapes, as JSON writes them, made one character; a lone one stays, for its field to refuse."""
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        return text
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        return text


class _Builder:
    """Builds the tree from parser events."""

    def __init__(self, file: str, first_line: int | None) -> None:
        self.file, self.first_line = file, first_line
        self.problems: list[Problem] = []
        self.anchors: dict[str, tuple[Tree, int]] = {}

    def document(self, text: str) -> Tree:
        from ruamel.yaml import YAML

        events = iter(YAML(typ="safe", pure=True).parse(text))
        tree: Tree | None = None
        for event in events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent":
                if tree is not None:
                    self.stop(
                        event, "document", "---", "a second document begins", "keep one document a file"
                    )
                if event.version not in (None, (1, 2)):
                    self.stop(
                        event, "document", "%YAML", "another YAML version is asked for", "remove the line"
                    )
            elif kind not in {"StreamStartEvent", "StreamEndEvent", "DocumentEndEvent"}:
                tree, _ = self.node(event, events, "", 0)
        if tree is None:
            raise _Unreadable(Problem(self.file, None, "file", "", "is empty", "start with `campaign init`"))
        return tree

    def place(self, event: Any) -> Place:
        return Place(self.file, None if self.first_line is None else event.start_mark.line + self.first_line)

    def note(self, event: Any, field: str, value: object, why: str, fix: str) -> None:
        at = self.place(event)
        self.problems.append(Problem(at.file, at.line, field or "file", shown(value), why, fix))

    def stop(self, event: Any, field: str, value: object, why: str, fix: str) -> None:
        at = self.place(event)
        raise _Unreadable(Problem(at.file, at.line, field or "file", shown(value), why, fix))

    def node(self, event: Any, events: Iterator[Any], path: str, depth: int) -> tuple[Tree, int]:
        """The tree that starts at `event`, and how many nodes it has, aliases expanded."""
        if depth > MAX_DEPTH:
            self.stop(event, path, "", f"is nested more than {MAX_DEPTH} deep", "flatten it")
        kind = type(event).__name__
        if kind == "AliasEvent":
            if event.anchor not in self.anchors:
                self.stop(event, path, f"*{event.anchor}", "no such anchor stands before it", "write it out")
            return self.anchors[event.anchor]
        if event.tag is not None and not (kind == "ScalarEvent" and event.tag == "!"):
            self.note(
                event, path, event.tag, "tags are not used here", "remove the tag; the field has a type"
            )
        built = {
            "ScalarEvent": self.leaf,
            "SequenceStartEvent": self.items,
            "MappingStartEvent": self.table,
        }[kind](event, events, path, depth)
        if built[1] > MAX_NODES:
            self.stop(event, path, "", f"expands to more than {MAX_NODES} values", "write fewer aliases")
        if event.anchor is not None:
            self.anchors[event.anchor] = built
        return built

    def leaf(self, event: Any, _events: Iterator[Any], path: str, _depth: int) -> tuple[Tree, int]:
        plain = event.style is None
        text = _joined(str(event.value))
        if plain and text == "":
            self.note(event, path, "", "has no value", "write one, or remove the line for the default")
        null = plain and text in {"null", "~", "Null", "NULL", ""}
        return Leaf(self.place(event), text, plain, null), 1

    def items(self, start: Any, events: Iterator[Any], path: str, depth: int) -> tuple[Tree, int]:
        items: list[Tree] = []
        size = 1
        for event in events:
            if type(event).__name__ == "SequenceEndEvent":
                break
            item, n = self.node(event, events, f"{path}[{len(items)}]", depth + 1)
            items.append(item)
            size += n
            if size > MAX_NODES:
                break  # node() stops with the reason
        return Items(self.place(start), tuple(items)), size

    def table(self, start: Any, events: Iterator[Any], path: str, depth: int) -> tuple[Tree, int]:
        entries: dict[str, tuple[Place, Tree]] = {}
        size = 1
        for event in events:
            if type(event).__name__ == "MappingEndEvent":
                break
            if type(event).__name__ != "ScalarEvent":
                self.stop(
                    event, path, "", "a key is not a single word", "write `key: value`; quote ${VAR} in {}"
                )
            if event.tag is not None:
                self.note(event, path, event.tag, "tags are not used here", "remove the tag")
            key = _joined(str(event.value))
            field = f"{path}.{key}" if path else key
            value_event = next(events)
            if getattr(value_event, "value", None) == "" and value_event.style is None:
                value_event.start_mark = event.start_mark  # an absent value is marked where the next token is
            value, n = self.node(value_event, events, field, depth + 1)
            size += n + 1
            if size > MAX_NODES:
                break
            if event.anchor is not None:
                self.note(event, field, f"&{event.anchor}", "an anchor on a key", "put it before the value")
            if key == "<<" and event.style is None:
                self.note(
                    event, field, "", "merge keys are not used", "for arms write `from: NAME`; else repeat it"
                )
            elif key in entries:
                first = entries[key][0].line
                where = "" if first is None else f" (first on line {first})"
                self.note(event, field, "", f"the key stands twice{where}", "remove one of the two")
            else:
                entries[key] = (self.place(event), value)
        return Table(self.place(start), entries), size


def override(tree: Tree, argument: str) -> tuple[Tree, list[Problem]]:
    """Apply one `--set a.b.c=VALUE`; VALUE is YAML and goes through the same rules."""
    key, equals, value = argument.partition("=")
    file = f"--set {shown(key)}"
    path = key.strip().split(".")
    if not equals or not all(path):
        fix = "write --set a.b.c=VALUE, e.g. --set budget.cap_usd=20"
        return tree, [Problem("--set", None, shown(key) or "KEY", "", "is not KEY=VALUE", fix)]
    if not value.strip():
        # Nothing is not a value: a variable of a shell that was never set looks like this.
        fix = f"write --set {shown(key)}=VALUE, or {shown(key)}=null for none"
        return tree, [Problem("--set", None, shown(key), "", "is empty: no value is given", fix)]
    new, problems = parse(value, file, None)
    problems = [replace(p, field=key) if p.field == "file" else p for p in problems]
    if new is None:
        return tree, problems
    try:
        return _replaced(tree, path, 0, new, file), problems
    except _Unreadable as unreadable:
        return tree, [replace(unreadable.problem, field=key)]


def _replaced(tree: Tree, path: Sequence[str], i: int, new: Tree, file: str) -> Tree:
    if i == len(path):
        return new
    key, at = path[i], Place(file, None)
    if isinstance(tree, Table):
        before = tree.entries.get(key)
        inner = before[1] if before else (Table(at, {}) if i + 1 < len(path) else new)
        return Table(tree.at, {**tree.entries, key: (at, _replaced(inner, path, i + 1, new, file))})
    if isinstance(tree, Items) and key.isdecimal() and len(key) < 6 and int(key) < len(tree.items):
        k = int(key)
        return Items(
            tree.at, (*tree.items[:k], _replaced(tree.items[k], path, i + 1, new, file), *tree.items[k + 1 :])
        )
    name = ".".join(path[:i]) or "the file"
    why = f"{name} has nothing under it that could be called {shown(key)}"
    raise _Unreadable(Problem(file, None, "", "", why, "set the whole of it, or check the path"))


def substitute(tree: Tree, env: Mapping[str, str], path: str = "") -> tuple[Tree, list[Problem]]:
    """Replace `${VAR}` in every scalar; `$${` stands for `${`. Values are text and never parsed as YAML."""
    if isinstance(tree, Leaf):
        return _substituted(tree, env, path)
    problems: list[Problem] = []
    if isinstance(tree, Items):
        items = []
        for k, item in enumerate(tree.items):
            new, found = substitute(item, env, f"{path}[{k}]")
            items.append(new)
            problems += found
        return Items(tree.at, tuple(items)), problems
    entries = {}
    for key, (at, value) in tree.entries.items():
        new, found = substitute(value, env, f"{path}.{key}" if path else key)
        entries[key] = (at, new)
        problems += found
    return Table(tree.at, entries), problems


def _substituted(leaf: Leaf, env: Mapping[str, str], path: str) -> tuple[Leaf, list[Problem]]:
    problems: list[Problem] = []

    def problem(why: str, fix: str) -> str:
        problems.append(Problem(leaf.at.file, leaf.at.line, path or "file", shown(leaf.text), why, fix))
        return ""

    def one(match: re.Match[str]) -> str:
        if match[1]:
            return "${"
        name = match[2]
        if name is None:
            return problem("`${` is not closed", "write ${NAME}, or $${ for the two characters")
        if not _NAME.fullmatch(name):
            return problem(f"${{{shown(name)}}} is not a variable", "write ${NAME}; there is no other form")
        if SECRET.search(name):
            return problem(f"the secret {name} would be stored in the run folder", "keep it out of the file")
        if name not in env:
            return problem(
                f"the variable {name} is not set", f"export {name}=VALUE, or use --set {path}=VALUE"
            )
        return env[name]

    text = _VARIABLE.sub(one, leaf.text)
    whole = re.fullmatch(r"\$\{[^{}]*\}", leaf.text) is not None
    # A variable alone is typed by its field, quoted or not: a flow mapping can hold it only in quotes.
    return replace(leaf, text=text, plain=leaf.plain or whole), problems


def python(tree: Tree) -> Any:
    """The tree as dicts, lists, None and `Scalar`s, for validation."""
    if isinstance(tree, Leaf):
        return None if tree.null else Scalar(tree.text, plain=tree.plain)
    if isinstance(tree, Items):
        return [python(item) for item in tree.items]
    return {key: python(value) for key, (_, value) in tree.entries.items()}


@dataclass(frozen=True, slots=True)
class Spot:
    """Something in the tree: its path as errors name it, its place, its value as errors show it."""

    field: str
    at: Place
    value: str
    inside: bool
    """False where the last step of the path does not exist: the place is the parent's."""


def find(tree: Tree, path: Sequence[str | int]) -> Spot:
    """Follow a path as far as it goes; steps that name nothing in the tree (union tags) are passed over."""
    node, field, at, inside = tree, "", tree.at, True
    for k, step in enumerate(path):
        inside = True
        if isinstance(node, Table) and isinstance(step, str) and step in node.entries:
            at, node = node.entries[step]
            field = f"{field}.{step}" if field else step
        elif isinstance(node, Items) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
            at = node.at
            field = f"{field}[{step}]"
        elif k == len(path) - 1 and isinstance(node, Table):
            inside = False
            field = f"{field}.{step}" if field else str(step)
    field = "".join(c if c.isprintable() else "?" for c in field) or "file"
    if inside and isinstance(node, Leaf):
        return Spot(field, node.at, shown(node.text), inside)
    return Spot(field, at, "", inside)


def lines(tree: Tree, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Place]:
    """The place of everything written, by path; of a value in a mapping, the place of its key."""
    found: dict[tuple[str, ...], Place] = {}
    if isinstance(tree, Table):
        inner = [(key, at, value) for key, (at, value) in tree.entries.items()]
    else:
        inner = [(str(k), t.at, t) for k, t in enumerate(tree.items)] if isinstance(tree, Items) else []
    for key, at, value in inner:
        found[(*path, key)] = at
        found.update(lines(value, (*path, key)))
    return found
