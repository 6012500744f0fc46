"""Sizes of uneven shards that other inputs tell, or that ranks are asked for; axes in between may be broadcast."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from thread_check import Case, X, check_on_threads, shard, world_mesh

from shardfuse import FusionDefinition
from shardfuse.frontend.argument_checks import asks_other_ranks
from shardfuse.ir.dtype import DataType
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops

BETWEEN: dict[str, Callable[[Ops, TensorView], TensorView]] = {
    "a reshape to -1": lambda ops, t: ops.reshape(t, [-1]),
    "an input of one element": lambda ops, t: ops.sum(t, [1]),
    "a slice of a reshape": lambda ops, t: ops.neg(ops.flip(ops.reshape(t, [-1]), [0])),
}


def met_by_both(
    between: Callable[[Ops, TensorView], TensorView], shape: Sequence[int], rows: int, others: int, world: int
) -> Case:
    """x, whose rows are cut unevenly, and y, which every rank has whole, meet what is made of t; never each other."""
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1], dtype=DataType.Double) for _ in range(2))
        t = fd.define_tensor([-1, -1], dtype=DataType.Double)
        middle = between(fd.ops, t)
        fd.add_output(fd.ops.add(x, middle))
        fd.add_output(fd.ops.mul(y, middle))
    shard(x, world_mesh(world), (X, (0, "outer")))
    for tv in (y, t):
        tv.set_device_mesh(world_mesh(world))
    draw = torch.Generator().manual_seed(rows)
    full = [torch.randn(n, generator=draw, dtype=torch.float64) for n in ([rows], [others], list(shape))]
    return Case(fd, full, name=f"{rows} and {others} rows, {list(shape)} in between")


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_meets_one_element_need_not_be_equally_long(between: str, world: int) -> None:
    cases = [met_by_both(BETWEEN[between], (1, 1), rows, others, world) for rows in (7, 2, 0) for others in (5, 1, 0)]
    cases += [met_by_both(BETWEEN[between], (7, 1), 7, others, world) for others in (7, 1)]
    check_on_threads(world, [case for case in cases if case.inputs[0].shape[0] != 1])


def test_what_inputs_tell_is_not_asked_for() -> None:
    def asked(join: Callable[[Ops, TensorView, TensorView], TensorView]) -> bool:
        with FusionDefinition() as fd:
            x, y = fd.define_tensor([-1, -1]), fd.define_tensor([-1, -1])
            fd.add_output(join(fd.ops, x, y))
        shard(x, world_mesh(2), (X, (0, "outer")))
        y.set_device_mesh(world_mesh(2))
        return asks_other_ranks(fd.fusion)

    assert not asked(lambda ops, x, y: ops.add(x, y))
    assert not asked(lambda ops, x, y: ops.add(ops.add(ops.exp(x), ops.sum(x, [1], keepdim=True)), ops.neg(y)))
    assert not asked(lambda ops, x, y: ops.add(ops.expand(ops.sum(x, [1], keepdim=True), [-1, 3]), y))
    assert not asked(lambda ops, x, y: ops.add(ops.add(x, ops.reshape(y, [-1, 2])), y))
    assert asked(lambda ops, x, y: ops.add(x, ops.reshape(y, [-1, 2])))
    assert asked(lambda ops, x, y: ops.add(ops.reshape(x, [-1, 2]), y))


class _Program:
    """A random chain of ops over axes of a few lengths, all sizes symbolic, rows of some inputs cut unevenly."""

    def __init__(self, seed: int, world: int) -> None:
        self.rng = rng = random.Random(seed)
        self.n = rng.choice((2, 3, 4, 5, 7, 9))
        self.fd = FusionDefinition()
        self.inputs: list[torch.Tensor] = []
        self.known: list[tuple[TensorView, tuple[int, ...]]] = []
        draw = torch.Generator().manual_seed(seed)
        mesh = world_mesh(world)
        with self.fd:
            cut: list[TensorView] = []
            for k in range(rng.randint(2, 5)):
                long = rng.choice((self.n, self.n, self.n + 1))
                shape = (long,) if rng.random() < 0.5 else (long, rng.choice((1, 1, 2, long)))
                uneven = k == 0 or rng.random() < 0.4
                if not uneven and rng.random() < 0.5:
                    shape = (1, *shape[1:])
                tv = self.fd.define_tensor([-1] * len(shape), dtype=DataType.Double)
                cut += [tv] if uneven else []
                self.known.append((tv, shape))
                self.inputs.append(torch.randint(-3, 4, shape, generator=draw).double())
            given = [tv for tv, _ in self.known]
            for _ in range(rng.randint(2, 9)):
                self.op()
            for tv, _ in self.known[len(given) :][-3:] or self.known[:1]:
                self.fd.add_output(tv)
        for tv in given:
            shard(tv, mesh, (X, (0, "outer"))) if tv in cut else tv.set_device_mesh(mesh)

    def op(self) -> None:
        ops, (x, shape) = self.fd.ops, self.rng.choice(self.known)
        match self.rng.choice(("flat", "back", "sum", "meet", "meet", "meet", "unsqueeze", "expand")):
            case "flat":
                self.known.append((ops.reshape(x, [-1]), (torch.Size(shape).numel(),)))
            case "back" if shape and torch.Size(shape).numel() % 2 == 0:
                self.known.append((ops.reshape(x, [-1, 2]), (torch.Size(shape).numel() // 2, 2)))
            case "sum" if len(shape) == 2:
                k = self.rng.randrange(2)
                self.known.append((ops.sum(x, [k]), shape[1 - k :][:1]))
            case "unsqueeze" if len(shape) == 1:
                self.known.append((ops.unsqueeze(x, 1), (*shape, 1)))
            case "expand" if len(shape) == 2 and shape[1] == 1:
                self.known.append((ops.expand(x, [-1, 3]), (shape[0], 3)))
            case "meet":
                y, other = self.rng.choice(self.known)
                try:
                    whole = tuple(torch.broadcast_shapes(shape, other))
                except RuntimeError:
                    return
                self.known.append((ops.add(x, y), whole))
            case _:
                pass


@pytest.mark.parametrize("world", [3, 4])
def test_random_programs_of_symbolic_sizes(world: int) -> None:
    for first in range(0, 400, 100):
        programs = [_Program(seed, world) for seed in range(first, first + 100)]
        check_on_threads(world, [Case(p.fd, p.inputs, name=f"seed {first + k}") for k, p in enumerate(programs)])
