"""What shardfuse's source holds to and no other tool checks: sizes, file names, and rules for the parts that plan.

Prints each violation as `file:line: what` and ends with exit code 1 if there is any.

All ranks must come to the same plan, and a set's order, `hash()` and `id()` differ between processes: the parts that
plan do without them, and they name the attributes that they read rather than looking them up.
"""

import ast
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardfuse"

MODULE_LINES = 400
FUNCTION_LINES = 60
P90_FUNCTION_LINES = 30

# Slow to import, so that functions may import them when they are needed.
SLOW_IMPORTS = (
    *(
        "triton",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "matplotlib",
        "mpi4py",
    ),
    "shardfuse.frontend.page",
    # shardfuse's own: what runs a fusion, which a program that has only imported the package does not need
    *("shardfuse.frontend.executor_cache", "shardfuse.frontend.explain", "shardfuse.frontend.dtensor"),
    *("shardfuse.tools.simulation", "shardfuse.compile.graph_pass", "shardfuse.nn.embedding_kernel"),
    *("shardfuse.nn.running_kernel", "shardfuse.nn.traced_dtensors", "torch._functorch"),
)
NUMBERED = ("segments", "schedulers", "codegen")
NUMBERS = 60
"""Numeric constants of the folders that choose and write kernels, at most.  What was measured on a GPU, or is a
property of one, stands in its record (``shardfuse/device``); what follows from others is worked out."""
ENVIRONMENT_READER = "config"
PLANNERS = (
    *("ir", "ops", "analysis", "allocation", "passes", "segments", "schedulers", "kernel_functions"),
    *("segmenter", "codegen", "compiler"),
)
NO_LOOKUP_BY_NAME = ("ir", "ops", "analysis", "passes", "segments", "schedulers", "codegen")
LOOKUPS_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
ORDER_FREE = ("all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Violation = tuple[int, str]


def main() -> int:
    violations: list[str] = []
    lengths: list[int] = []
    numbers = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text, str(path))
        lengths += [length(function) for function in functions_of(tree)]
        found = [
            *sizes(text, tree),
            *late_imports(tree),
            *rules_of(path.relative_to(PACKAGE).with_suffix("").parts[0], tree),
        ]
        violations += [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in sorted(set(found))]
        if path.relative_to(PACKAGE).parts[0] in NUMBERED:
            numbers += len(list(numeric_constants(tree)))
            unsaid = [f"{path.relative_to(ROOT)}:{line}" for line, is_said in numeric_constants(tree) if not is_said]
            violations += [f"{where}: a number without a sentence below: what it bounds, its unit" for where in unsaid]
    if numbers > NUMBERS:
        violations.append(f"{' and '.join(NUMBERED)}: {numbers} numeric constants; the budget is {NUMBERS}")
    violations += repeated_names([path.relative_to(ROOT) for path in sorted(PACKAGE.rglob("*.py"))])
    p90 = sorted(lengths)[math.ceil(0.9 * len(lengths)) - 1] if lengths else 0
    if p90 > P90_FUNCTION_LINES:
        violations.append(
            f"shardfuse: one function in ten is longer than {p90 - 1} lines; the budget is {P90_FUNCTION_LINES}"
        )
    print(
        "\n".join(
            [
                *violations,
                f"{len(lengths)} functions, 90% of them of {p90} lines or fewer; {numbers} numeric constants; "
                f"{len(violations)} violations",
            ]
        )
    )
    return 1 if violations else 0


def repeated_names(paths: Sequence[Path]) -> Iterator[str]:
    """A file name tells one module of the whole package, so that a traceback or a search for it leads to one place."""
    first: dict[str, Path] = {}
    for path in paths:
        if path.name != "__init__.py" and first.setdefault(path.name, path) != path:
            yield f"{path}:1: {first[path.name]} has this file name too: a file name tells one module"


def functions_of(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines from `def` to the last of the body; decorators do not count."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def sizes(text: str, tree: ast.AST) -> Iterator[Violation]:
    lines = len(text.splitlines())
    if lines > MODULE_LINES:
        yield 1, f"{lines} lines; a module has {MODULE_LINES} at most"
    for function in functions_of(tree):
        if length(function) > FUNCTION_LINES:
            yield (
                function.lineno,
                f"{function.name} has {length(function)} lines; a function has {FUNCTION_LINES} at most",
            )


def numeric_constants(tree: ast.Module) -> Iterator[tuple[int, bool]]:
    """The line of each module-level constant of numbers, and whether a sentence below it, or the next, says what."""
    for at, node in enumerate(tree.body):
        match node:
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value) if any(
                map(is_number, ast.walk(value))
            ):
                after = next((n for n in tree.body[at + 1 :] if not isinstance(n, ast.Assign | ast.AnnAssign)), None)
                yield node.lineno, isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            case _:
                pass


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def late_imports(tree: ast.AST) -> Iterator[Violation]:
    """Imports inside of functions that are not of slow modules: they hide a cycle or a dependency."""
    for function in functions_of(tree):
        for node in ast.walk(function):
            for name in imported(node):
                if not any(name == slow or name.startswith(f"{slow}.") for slow in SLOW_IMPORTS):
                    yield (
                        node.lineno,
                        f"{name} is imported inside of {function.name}: import it at the top of the module",
                    )


def imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=0):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.ImportFrom(module=module, level=level):
            return ["." * level + (module or "")]
        case _:
            return []


def rules_of(part: str, tree: ast.AST) -> Iterator[Violation]:
    """The rules that hold for one part of the package: a top-level folder or module."""
    if part != ENVIRONMENT_READER:
        yield from environment_reads(tree)
    if part in NO_LOOKUP_BY_NAME:
        yield from calls(tree, LOOKUPS_BY_NAME, "looks an attribute up by name: name it, or use a match statement")
    if part in PLANNERS:
        yield from unstable_numbers(tree)
        yield from set_orders(tree)


def environment_reads(tree: ast.AST) -> Iterator[Violation]:
    advice = f"read the environment in shardfuse/{ENVIRONMENT_READER}.py only"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(
                value=ast.Name(id="os"), attr="environ" | "environb" | "getenv" | "putenv" | "unsetenv" as name
            ):
                yield node.lineno, f"os.{name}: {advice}"
            case ast.ImportFrom(module="os", names=names) if {alias.name for alias in names} & {"environ", "getenv"}:
                yield node.lineno, f"import from os: {advice}"
            case _:
                pass


def calls(tree: ast.AST, names: tuple[str, ...], what: str) -> Iterator[Violation]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in names:
                yield node.lineno, f"{name}() {what}"
            case _:
                pass


def unstable_numbers(tree: ast.AST) -> Iterator[Violation]:
    """Calls of `hash()` and `id()`, but for those that define a `__hash__`."""
    hashes = [function for function in functions_of(tree) if function.name == "__hash__"]
    defining = {line for function in hashes for line, _ in calls(function, ("hash",), "")}
    for line, what in calls(tree, ("hash", "id"), "differs between ranks"):
        if line not in defining:
            yield line, what


def set_orders(tree: ast.AST) -> Iterator[Violation]:
    """Loops over sets and sequences made of them, where the code at hand shows that it is a set."""
    scopes: list[ast.AST] = [tree, *functions_of(tree)]
    for scope in scopes:
        nodes = list(own_nodes(scope))
        names = set_names(nodes)
        free = [comprehension for node in nodes for comprehension in free_of_order(node)]
        for node in nodes:
            if node in free:
                continue
            for iterated in iterated_by(node):
                if is_set(iterated, names):
                    yield (
                        iterated.lineno,
                        "goes through a set, whose order differs between ranks: sort it, or use a dict",
                    )


def free_of_order(node: ast.AST) -> list[ast.comprehension]:
    """The loops of comprehensions whose order nothing depends on."""
    match node:
        case ast.SetComp(generators=loops):
            return loops
        case ast.Call(func=ast.Name(id=name), args=[ast.GeneratorExp(generators=loops)]) if name in ORDER_FREE:
            return loops
        case _:
            return []


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions inside it, which are scopes of their own."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, Function):
            yield child
            yield from own_nodes(child)


def set_names(nodes: list[ast.AST]) -> frozenset[str]:
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_set(value, frozenset(names)):
                names.add(name)
            case (
                ast.AnnAssign(target=ast.Name(id=name), annotation=kind)
                | ast.arg(arg=name, annotation=ast.expr() as kind)
            ) if is_set_type(kind):
                names.add(name)
            case _:
                pass
    return frozenset(names)


def is_set_type(annotation: ast.expr) -> bool:
    match annotation:
        case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name):
            return name in ("set", "frozenset", "Set", "AbstractSet")
        case _:
            return False


def is_set(node: ast.expr, names: frozenset[str]) -> bool:
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Name(id=name):
            return name in names
        case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor(), right=right):
            return is_set(left, names) or is_set(right, names)
        case _:
            return False


def iterated_by(node: ast.AST) -> list[ast.expr]:
    """The expressions whose order decides what `node` does or makes."""
    match node:
        case ast.For(iter=iterated) | ast.comprehension(iter=iterated):
            return [iterated]
        case ast.Call(
            func=ast.Name(id="list" | "tuple" | "iter" | "enumerate" | "dict" | "zip" | "map"), args=arguments
        ):
            return list(arguments)
        case ast.Call(func=ast.Attribute(attr="join" | "fromkeys"), args=arguments):
            return list(arguments)
        case ast.Starred(value=value):
            return [value]
        case _:
            return []


if __name__ == "__main__":
    sys.exit(main())
