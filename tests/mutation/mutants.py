"""Mutants of a source file: small changes of the kind that people make by mistake."""

import ast
import copy
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HAND_OVER = ("drop keyword", "drop argument", "swap arguments", "other attribute")
# Keywords that change speed, layout, resources or text, or only refuse what cannot happen.
NEUTRAL_KEYWORDS = {
    "chunksize", "daemon", "description", "exist_ok", "flush", "help", "memory_format", "metavar", "non_blocking",
    "pin_memory", "stacklevel", "strict",
}  # fmt: skip
NEUTRAL_CALLS = {"cast", "TypeVar", "NewType", "filterwarnings"}
COMMUTATIVE = {"max", "min"}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt,
}  # fmt: skip
COPIES = {"detach", "clone"}
# Nodes that are no code, messages to people, or checks of our own invariants.
SKIPPED = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Raise)
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "bases", "keywords", "target", "targets", "format_spec")


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes `start:end` of the file `path` are replaced by `text`."""

    path: str
    first_line: int  # of the statement
    last_line: int
    kind: str
    start: int
    end: int
    text: str
    before: str
    function: str

    @property
    def key(self) -> str:
        """Return an identifier that survives changes elsewhere in the file."""
        parts = (self.path.removeprefix("duetgan/"), self.function, self.kind, self.before, self.text)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def is_valid(self, source: bytes) -> bool:
        """Return whether the change compiles and changes the program."""
        try:
            changed = ast.parse(self.apply(source))
        except SyntaxError:
            return False
        return ast.dump(changed) != ast.dump(ast.parse(source))


@dataclass
class Signatures:
    """Parameters and fields of all product functions and classes, by bare name."""

    defaults: dict[str, list[dict[str, str | None]]] = field(default_factory=lambda: defaultdict(list))
    fields: dict[str, dict[str, str]] = field(default_factory=dict)
    members: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, trees: Sequence[ast.Module]) -> "Signatures":
        signatures = cls()
        bases: dict[str, list[str]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    signatures.defaults[node.name].append(_defaults(node))
                elif isinstance(node, ast.ClassDef):
                    signatures._add_class(node)
                    bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
        for name in signatures.fields:
            for ancestor in _ancestors(name, bases):
                inherited = signatures.fields.get(ancestor, {})
                signatures.fields[name] = {**inherited, **signatures.fields[name]}
                signatures.members[name] |= signatures.members.get(ancestor, set())
        return signatures

    def _add_class(self, node: ast.ClassDef) -> None:
        annotated = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        fields = {item.target.id: item for item in annotated if isinstance(item.target, ast.Name)}
        self.fields[node.name] = {name: ast.unparse(item.annotation) for name, item in fields.items()}
        methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        self.members[node.name] = methods | set(fields)
        constructors = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        for constructor in constructors:
            self.defaults[node.name].append(_defaults(constructor))
        if fields and not constructors:
            values = {name: item.value for name, item in fields.items()}
            self.defaults[node.name].append({n: ast.unparse(v) if v else None for n, v in values.items()})

    def default(self, function: str, parameter: str) -> list[str | None]:
        """Return the parameter's default in each product function of this name; None where it has none."""
        return [defaults[parameter] for defaults in self.defaults.get(function, []) if parameter in defaults]


def _defaults(node: ast.FunctionDef) -> dict[str, str | None]:
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults: dict[str, str | None] = {a.arg: None for a in positional if a.arg not in ("self", "cls")}
    for argument, value in zip(reversed(positional), reversed(node.args.defaults), strict=False):
        defaults[argument.arg] = ast.unparse(value)
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        defaults[argument.arg] = None if default is None else ast.unparse(default)
    return defaults


def _ancestors(name: str, bases: dict[str, list[str]]) -> list[str]:
    seen: list[str] = []
    queue = list(bases.get(name, []))
    while queue:
        base = queue.pop(0)
        if base not in seen:
            seen.append(base)
            queue += bases.get(base, [])
    return seen


