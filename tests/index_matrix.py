"""Ops that read at other places, combined with what they read: programs, and all placements of their operands.

A program is written once, for ``fd.ops`` and for ``Torch``, which gives torch's answer on the unsharded tensors.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fusion_check import Expected, check, widened
from ranks import run_ranks
from thread_check import shard

from shardfuse import DataType, DeviceMesh, FusionDefinition

Make = Callable[[Any, list[Any]], Any]


class Torch:
    """torch under the names of ``fd.ops``."""

    add, mul, where, gt, matmul, exp = torch.add, torch.mul, torch.where, torch.gt, torch.matmul, torch.exp
    flip, cat, tril, cumsum = torch.flip, torch.cat, torch.tril, torch.cumsum
    argsort, topk, argmax = torch.argsort, torch.topk, torch.argmax

    @staticmethod
    def index_select(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.index_select(x, dim, index)

    @staticmethod
    def gather(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.gather(x, dim, index)

    take_along_axis = staticmethod(torch.take_along_dim)

    @staticmethod
    def scatter(x: torch.Tensor, index: torch.Tensor, src: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.scatter(x, dim, index, src)

    @staticmethod
    def index_put_accumulate(x: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.index_put(x, (index,), value, accumulate=True)

    @staticmethod
    def embedding(index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight[index]

    @staticmethod
    def permute(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        return x.permute(tuple(dims))

    @staticmethod
    def slice(x: torch.Tensor, starts: Sequence[int], stops: Sequence[int]) -> torch.Tensor:
        return x[tuple(map(slice, starts, stops))]

    pad = staticmethod(torch.nn.functional.pad)

    @staticmethod
    def sum(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
        return x.sum(tuple(dims), keepdim=keepdim)

    @staticmethod
    def max(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
        return x.amax(tuple(dims), keepdim=keepdim)

    @staticmethod
    def sdpfa_fwd(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return (torch.softmax(scores, -1) @ value,)


# --- programs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """``make(ops, operands)`` is the output; ``inputs``: float64 tables and int64 indices, unsharded."""

    name: str
    inputs: list[torch.Tensor]
    make: Make


def table(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Distinct small integers, so that every sum is exact and another element is another number."""
    g = torch.Generator().manual_seed(seed)
    n = int(torch.tensor(shape).prod())
    return (torch.randperm(n, generator=g) + 1).reshape(tuple(shape)).double()


def places(shape: Sequence[int], n: int, seed: int) -> torch.Tensor:
    """Random indices below ``n``; the first is the last element and the last the first, so that they cross shards."""
    g = torch.Generator().manual_seed(seed)
    found = torch.randint(0, n, tuple(shape), generator=g)
    if found.numel():
        found.view(-1)[0], found.view(-1)[-1] = n - 1, 0
    return found


def permuted(shape: Sequence[int], n: int, dim: int, seed: int) -> torch.Tensor:
    """Indices below ``n`` none of which comes twice along ``dim``, the largest and the smallest in exchanged places."""
    g = torch.Generator().manual_seed(seed)
    long = [*shape[:dim], n, *shape[dim + 1 :]]
    return torch.rand(long, generator=g).argsort(dim).flip(dim).narrow(dim, 0, shape[dim]).contiguous()


def combined(found: Make, operands: int) -> dict[str, Make]:
    """``found`` with each of its operands by every op that makes axes of the two meet, before and behind it."""
    made: dict[str, Make] = {"alone": found}
    for k in range(operands):
        made |= {
            f"add {k}": lambda o, t, k=k: o.add(found(o, t), t[k]),
            f"mul before {k}": lambda o, t, k=k: o.mul(t[k], found(o, t)),
            f"where {k}": lambda o, t, k=k: o.where(o.gt(t[k], 2), found(o, t), t[k]),
            f"cat {k}": lambda o, t, k=k: o.cat([found(o, t), o.mul(t[k], 1.0)], 0),
            f"last cat before {k}": lambda o, t, k=k: o.cat([o.mul(t[k], 1.0), found(o, t)], -1),
            f"matmul {k}": lambda o, t, k=k: o.matmul(found(o, t), o.mul(t[k], 1.0)),
            f"matmul before {k}": lambda o, t, k=k: o.matmul(o.mul(t[k], 1.0), found(o, t)),
            f"add turned {k}": lambda o, t, k=k: o.add(found(o, t), o.permute(t[k], [1, 0])),
            f"add to both {k}": lambda o, t, k=k: o.add(found(o, [o.mul(x, 1) for x in t]), o.add(t[k], t[0])),
        }
    return made


def index_programs(n: int, m: int, count: int) -> Iterator[Program]:
    """Each index op of tables of [n] and [n, m], of ``count`` indices, with its table and its index."""
    for name, inputs, found in _index_ops(n, m, count):
        operands = [table(s, 1) if isinstance(s, list) else s for s in inputs]
        for how, make in combined(found, len(operands)).items():
            yield Program(f"{name} of {[list(x.shape) for x in operands]}, {how}", operands, make)


