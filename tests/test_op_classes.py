"""Ops are classes: what they refuse, how they are printed, and that nothing asks for one by the text of its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from functools import cache
from pathlib import Path

import pytest
import torch

from shardfuse.compile.aten_collectives import Collective
from shardfuse.ir.base_op import BaseOp, numbers
from shardfuse.ir.call import AlongAxis, Argsort, Call, Cat, Embedding, Flip, Pad, Select, Slice, TopK, WithRoles
from shardfuse.ir.digits import Root, axis_of
from shardfuse.ir.domain import BoundDomain
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor, Expr, reads_of
from shardfuse.ir.op import (
    Broadcast,
    Cast,
    Expand,
    Full,
    Iota,
    Move,
    OfRank,
    Op,
    Permute,
    Pick,
    Pointwise,
    Random,
    Reduce,
    Relabel,
    Reshape,
    Reshard,
    RngOffset,
    RngSeed,
    Set,
    SizeOf,
    Squeeze,
    Statistic,
    StreamCat,
    StreamSlice,
    Window,
    is_reduction,
    is_statistic,
)
from shardfuse.ir.printer import expr_text
from shardfuse.ir.scalar import Scalar
from shardfuse.ir.stream import Stream
from shardfuse.ir.window import Read
from shardfuse.mesh import ParallelType
from shardfuse.ops.table import POINTWISE
from shardfuse.ops.torch_calls import TORCH_CALLS

ROOT = Path(__file__).parents[1]
X, Y = ParallelType.mesh_x, ParallelType.mesh_y
STREAM = Stream(axis_of(Root("i0", 4)))
S0 = Scalar("S0", DataType.Int)

REFUSED: dict[str, Callable[[], BaseOp]] = {
    "an axis reduced twice": lambda: Reduce("sum", (1, 1)),
    "an axis from the end": lambda: Reduce("max", (-1,)),
    "more mesh dimensions than reduced axes": lambda: Reduce("sum", (0,), (Y, X)),
    "an order that lacks an axis": lambda: Permute((0, 2)),
    "an axis squeezed twice": lambda: Squeeze((0, 0)),
    "two reads along one axis": lambda: Window((Read(0, 0, 1, 0, 2), Read(0, 1, 1, 0, 2))),
    "an iota of two axes": lambda: Iota((2, 3), 0, 1),
    "a change of sharding over no mesh dimension": lambda: Reshard(()),
    "chunks over two mesh dimensions": lambda: Reshard((Y, X), stream=STREAM),
    "a negative rank": lambda: OfRank(-1),
    "fewer stops than starts": lambda: Slice((0, 0), (1,), (1, 1)),
    "a step of 0": lambda: Slice((0,), (1,), (0,)),
    "half a pair of widths": lambda: Pad((1, 2, 3)),
    "an axis flipped twice": lambda: Flip((1, 1)),
}

PRINTED: list[tuple[BaseOp, str]] = [
    (Pointwise("add"), "add()"),
    (Cast(), "cast()"),
    (Cast(DataType.Float), "cast(dtype=DataType.Float)"),
    (Set(), "set()"),
    (Broadcast((True, False)), "broadcast(new=(True, False))"),
    (Expand((2, 3)), "expand(shape=(2, 3))"),
    (Squeeze((0,)), "squeeze(axes=(0,))"),
    (Permute((1, 0)), "permute(dims=(1, 0))"),
    (Reshape((6,)), "reshape(shape=(6,))"),
    (Reshape((2, 3), 2), "reshape(shape=(2, 3), segments=2)"),
    (Relabel(), "relabel()"),
    (Window((Read(1, 0, 1, 0, 4),)), "window(reads=(axis 1: 0 + j, 0 <= j < 4,))"),
    (Full(()), "full(shape=())"),
    (Iota((4,), 0, 1), "iota(shape=(4,), start=0, step=1)"),
    (Random("uniform", (4,), drawn=True), "uniform(shape=(4,), drawn=True)"),
    (Reduce("sum", (0, 2)), "sum(axes=(0, 2))"),
    (Reduce("max", (0,), (X,)), "max(axes=(0,), mesh=mesh_x)"),
    (Reduce("sum", (0, 1), (Y, X)), f"sum(axes=(0, 1), mesh={(Y, X)})"),
    (Reduce("sum", (1,), segments=8), "sum(axes=(1,), segments=8)"),
    (Statistic("welford", (1,)), "welford(axes=(1,))"),
    (Pick(), "pick()"),
    (Reshard((X,)), "set(mesh=mesh_x)"),
    (Reshard((X,), is_exchange=True), f"set(mesh={(X,)}, exchange=True)"),
    (Move("send"), "set(move=send)"),
    (OfRank(1), "of_rank(rank=1)"),
    (StreamCat(STREAM), "stream_cat(stream=(i0,))"),
    (Call("matmul"), "matmul()"),
    (AlongAxis("argmax", None), "argmax(dim=None)"),
    (WithRoles("sdpfa_fwd", ("query", "key")), "sdpfa_fwd(roles=('query', 'key'))"),
    (WithRoles("grouped_mm", ("mat1",), DataType.Half), f"grouped_mm(roles=('mat1',), dtype={torch.float16})"),
    (Argsort(0, True, False), "argsort(dim=0, descending=True, stable=False)"),
    (TopK(2, 0, True, False), "topk(k=2, dim=0, largest=True, sorted=False)"),
    (Embedding(), "embedding()"),
    (Embedding(max_norm=1.0), "embedding(max_norm=1.0)"),
    (Slice((0,), (4,), (2,)), "slice(starts=(0,), stops=(4,), steps=(2,))"),
    (Select(1), "select(dim=1)"),
    (Pad((0, 1)), "pad(widths=(0, 1))"),
    (Cat(0), "cat(dim=0)"),
    (Flip((0,)), "flip(dims=(0,))"),
    (Collective("all_gather", 2), "all_gather(ranks=2)"),
    (Collective("all_reduce_sum"), "all_reduce_sum()"),
]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(AssertionError):
        REFUSED[name]()


def test_ops_do_not_change() -> None:
    op = Reduce("sum", (0,))
    with pytest.raises(FrozenInstanceError):
        op.axes = (1,)


def _text(op: Op, chunk: int | None = None, partial: int = 0) -> str:
    out = BoundTensor("T0", DataType.Float, BoundDomain(()))
    return expr_text(Expr(op, (), (out,), partial, chunk)).removeprefix("T0[]:Float = ")


@pytest.mark.parametrize(("op", "text"), PRINTED, ids=[text for _, text in PRINTED])
def test_how_an_op_is_printed(op: Op, text: str) -> None:
    assert _text(op) == text


def test_what_an_expr_adds_is_printed_behind_what_its_op_is_told() -> None:
    assert _text(Reduce("sum", (1,)), partial=1, chunk=0) == "sum(axes=(1,), partial=1, chunk=0)"
    assert _text(StreamSlice(STREAM), chunk=2) == "stream_slice(stream=(i0,), chunk=2)"
    assert _text(Reshard((X,), stream=STREAM), chunk=2) == "set(mesh=mesh_x, chunk=2, stream=(i0,))"


def test_every_op_is_printed_here() -> None:
    """A class that has no line above is one that was forgotten."""
    shown = {type(op) for op, _ in PRINTED} | {StreamSlice, SizeOf, RngSeed, RngOffset}
    assert {c for c in _below(BaseOp) if "__dataclass_params__" in vars(c)} == shown


def _below(cls: type) -> set[type]:
    return {c for child in cls.__subclasses__() for c in (child, *_below(child))}


def test_numbers_take_the_place_of_scalars() -> None:
    sliced = Slice((0, S0), (4, S0), (1, 1))
    assert sliced.scalars() == [S0, S0]
    assert sliced.with_numbers(lambda s: 7) == Slice((0, 7), (4, 7), (1, 1))
    assert TopK(S0, 0, True, True).with_numbers(lambda s: 3).k == 3
    assert Iota((S0,), S0, 1).with_numbers(lambda s: 2).counting == (2, 1)
    known = Reshape((2, 3))
    assert known.with_numbers(lambda s: 0) is known
    assert SizeOf((0, 1)).scalars() == []


def test_a_scalar_is_no_number_yet() -> None:
    assert numbers((2, 3)) == (2, 3)
    with pytest.raises(AssertionError, match="not known yet"):
        numbers((2, S0))
    with pytest.raises(AssertionError, match="not known yet"):
        _ = Iota((2,), S0, 1).counting


def test_equal_fields_are_equal_ops_of_one_class_alone() -> None:
    assert Reduce("sum", (0,)) == Reduce("sum", (0,)) != Reduce("max", (0,))
    assert Pointwise("select") != Call("select")
    assert Call("cat") != Cat(0)


def test_questions_about_kinds() -> None:
    assert is_reduction(Reduce("sum", (0,)), "sum", "prod")
    assert not is_reduction(Reduce("max", (0,)), "sum", "prod")
    assert not is_reduction(Pointwise("sum"), "sum")
    assert is_statistic(Statistic("welford", (0,)), "welford")
    assert not is_statistic(Statistic("online_softmax", (0,)), "welford")
    out = BoundTensor("T0", DataType.Float, BoundDomain(()))
    with pytest.raises(AssertionError, match="set is no window"):
        reads_of(Expr(Set(), (), (out,)))


# --- the code ----------------------------------------------------------------------------------------------


@cache
def _modules() -> list[tuple[str, ast.AST]]:
    """Those of shardfuse that know ops."""
    found = [(path, path.read_text()) for path in sorted((ROOT / "shardfuse").rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), ast.parse(text)) for path, text in found if KNOWS_OPS.search(text)]


KNOWS_OPS = re.compile(r"ir\.(expr|fusion|op|call) import|from \.(expr|fusion|op|call) import|schedulers\.|attributes")


def _is_op(node: ast.AST) -> bool:
    """``x.op`` or ``x.op.name``."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr == "op"