class _Finder:
    """Collects the mutants of one file."""

    def __init__(self, path: str, source: bytes, signatures: Signatures) -> None:
        self.path = path
        self.source = source
        self.signatures = signatures
        self.tree = ast.parse(source)
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.accessed: dict[str, set[str]] = defaultdict(set)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                self.accessed[ast.unparse(node.value)].add(node.attr)
        self.reals: set[str] = set()  # constants of the module that are floats
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and self._is_real(node.value):
                self.reals |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        self.lines = (0, 0)
        self.mutants: list[Mutant] = []

    def find(self) -> list[Mutant]:
        for statement in self.tree.body:
            self._visit(statement, [])
        return self.mutants

    def _visit(self, node: ast.AST, scope: list[str]) -> None:
        if isinstance(node, SKIPPED) or _is_docstring(node) or _is_type_checking(node):
            return
        if isinstance(node, ast.stmt):
            self.lines = _lines(node)
        replacements: Iterable[tuple[ast.AST, str]] = ()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            scope = [*scope, node.name]
        elif isinstance(node, ast.stmt):
            replacements = self._statements(node)
        elif isinstance(node, ast.expr):
            replacements = self._replacements(node)
        if isinstance(node, ast.stmt | ast.expr):
            for replacement, kind in replacements:
                self._add(node, replacement, kind, scope)
        conditions = [node.test] if isinstance(node, ast.If | ast.While) else getattr(node, "ifs", [])
        for condition in conditions:
            self._add(condition, ast.UnaryOp(ast.Not(), condition), "negated condition", scope)
        for child in _children(node):
            lines = self.lines
            self._visit(child, scope)
            self.lines = lines

    def _statements(self, node: ast.stmt) -> Iterator[tuple[ast.stmt, str]]:
        if _is_removable(node):
            yield ast.Pass(), "removed statement"
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            changed = copy.copy(node)
            changed.op = ARITHMETIC[type(node.op)]()
            yield changed, "arithmetic"

    def _replacements(self, node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
            yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right), "arithmetic"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = type(node.ops[0])
            if operator in BOUNDARY and not self._is_real(node.left) and not self._is_real(node.comparators[0]):
                yield ast.Compare(node.left, [BOUNDARY[operator]()], node.comparators), "boundary"
            yield ast.Compare(node.left, [OPPOSITE[operator]()], node.comparators), "comparison"
        elif isinstance(node, ast.BoolOp):
            operator_class = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield ast.BoolOp(operator_class(), node.values), "negated condition"
        elif isinstance(node, ast.IfExp):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse), "negated condition"
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                yield ast.Constant(not node.value), "constant"
            elif isinstance(node.value, int):
                yield ast.Constant(node.value + 1), "constant"
            elif isinstance(node.value, float):
                yield ast.Constant(node.value * 2 or 1.0), "constant"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            for name in self._other_attributes(node):
                yield ast.Attribute(node.value, name, ast.Load()), "other attribute"
        elif isinstance(node, ast.Call) and _name(node.func) not in NEUTRAL_CALLS:
            yield from self._calls(node)

    def _is_real(self, node: ast.expr) -> bool:
        """Return whether the value is a float by its form; a float rarely lies on a boundary exactly."""
        if isinstance(node, ast.Name):
            return node.id in self.reals
        if isinstance(node, ast.BinOp):
            is_quotient = isinstance(node.op, ast.Div)
            return is_quotient or self._is_real(node.left) or self._is_real(node.right)
        return isinstance(node, ast.Constant) and isinstance(node.value, float)

    def _calls(self, node: ast.Call) -> Iterator[tuple[ast.expr, str]]:
        function = _name(node.func)
        if isinstance(node.func, ast.Attribute) and function in COPIES and not node.args and not node.keywords:
            yield node.func.value, "removed detach"
        for position, keyword in enumerate(node.keywords):
            if keyword.arg is None or keyword.arg in NEUTRAL_KEYWORDS:
                continue
            defaults = self.signatures.default(function, keyword.arg)
            if defaults and all(d is None or d == ast.unparse(keyword.value) for d in defaults):
                continue
            remaining = node.keywords[:position] + node.keywords[position + 1 :]
            yield ast.Call(node.func, node.args, remaining), "drop keyword"
        if node.args and not isinstance(node.args[-1], ast.Starred) and self._has_default(function, node):
            yield ast.Call(node.func, node.args[:-1], node.keywords), "drop argument"
        for first in range(len(node.args) - 1):
            if function not in COMMUTATIVE and _same_form(node.args[first], node.args[first + 1]):
                swapped = list(node.args)
                swapped[first], swapped[first + 1] = swapped[first + 1], swapped[first]
                yield ast.Call(node.func, swapped, node.keywords), "swap arguments"
        for first in range(len(node.keywords) - 1):
            one, two = node.keywords[first : first + 2]
            if one.arg and two.arg and _same_form(one.value, two.value):
                keywords = list(node.keywords)
                keywords[first] = ast.keyword(one.arg, two.value)
                keywords[first + 1] = ast.keyword(two.arg, one.value)
                yield ast.Call(node.func, node.args, keywords), "swap arguments"

    def _has_default(self, function: str, node: ast.Call) -> bool:
        """Return whether the last positional argument may be left out, in every product function of this name."""
        last = len(node.args) - 1
        defaults = [list(d.values()) for d in self.signatures.defaults.get(function, [])]
        values = [d[last] for d in defaults if len(d) > last]
        return bool(values) and all(v is not None and v != ast.unparse(node.args[-1]) for v in values)

    def _other_attributes(self, node: ast.Attribute) -> list[str]:
        accessed = self.accessed[ast.unparse(node.value)]
        names: set[str] = set()
        for owner, fields in self.signatures.fields.items():
            if node.attr in fields and accessed <= self.signatures.members[owner]:
                annotation = fields[node.attr]
                names |= {n for n, a in fields.items() if a == annotation and n != node.attr}
        return sorted(names)[:3]

    def _add(self, node: ast.expr | ast.stmt, replacement: ast.AST, kind: str, scope: list[str]) -> None:
        text = ast.unparse(replacement)
        if isinstance(node, ast.expr) and not isinstance(replacement, ast.Constant | ast.Name):
            text = f"({text})"
        start = self.line_starts[node.lineno - 1] + node.col_offset
        end = self.line_starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = self.source[start:end].decode()
        self.mutants.append(Mutant(self.path, *self.lines, kind, start, end, text, before, ".".join(scope)))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that are run: no types, no names that are assigned, and no method's name."""
    if isinstance(node, ast.Call):
        if _name(node.func) in NEUTRAL_CALLS:
            return
        yield node.func.value if isinstance(node.func, ast.Attribute) else node.func
        yield from node.args
        yield from (keyword.value for keyword in node.keywords if keyword.arg not in NEUTRAL_KEYWORDS)
        return
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        if name not in SKIPPED_FIELDS:
            yield from (child for child in children if isinstance(child, ast.AST))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _lines(node: ast.stmt) -> tuple[int, int]:
    """Return the first and last line of a statement, or of the head of a compound one."""
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return node.lineno, max(node.lineno, last)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING"