Shapes = list[list[int] | torch.Tensor]


def _index_ops(n: int, m: int, c: int) -> Iterator[tuple[str, Shapes, Make]]:
    """The shapes of tables, and indices."""
    row, wide = places([c], n, 2), places([c, m], n, 3)
    yield "index_select", [[n], row], lambda o, t: o.index_select(t[0], t[1], 0)
    yield "index_select", [[n, m], row], lambda o, t: o.index_select(t[0], t[1], 0)
    yield "index_select of columns", [[m, n], row], lambda o, t: o.index_select(t[0], t[1], 1)
    yield "index_select of itself", [row.clamp(max=c - 1)], lambda o, t: o.index_select(t[0], t[0], 0)
    yield "gather", [[n], row], lambda o, t: o.gather(t[0], t[1], 0)
    yield "gather", [[n, m], wide], lambda o, t: o.gather(t[0], t[1], 0)
    yield "gather of columns", [[m, n], wide.t().contiguous()], lambda o, t: o.gather(t[0], t[1], 1)
    yield "gather of one column", [[n, m], wide[:, :1].contiguous()], lambda o, t: o.gather(t[0], t[1], 0)
    yield "take_along_axis", [[n], row], lambda o, t: o.take_along_axis(t[0], t[1], 0)
    yield "take_along_axis", [[n, m], wide], lambda o, t: o.take_along_axis(t[0], t[1], 0)
    yield "take_along_axis of columns", [[m, n], wide.t().contiguous()], lambda o, t: o.take_along_axis(t[0], t[1], 1)
    yield "take_along_axis, one index", [[n, m], wide[:, :1].contiguous()], lambda o, t: o.take_along_axis(*t[:2], 0)
    yield "take_along_axis of one column", [[n, 1], wide], lambda o, t: o.take_along_axis(t[0], t[1], 0)
    yield "take_along_axis of itself", [row.clamp(max=c - 1)], lambda o, t: o.take_along_axis(t[0], t[0], 0)
    yield "embedding", [[n, m], row], lambda o, t: o.embedding(t[1], t[0])
    yield "embedding", [[n, m], wide], lambda o, t: o.embedding(t[1], t[0])
    few = min(c, n)
    yield "scatter", [[n], permuted([few], n, 0, 4), [few]], lambda o, t: o.scatter(t[0], t[1], t[2], 0)
    yield "scatter", [[n, m], permuted([few, m], n, 0, 5), [few, m]], lambda o, t: o.scatter(t[0], t[1], t[2], 0)
    last = permuted([m, few], n, 1, 6)
    yield "scatter of columns", [[m, n], last, [m, few]], lambda o, t: o.scatter(t[0], t[1], t[2], 1)
    last = permuted([few, 1], n, 0, 7)
    yield "scatter of one column", [[n, m], last, [few, m]], lambda o, t: o.scatter(t[0], t[1], t[2], 0)
    yield "scatter from one column", [[n, m], last, [few, 1]], lambda o, t: o.scatter(t[0], t[1], t[2], 0)
    yield "index_put_accumulate", [[n], row, [c]], lambda o, t: o.index_put_accumulate(*t)
    yield "index_put_accumulate", [[n, m], row, [c, m]], lambda o, t: o.index_put_accumulate(*t)
    yield "index_put_accumulate of one", [[n, m], row[:1], [1, m]], lambda o, t: o.index_put_accumulate(*t)


def other_programs(n: int) -> Iterator[Program]:
    """The other ops that read along an axis at other places than they write, with what they read, square."""
    makes: dict[str, Make] = {
        "flip": lambda o, t: o.flip(t[0], [0]),
        "cumsum": lambda o, t: o.cumsum(t[0], 0),
        "argsort": lambda o, t: o.argsort(t[0], 0),
        "topk": lambda o, t: o.topk(t[0], n, 0)[0],
        "argmax": lambda o, t: o.argmax(t[0], 0, True),
        "roll": lambda o, t: o.cat([o.slice(t[0], [n - 1, 0], [n, n]), o.slice(t[0], [0, 0], [n - 1, n])], 0),
        "shift": lambda o, t: o.pad(o.slice(t[0], [0, 1], [n, n]), [1, 0]),
        "tril": lambda o, t: o.tril(t[0]),
        "softmax": lambda o, t: o.mul(t[0], o.sum(o.exp(o.mul(t[0], -1.0)), [0], True)),
        "centred": lambda o, t: o.add(t[0], o.max(o.permute(t[0], [1, 0]), [0], True)),
        "matmul": lambda o, t: o.matmul(t[0], t[0]),
        "gram": lambda o, t: o.matmul(t[0], o.permute(t[0], [1, 0])),
        "attention": lambda o, t: o.sdpfa_fwd(o.mul(t[0], 0.1), t[0], t[0])[0],
    }
    for name, found in makes.items():
        for how, make in combined(found, 1).items():
            yield Program(f"{name} of [{n}, {n}], {how}", [table([n, n], 1)], make)


