"""Each pass turns the text before it in its docstring into the text after it; and what a docstring has no room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from thread_check import Case, X, check_on_threads, shard, world_mesh

from shardfuse import DataType, FusionDefinition
from shardfuse.ir.expr import BoundFusion
from shardfuse.ir.printer import fusion_text
from shardfuse.ir.verify import verify
from shardfuse.passes import (
    PASSES,
    bind,
    casts,
    concatenated_pieces,
    copies,
    dead_code,
    decompose,
    propagate,
    settle_inputs,
    windows,
)

Define = Callable[[FusionDefinition], None]


def docstring_texts(module: ModuleType) -> list[str]:
    """The indented blocks of a module's docstring: before, after."""
    blocks: list[list[str]] = []
    inside = False
    for line in (module.__doc__ or "").splitlines():
        if line.startswith("    "):
            if not inside:
                blocks.append([])
            blocks[-1].append(line[4:])
            inside = True
        elif line.strip():
            inside = False
    return ["\n".join(block) for block in blocks]


def bound(define: Define, sizes: Sequence[Sequence[int]], until: str | None = None) -> BoundFusion:
    """What ``define`` records, with every pass run before the one called ``until``; verified after each."""
    with FusionDefinition() as fd:
        define(fd)
    inputs = fd.fusion.tensors()[: len(sizes)]
    fusion = bind(fd.fusion, dict(zip(inputs, sizes, strict=True)))
    verify(fusion, "bind")
    for run in PASSES:
        if run.__name__ == until:
            break
        run(fusion)
        verify(fusion, run.__name__)
    return fusion


def unused(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1])
    fd.ops.neg(x)
    fd.add_output(fd.ops.exp(x))


def there_and_back(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1], dtype=DataType.BFloat16)
    wide = fd.ops.cast(x, DataType.Float)
    fd.add_output(fd.ops.neg(fd.ops.cast(wide, DataType.BFloat16)))
    fd.add_output(fd.ops.exp(wide))


def one_said(fd: FusionDefinition) -> None:
    x, w = fd.define_tensor([8, 4]), fd.define_tensor([4])
    fd.add_output(fd.ops.add(x, w))
    x.set_device_mesh(world_mesh(2))
    x.outer_split(0, 2)
    x.axis(0).parallelize(X)
    w.set_device_mesh(world_mesh(2))


def columns_to_all(fd: FusionDefinition) -> None:
    x = fd.define_tensor([8, 4])
    outputs = fd.ops.sum(x, [1]), fd.ops.exp(x)
    for tv in outputs:
        fd.add_output(tv)
    shard(x, world_mesh(2), (X, (1, "outer")))
    for tv in outputs:
        tv.set_device_mesh(world_mesh(2))


def copied_total(fd: FusionDefinition) -> None:
    x = fd.define_tensor([2, 8])
    total = fd.ops.sum(x, [0])
    fd.add_output(fd.ops.set(total))
    shard(x, world_mesh(2), (X, (0, "outer")))


def turned_halves(fd: FusionDefinition) -> None:
    x = fd.define_tensor([9, 4])
    low, high = fd.ops.slice(x, [0, 0], [9, 2]), fd.ops.slice(x, [0, 2], [9, 4])
    fd.add_output(fd.ops.mul(fd.ops.cat([fd.ops.neg(high), low], 1), x))


def turned_rest(fd: FusionDefinition) -> None:
    x = fd.define_tensor([9, 4])
    low, high = fd.ops.slice(x, [0, 0], [9, 1]), fd.ops.slice(x, [0, 1], [9, 4])
    fd.add_output(fd.ops.mul(fd.ops.cat([fd.ops.neg(high), low], 1), x))


@pytest.mark.parametrize(
    ("module", "define", "sizes"),
    [
        (dead_code, unused, [(8,)]),
        (casts, there_and_back, [(8,)]),
        (propagate, one_said, [(8, 4), (4,)]),
        (decompose, columns_to_all, [(8, 4)]),
        (copies, copied_total, [(2, 8)]),
        (concatenated_pieces, turned_halves, [(9, 4)]),
        (windows, turned_rest, [(9, 4)]),
    ],
    ids=lambda value: value.__name__.split(".")[-1] if isinstance(value, ModuleType) else "",
)
def test_the_docstring(module: ModuleType, define: Define, sizes: Sequence[Sequence[int]]) -> None:
    run = next(p for p in PASSES if p.__module__ == module.__name__)
    before, after = docstring_texts(module)
    fusion = bound(define, sizes, until=run.__name__)
    assert fusion_text(fusion) == before
    run(fusion)
    assert fusion_text(fusion) == after


def test_settle_inputs() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1, -1]), fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.add(x, y))
    shard(x, world_mesh(2), (X, (0, "outer")))
    before, after = docstring_texts(settle_inputs)
    assert before in _schedule(fd)
    settle_inputs.settle_inputs(fd.fusion)
    assert _schedule(fd) == after


def _schedule(fd: FusionDefinition) -> str:
    lines = [line.strip() for line in repr(fd).splitlines()]
    return "\n".join(line for line in lines if not line.startswith(("fd.", "def ")) and "= fd." not in line)