def _is_removable(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and _name(node.value.func) not in NEUTRAL_CALLS
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Continue | ast.Break)


def _is_text(node: ast.BinOp) -> bool:
    for side in (node.left, node.right):
        is_constant = isinstance(side, ast.Constant) and isinstance(side.value, str | bytes)
        if is_constant or isinstance(side, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp):
            return True
        if isinstance(side, ast.BinOp) and _is_text(side):
            return True
    return False


def _same_form(one: ast.expr, two: ast.expr) -> bool:
    variables = ast.Name | ast.Attribute | ast.Subscript
    if not (isinstance(one, variables) and isinstance(two, variables)):
        return False
    return ast.unparse(one) != ast.unparse(two)


def mutants_of(root: Path, files: Sequence[str], context: Sequence[str] = ()) -> list[Mutant]:
    """Return all mutants of the files, paths relative to `root`; `context`: further files whose signatures count."""
    sources = {name: (root / name).read_bytes() for name in dict.fromkeys([*files, *context])}
    signatures = Signatures.of([ast.parse(source) for source in sources.values()])
    return [mutant for name in files for mutant in _Finder(name, sources[name], signatures).find()]


def sample(
    mutants: Sequence[Mutant], n: int, seed: int, folder_of: Callable[[str], str], is_valid: Callable[[Mutant], bool]
) -> list[Mutant]:
    """Draw n valid mutants without replacement, half of them hand-over faults.

    Folders, and within a folder the kinds of a half, are drawn in proportion to the square root of their number of
    mutants, so that frequent ones do not crowd out rare ones.
    """
    draw = random.Random(seed)
    halves: tuple[dict[str, dict[str, list[Mutant]]], ...] = ({}, {})
    for mutant in mutants:
        half = halves[mutant.kind in HAND_OVER]
        half.setdefault(folder_of(mutant.path), {}).setdefault(mutant.kind, []).append(mutant)
    chosen: list[Mutant] = []
    for is_hand_over, half in enumerate(halves):
        quota = n - n // 2 if is_hand_over else n // 2
        for folder, count in _quotas(half, quota).items():
            by_kind = half[folder]
            for kind in sorted(by_kind):
                draw.shuffle(by_kind[kind])
            kinds = sorted(by_kind)
            weights = [len(by_kind[kind]) ** 0.5 for kind in kinds]
            drawn: list[Mutant] = []
            while len(drawn) < count and any(by_kind.values()):
                (kind,) = draw.choices(kinds, weights)
                if by_kind[kind] and is_valid(by_kind[kind][-1]):
                    drawn.append(by_kind[kind][-1])
                del by_kind[kind][-1:]
            chosen += drawn
    draw.shuffle(chosen)  # the results of a run that is stopped are a sample, too
    return chosen


def _quotas(half: dict[str, dict[str, list[Mutant]]], n: int) -> dict[str, int]:
    sizes = {folder: sum(map(len, kinds.values())) for folder, kinds in sorted(half.items())}
    roots = {folder: size**0.5 for folder, size in sizes.items()}
    total = sum(roots.values())
    exact = {folder: n * root / total for folder, root in roots.items()}
    quotas = {folder: int(value) for folder, value in exact.items()}
    by_remainder = sorted(exact, key=lambda folder: quotas[folder] - exact[folder])
    for folder in by_remainder[: n - sum(quotas.values())]:
        quotas[folder] += 1
    return {folder: min(quota, sizes[folder]) for folder, quota in quotas.items()}