# --- placements --------------------------------------------------------------------------------------------

Placed = tuple[tuple[int, str] | None, ...]
"""For each mesh dimension the axis that it cuts and how, or None."""


def placements(shape: Sequence[int], mesh: DeviceMesh) -> list[Placed]:
    """Replicated, blocks of each axis, and cyclic where that is even; for each mesh dimension."""
    found: list[Placed] = [()]
    for parallel_type in mesh.parallel_types:
        ranks = mesh.extent(parallel_type)
        one: list[tuple[int, str] | None] = [None, *((k, "outer") for k in range(len(shape)))]
        one += [(k, "inner") for k, n in enumerate(shape) if n % ranks == 0 and mesh.ndim == 1]
        found = [(*head, tail) for head in found for tail in one]
    return found


@dataclass
class Placement:
    """A program with a placement for each input, and for the output or None (it is not said)."""

    program: Program
    mesh: DeviceMesh
    placed: tuple[Placed, ...]
    output: Placed | None = None

    def __str__(self) -> str:
        return f"{self.program.name}; on {self.mesh} {self.placed} to {self.output}"

    def define(self) -> FusionDefinition:
        with FusionDefinition(backend="torch") as fd:
            operands = [
                fd.define_tensor(list(x.shape), dtype=DataType.from_torch(x.dtype)) for x in self.program.inputs
            ]
            out = self.program.make(fd.ops, operands)
            fd.add_output(out)
            for tv, placed in zip(operands, self.placed, strict=True):
                shard(tv, self.mesh, *zip(self.mesh.parallel_types, placed, strict=True))
            if self.output is not None:
                shard(out, self.mesh, *zip(self.mesh.parallel_types, self.output, strict=True))
        return fd

    def expected(self) -> list[Expected]:
        eager = self.program.make(Torch, self.program.inputs)
        return [Expected(eager, widened(eager))]


SIZES = ((4, 4, 4), (6, 4, 3), (5, 3, 5), (2, 2, 2), (3, 1, 2), (1, 2, 3), (12, 8, 12))
"""Of the table along the axis that is indexed, along the other, and of the indices."""


ANSWERED = 2700
"""Programs of which torch has an answer at least; the others are of shapes that do not go together."""


def programs() -> list[Program]:
    """All that have an answer: of shapes that do not go together torch has none."""
    made = [p for sizes in SIZES for p in index_programs(*sizes)]
    made += [p for n in (2, 3, 4, 6) for p in other_programs(n)]
    found = [p for p in made if _answer(p) is not None]
    assert len(found) >= ANSWERED, f"torch has an answer of {len(found)} of {len(made)} programs"
    return found


def _answer(program: Program) -> torch.Tensor | None:
    try:
        return program.make(Torch, program.inputs)
    except (RuntimeError, IndexError):
        return None


def all_placements(found: Sequence[Program], mesh: DeviceMesh) -> Iterator[Placement]:
    """Every placement of every input; of the output none is said."""
    for program in found:
        for placed in itertools.product(*(placements(x.shape, mesh) for x in program.inputs)):
            yield Placement(program, mesh, placed)


def some_placements(found: Sequence[Program], mesh: DeviceMesh, count: int, seed: int) -> list[Placement]:
    """Random ones of random programs, for every second the placement of the output too."""
    rng = random.Random(seed)
    made: list[Placement] = []
    for program in (rng.choice(found) for _ in range(count)):
        placed = tuple(rng.choice(placements(x.shape, mesh)) for x in program.inputs)
        out = program.make(Torch, program.inputs)
        made.append(Placement(program, mesh, placed, rng.choice([None, rng.choice(placements(out.shape, mesh))])))
    return made


def run_placements(world: int, cases: Sequence[Placement]) -> None:
    """Every case on ranks that are threads, against torch."""
    ready: list[tuple[Placement, FusionDefinition, list[Expected]]] = []
    for case in cases:
        try:
            fd = case.define()
            inputs = [i.val for i in fd.fusion.inputs]
            fd.fec.plan({tv: x.shape for tv, x in zip(inputs, case.program.inputs, strict=True)})
        except Exception as error:
            error.add_note(f"planning {case}")
            raise
        ready.append((case, fd, case.expected()))

    def run(rank: int, _: int) -> None:
        for case, fd, expected in ready:
            inputs = case.program.inputs
            sizes = {i.val: x.shape for i, x in zip(fd.fusion.inputs, inputs, strict=True)}
            try:
                check(fd, inputs, sizes=sizes, expected=expected)
            except Exception as error:
                error.add_note(f"rank {rank}, {case}:\n{fd!r}")
                raise

    run_ranks(world, run)