def _is_text(node: ast.AST) -> bool:
    """A text, or some."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_text, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _asked_by_text(tree: ast.AST) -> Iterator[int]:
    """The lines that compare an op, or its name, with a text, and those that look at a mapping of what it is told."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                if any(map(_is_op, (left, *others))) and any(map(_is_text, (left, *others))):
                    yield node.lineno
            case ast.Match(subject=subject, cases=cases) if _is_op(subject):
                patterns = [
                    q
                    for c in cases
                    for q in (c.pattern.patterns if isinstance(c.pattern, ast.MatchOr) else [c.pattern])
                ]
                if any(isinstance(q, ast.MatchValue) for q in patterns):
                    yield node.lineno
            case ast.Attribute(attr="attributes"):
                yield node.lineno
            case _:
                pass


def test_no_op_is_asked_for_by_its_text() -> None:
    """But for the nodes of torch.fx graphs: their ops are texts."""
    modules = [(path, tree) for path, tree in _modules() if not path.startswith("shardfuse/compile/")]
    assert [f"{path}:{line}" for path, tree in modules for line in _asked_by_text(tree)] == []


@pytest.mark.parametrize(
    "line",
    [
        'e.op == "sum"',
        'e.op in ("cast", "set")',
        'e.op.name != "sum"',
        'e.attributes["axes"]',
        'match e.op:\n    case "sum":\n        pass',
    ],
)
def test_a_text_would_be_found(line: str) -> None:
    assert list(_asked_by_text(ast.parse(line)))


def test_names_of_ops_in_the_code_are_entries_of_their_tables() -> None:
    """``Pointwise("sub")`` is checked by no type checker."""
    tables = {"Pointwise": POINTWISE, "Call": TORCH_CALLS, "AlongAxis": TORCH_CALLS, "WithRoles": TORCH_CALLS}
    wrong: list[str] = []
    for path, tree in _modules():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(given)), *_]) if name in tables:
                    wrong += [f"{path}:{node.lineno}: {given}"] if given not in tables[name] else []
                case ast.Call(func=ast.Name(id="map"), args=[ast.Name(id=name), ast.Tuple(elts=several)]) if (
                    name in tables
                ):
                    texts = [t.value for t in several if isinstance(t, ast.Constant)]
                    wrong += [f"{path}:{node.lineno}: {t}" for t in texts if t not in tables[name]]
                case _:
                    pass
    assert wrong == []