# --- remove_copies -----------------------------------------------------------------------------------------


def test_copies_of_what_somebody_else_has_stay() -> None:
    def define(fd: FusionDefinition) -> None:
        x, y = fd.define_tensor([2, 8]), fd.define_tensor([2, 8])
        total = fd.ops.sum(x, [0])
        fd.add_output(total)
        fd.add_output(fd.ops.set(total))  # two results, two tensors
        piece = fd.ops.set(y)
        fd.add_output(fd.ops.set(piece))  # sliced out of an input
        for tv in (x, piece):
            shard(tv, world_mesh(2), (X, (0, "outer")))
        y.set_device_mesh(world_mesh(2))

    text = fusion_text(bound(define, [(2, 8), (2, 8)]))
    assert text.count(" = set(") == 3, text


# --- combine_casts -----------------------------------------------------------------------------------------


def chain(*dtypes: DataType) -> str:
    """The ops that are left of a chain of casts, the last of them of the input."""

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1], dtype=dtypes[0])
        for dtype in dtypes[1:]:
            x = fd.ops.cast(x, dtype)
        fd.add_output(fd.ops.neg(x))

    lines = fusion_text(bound(define, [(8,)])).splitlines()[1:-1]
    return "; ".join(line.split(" = ")[1] for line in lines)


def test_narrowing_casts_stay() -> None:
    half, single, double = DataType.BFloat16, DataType.Float, DataType.Double
    assert chain(single, half, single) == "cast(T0, dtype=DataType.BFloat16); cast(T1, dtype=DataType.Float); neg(T2)"
    assert chain(half, single, half) == "neg(T0)"
    assert chain(half, single, double) == "cast(T0, dtype=DataType.Double); neg(T2)"
    assert chain(DataType.Int, DataType.Float, DataType.Int).count("cast") == 2
    assert chain(DataType.Half, half, DataType.Half).count("cast") == 2


# --- propagate_shardings -----------------------------------------------------------------------------------


def shardings(define: Define, sizes: Sequence[Sequence[int]]) -> dict[str, str]:
    fusion = bound(define, sizes, until="decompose_resharding")
    return {t.name: ", ".join(f"{p}: {' '.join(map(str, d))}" for p, d in t.domain.sharding) for t in fusion.tensors()}


def test_backward_to_what_is_made_of_unsaid_inputs() -> None:
    """The result is sharded, nothing else is said: everything that leads to it is computed in shards."""

    def define(fd: FusionDefinition) -> None:
        x, w = fd.define_tensor([8, 4]), fd.define_tensor([8, 1])
        y = fd.ops.mul(fd.ops.exp(x), w)
        fd.add_output(y)
        shard(y, world_mesh(2), (X, (0, "outer")))

    assert dict.fromkeys(shardings(define, [(8, 4), (8, 1)]).values()) == {"mesh_x: i0/4": None}


def test_the_largest_input_decides() -> None:
    def define(fd: FusionDefinition) -> None:
        x, y = fd.define_tensor([8, 8]), fd.define_tensor([8])
        fd.add_output(fd.ops.add(y, x))
        shard(x, world_mesh(2), (X, (0, "outer")))
        shard(y, world_mesh(2), (X, (0, "outer")))

    assert list(shardings(define, [(8, 8), (8,)]).values()) == ["mesh_x: i0/4", "mesh_x: i2/4", "mesh_x: i0/4"]


def test_a_reshape_keeps_what_it_can() -> None:
    """Halves of 12 go through [2, 6], and not through [3, 4]."""

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([12])
        fd.add_output(fd.ops.reshape(x, [2, 6]))
        fd.add_output(fd.ops.reshape(x, [3, 4]))
        shard(x, world_mesh(2), (X, (0, "outer")))

    assert list(shardings(define, [(12,)]).values()) == ["mesh_x: i0/6", "mesh_x: i0/6", ""]


@pytest.mark.parametrize("how", ["dealt out", "merged"])
def test_an_input_beside_one_that_is_cut_otherwise(how: str) -> None:
    """y, of which nothing is said, beside columns that are dealt out in turn, and beside all elements one by one."""
    world = 2 if how == "dealt out" else 6
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([2, 3 * 2]), fd.define_tensor([2, 3 * 2])
        fd.add_output(fd.ops.add(x, y))
    x.set_device_mesh(world_mesh(world))
    if how == "dealt out":
        x.inner_split(1, 2).axis(2).parallelize(X)
    else:
        x.inner_split(1, 2).merge(0).axis(0).parallelize(X)
    data = [torch.arange(12.0).reshape(2, 6), 100 * torch.arange(12.0).reshape(2, 6)]
    check_on_threads(world, [Case(fd, data)])
    if how == "dealt out":
        assert [(str(p), axis.extent) for p, axis in y.domain.mesh_axes().items()] == [
            (str(p), axis.extent) for p, axis in x.domain.mesh_axes().items()
        ]
        assert [axis.extent for axis in y.domain.loop] == [axis.extent for axis in x.domain.loop]
