"""Random small fusions with random shardings; a seed replays a case.

Values are small integers (and now and then a NaN), so that sums and products are exact and a wrong element is far off.

A seed that fails: ``print(random_case(seed)[1])`` shows the definition, ``run_cases([seed])`` runs it again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from thread_check import Case, check_on_threads

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.executor.options import Backend
from shardfuse.ir.tensor_view import TensorView

SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 12)
FLOATS = (DataType.Double, DataType.Float, DataType.BFloat16)


def random_case(
    seed: int, worlds: Sequence[int] = (2, 3, 4), backend: Backend | None = "torch", *, with_zero: bool = False
) -> Case:
    """The case of ``seed``: 1 to 3 inputs, 1 to 7 ops, 1 to 3 outputs, shardings on some of them."""
    return _Maker(random.Random(seed), backend, with_zero).make(seed, worlds)


def run_cases(
    seeds: Iterable[int],
    worlds: Sequence[int] = (2, 3, 4),
    backend: Backend | None = "torch",
    *,
    with_zero: bool = False,
) -> None:
    """Run the case of every seed on ranks that are threads, and compare."""
    by_world: dict[int, list[Case]] = {}
    for seed in seeds:
        world, case = random_case(seed, worlds, backend, with_zero=with_zero)
        by_world.setdefault(world, []).append(case)
    for world, cases in by_world.items():
        check_on_threads(world, cases)


Known = tuple[TensorView, tuple[int, ...]]


@dataclass
class _Maker:
    rng: random.Random
    backend: Backend | None
    with_zero: bool
    known: list[Known] = field(default_factory=list[Known])
    centred: list[TensorView] = field(default_factory=list[TensorView])

    def make(self, seed: int, worlds: Sequence[int]) -> tuple[int, Case]:
        rng = self.rng
        world = rng.choice(worlds)
        self.fd = FusionDefinition(backend=self.backend)
        self.wide = rng.choice(FLOATS)
        inputs = [self.input() for _ in range(rng.randint(1, 3))]
        self.given = given = list(self.known)
        for _ in range(rng.randint(1, 7)):
            self.op()
        made = self.known[len(given) :] or given
        outputs = [made[-1], *rng.sample(made, min(len(made), rng.randint(0, 2)))]
        for tv, _ in dict.fromkeys(outputs):
            self.fd.add_output(tv)
        mesh = self.mesh(world)
        meshes = [mesh, mesh, mesh, DeviceMesh(rng.sample(range(world), rng.randint(1, world)))]
        shape_of = dict(self.known)
        for tv in self.fd.fusion.tensors():
            chance = 0.6 if tv in self.fd.fusion.outputs or any(tv is g for g, _ in given) else 0.1
            if tv in shape_of and rng.random() < chance:
                self.shard(tv, shape_of[tv], rng.choice(meshes) if rng.random() < 0.2 else mesh)
        sizes = dict(given)
        return world, Case(self.fd, inputs, sizes, name=f"seed {seed}, {world} ranks")

    # the program

    def size(self) -> int:
        return 0 if self.with_zero and self.rng.random() < 0.2 else self.rng.choice(SIZES)

    def input(self) -> torch.Tensor:
        """Of a fresh shape, or of one that an earlier input can be broadcast with."""
        rng = self.rng
        if self.known and rng.random() < 0.8:
            whole = rng.choice(self.known)[1]
            shape = [n if rng.random() < 0.8 else 1 for n in whole[rng.randint(0, len(whole)) :]]
        else:
            shape = [self.size() for _ in range(rng.randint(1, 3))]
        dtype = rng.choice((self.wide, self.wide, self.wide, DataType.Int))
        declared = [n if n == 1 or rng.random() < 0.4 else -1 for n in shape]
        tv = self.fd.define_tensor(declared, dtype=dtype)
        self.known.append((tv, tuple(shape)))
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        x = torch.randint(-2, 4, shape, generator=generator).to(dtype.torch)
        if dtype.is_floating and x.numel() and rng.random() < 0.05:
            x.view(-1)[rng.randrange(x.numel())] = float("nan")
        return x

    def op(self) -> None:
        pick = self.rng.choice(
            (self.unary, self.binary, self.binary, self.reduce, self.reduce, self.statistics, self.permute,
             self.reshape, self.broadcast, self.cast, self.copy, self.select, self.slice, self.pad, self.cat,
             self.cat, self.turn, self.matmul, self.softmax, self.index, self.index, self.scan)
        )  # fmt: skip
        pick(*self.rng.choice(self.known))

    def add(self, tv: TensorView, shape: Sequence[int]) -> None:
        if all(tv is not old for old, _ in self.known):
            self.known.append((tv, tuple(shape)))

    def unary(self, x: TensorView, shape: tuple[int, ...]) -> None:
        name = self.rng.choice(("neg", "abs", "relu", "tanh", "sigmoid"))
        self.add(getattr(self.fd.ops, name)(x), shape)

    def partner(self, shape: tuple[int, ...]) -> Known:
        """A tensor that ``shape`` can be broadcast with; often an axis of it meets another one."""
        fits = [(tv, s) for tv, s in self.known if _broadcast(s, shape) is not None]
        return self.rng.choice(fits)

    def binary(self, x: TensorView, shape: tuple[int, ...]) -> None:
        y, other = self.partner(shape)
        name = self.rng.choice(("add", "sub", "mul", "maximum", "minimum"))
        if self.rng.random() < 0.2:
            self.add(getattr(self.fd.ops, name)(x, self.rng.choice((2, 0.5))), shape)
            return
        self.add(getattr(self.fd.ops, name)(x, y), cast("tuple[int, ...]", _broadcast(shape, other)))

    def select(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """A choice by a comparison of an input, which is exact."""
        first, its_shape = self.known[0]
        if _broadcast(its_shape, shape) is None:
            return
        condition = self.fd.ops.gt(first, 0)
        self.add(self.fd.ops.where(condition, x, 1.0), cast("tuple[int, ...]", _broadcast(its_shape, shape)))

    def reduce(self, x: TensorView, shape: tuple[int, ...]) -> None:
        if not shape:
            return
        axes = self.rng.sample(range(len(shape)), self.rng.randint(1, len(shape)))
        keepdim = self.rng.random() < 0.5
        empty = 0 in [shape[k] for k in axes]
        name = "sum" if empty else self.rng.choice(("sum", "sum", "max", "min", "mean"))
        if name in ("sum", "mean") and self.is_centred(x):  # a sum to 0 has no digit that is right
            x = self.fd.ops.abs(x)
        self.add(getattr(self.fd.ops, name)(x, axes, keepdim=keepdim), _reduced(shape, axes, keepdim))

    def is_centred(self, x: TensorView) -> bool:
        """Was ``x`` made of something that its mean was taken from?"""
        made_of = {out: r.inputs for r in self.fd.fusion.records for out in r.outputs}
        todo: list[object] = [x]
        for value in todo:
            if value in self.centred:
                return True
            todo += [v for v in made_of.get(cast("Any", value), ()) if v not in todo]
        return False

    def statistics(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """The variance, and the input less its mean."""
        if not shape or not x.dtype.is_floating:
            return
        axes = self.rng.sample(range(len(shape)), self.rng.randint(1, len(shape)))
        var, mean = self.fd.ops.var_mean(x, axes, correction=0, keepdim=True)
        self.add(var, _reduced(shape, axes, True))
        self.centred.append(self.fd.ops.sub(x, mean))
        self.add(self.centred[-1], shape)

    def permute(self, x: TensorView, shape: tuple[int, ...]) -> None:
        order = self.rng.sample(range(len(shape)), len(shape))
        if len(shape) > 1:
            self.add(self.fd.ops.permute(x, order), [shape[d] for d in order])

    def reshape(self, x: TensorView, shape: tuple[int, ...]) -> None:
        new = self.regrouped(shape) if self.rng.random() < 0.7 else _factors(prod(shape), self.rng)
        if new != list(shape):
            self.add(self.fd.ops.reshape(x, new), new)

    def regrouped(self, shape: Sequence[int]) -> list[int]:
        """Two neighbours joined, or one axis cut in two."""
        k = self.rng.randrange(max(len(shape), 1))
        if len(shape) > 1 and self.rng.random() < 0.5:
            k = min(k, len(shape) - 2)
            return [*shape[:k], shape[k] * shape[k + 1], *shape[k + 2 :]]
        if not shape or shape[k] == 0:
            return list(shape)
        inner = self.rng.choice([d for d in range(1, shape[k] + 1) if shape[k] % d == 0])
        return [*shape[:k], shape[k] // inner, inner, *shape[k + 1 :]]

    def broadcast(self, x: TensorView, shape: tuple[int, ...]) -> None:
        if len(shape) > 3:
            return
        at = self.rng.randint(0, len(shape))
        size = self.size()
        out = self.fd.ops.unsqueeze(x, at)
        new = [*shape[:at], 1, *shape[at:]]
        if self.rng.random() < 0.6:
            new[at] = size
            out = self.fd.ops.expand(out, new)
        self.add(out, new)

    def matmul(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """With a matrix that fits, or with itself the other way round; of doubles, whose sums are exact."""
        if len(shape) < 2 or x.dtype is not DataType.Double:
            return
        fits = [(t, s) for t, s in self.known if len(s) == 2 and s[0] == shape[-1] and t.dtype is DataType.Double]
        if fits and self.rng.random() < 0.7:
            y, other = self.rng.choice(fits)
        else:
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            y, other = self.fd.ops.permute(x, order), [shape[d] for d in order]
        self.add(self.fd.ops.matmul(x, y), [*shape[:-1], other[-1]])

    def softmax(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """Over one axis or two."""
        axes = self.rng.sample(range(len(shape)), min(len(shape), self.rng.choice((1, 1, 2))))
        if not axes or 0 in [shape[k] for k in axes] or not x.dtype.is_floating:
            return
        top = self.fd.ops.max(x, axes, keepdim=True)
        powers = self.fd.ops.exp(self.fd.ops.sub(x, top))
        total = self.fd.ops.sum(powers, axes, keepdim=True)
        self.add(total, _reduced(shape, axes, True))
        self.add(self.fd.ops.truediv(powers, total), shape)

    def cast(self, x: TensorView, shape: tuple[int, ...]) -> None:
        if x.dtype.is_floating:
            self.add(self.fd.ops.cast(x, self.rng.choice(FLOATS)), shape)

    def copy(self, x: TensorView, shape: tuple[int, ...]) -> None:
        self.add(self.fd.ops.set(x), shape)

    def slice(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """A part along one axis or two, now and then every second element."""
        starts, stops, steps = [0] * len(shape), list(shape), [1] * len(shape)
        for k in self.rng.sample(range(len(shape)), min(len(shape), self.rng.choice((1, 1, 2)))):
            if shape[k] > 1:
                starts[k] = self.rng.randrange(shape[k])
                stops[k] = self.rng.randint(starts[k] + 1, shape[k])
                steps[k] = self.rng.choice((1, 1, 1, 2))
        new = [-(-(b - a) // s) for a, b, s in zip(starts, stops, steps, strict=True)]
        self.add(self.fd.ops.slice(x, starts, stops, steps), new)

    def pad(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """Wider or narrower at the ends of the last axes."""
        if not shape:
            return
        count = self.rng.randint(1, min(len(shape), 2))
        new, widths = list(shape), list[int]()
        for k in range(len(shape) - 1, len(shape) - 1 - count, -1):
            pair = [self.rng.choice((0, 0, 1, 2, 3, -1)) for _ in range(2)]
            if shape[k] + min(pair[0], 0) + min(pair[1], 0) < 1:
                pair = [0, 1]
            widths += pair
            new[k] += sum(pair)
        value = self.rng.choice((None, 0, 1, 2))
        self.add(self.fd.ops.pad(x, widths, value), new)

    def cat(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """With another of like shape, or with a part of itself and its negative, as in a rotary embedding."""
        if not shape:
            return
        k = self.rng.randrange(len(shape))
        like = [(t, s) for t, s in self.known if [*s[:k], *s[k + 1 :]] == [*shape[:k], *shape[k + 1 :]] and len(s) > k]
        pieces = [(x, shape), self.rng.choice(like)]
        if shape[k] > 1 and self.rng.random() < 0.5:
            at = self.rng.randrange(1, shape[k])
            zeros = [0] * len(shape)
            low = self.fd.ops.slice(x, zeros, [*shape[:k], at, *shape[k + 1 :]])
            high = self.fd.ops.slice(x, [*zeros[:k], at, *zeros[k + 1 :]], list(shape))
            pieces = [(self.fd.ops.neg(high), (*shape[:k], shape[k] - at, *shape[k + 1 :])),
                      (low, (*shape[:k], at, *shape[k + 1 :]))]  # fmt: skip
        total = sum(s[k] for _, s in pieces)
        self.add(self.fd.ops.cat([t for t, _ in pieces], k), [*shape[:k], total, *shape[k + 1 :]])

    def turn(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """In reverse along an axis, or one index of it."""
        if not shape:
            return
        k = self.rng.randrange(len(shape))
        if shape[k] and self.rng.random() < 0.5:
            index = self.rng.randrange(-shape[k], shape[k])
            self.add(self.fd.ops.select(x, index, k), [*shape[:k], *shape[k + 1 :]])
        else:
            self.add(self.fd.ops.flip(x, [k]), shape)

    def index(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """At places that an input, whose elements are exact, tells; half of the time added to its table or index."""
        y, other = self.rng.choice(self.given)
        if not shape or not other or 0 in (*shape, *other):
            return
        k = self.rng.randrange(len(shape))
        at = self.fd.ops.minimum(self.fd.ops.argsort(y, self.rng.randrange(len(other)), stable=True), shape[k] - 1)
        found: list[Known] = []
        if len(other) == 1:
            found.append((self.fd.ops.index_select(x, at, k), (*shape[:k], other[0], *shape[k + 1 :])))
        new = _broadcast((*shape[:k], 1, *shape[k + 1 :]), (*other[:k], 1, *other[k + 1 :]))
        if len(other) == len(shape) and new is not None:
            found.append((self.fd.ops.take_along_axis(x, at, k), (*new[:k], other[k], *new[k + 1 :])))
        if len(shape) == 2 and k == 0 and len(other) < 3 and x.dtype.is_floating:
            found.append((self.fd.ops.embedding(at, x), (*other, shape[1])))
        for out, new in found:
            self.add(out, new)
            tv, its = self.rng.choice([(x, shape), (y, other), (at, other)])
            if self.rng.random() < 0.7 and (wide := _broadcast(its, new)) is not None:
                self.add(self.fd.ops.add(out, tv), wide)

    def scan(self, x: TensorView, shape: tuple[int, ...]) -> None:
        """Along an axis; of what rounding cannot reorder."""
        if shape and 0 not in shape and not self.is_centred(x):
            name = self.rng.choice(("cumsum", "cummax", "cummin"))
            self.add(getattr(self.fd.ops, name)(x, self.rng.randrange(len(shape))), shape)

    # shardings

    def mesh(self, world: int) -> DeviceMesh:
        rng = self.rng
        ranks = rng.sample(range(world), world)
        if rng.random() < 0.5:
            ranks.sort()
        rows = [d for d in range(1, world + 1) if world % d == 0]
        if rng.random() < 0.35:
            n = rng.choice(rows)
            return DeviceMesh([ranks[k * (world // n) : (k + 1) * (world // n)] for k in range(n)])
        return DeviceMesh(ranks)

    def shard(self, tv: TensorView, shape: tuple[int, ...], mesh: DeviceMesh) -> None:
        """Each mesh dimension takes the outer part of an axis, its inner part, or nothing."""
        tv.set_device_mesh(mesh)
        extents = list(shape)  # of the loop axes, as they are cut
        free = list(range(len(shape)))  # loop axes not yet on a mesh dimension
        ragged: list[int] = []  # loop axes below an uneven cut
        for parallel_type in self.rng.sample(mesh.parallel_types, mesh.ndim):
            ranks = mesh.extent(parallel_type)
            if (
                extents == list(shape)
                and self.rng.random() < 0.15
                and self.shard_flattened(tv, shape, parallel_type, ranks)
            ):
                return
            if not free or self.rng.random() < 0.25:
                continue
            at = self.rng.choice(free)
            inner = self.rng.random() < 0.3 and extents[at] % ranks == 0 and at not in ragged
            blocks = 2 if inner and extents[at] % (2 * ranks) == 0 and self.rng.random() < 0.5 else 1
            if blocks > 1:  # block-cyclic: the blocks' own axis stands inside
                tv.inner_split(at, blocks)
                extents[at : at + 1] = [extents[at] // blocks, blocks]
                free, ragged = ([k + (k > at) for k in axes] for axes in (free, ragged))
            if inner:
                tv.inner_split(at, ranks)
                tv.axis(at + 1).parallelize(parallel_type)
                extents[at : at + 1] = [extents[at] // ranks, ranks]
            else:
                even = extents[at] % ranks == 0 and at not in ragged and self.rng.random() < 0.7
                tv.outer_split(at, ranks, uneven=not even)
                tv.axis(at).parallelize(parallel_type)
                extents[at : at + 1] = [ranks, -(-extents[at] // ranks)]
            taken = at + 1 if inner else at
            free = [k + (k > at) for k in free if k != at] + [at if inner else at + 1]
            ragged = [k + (k > at) for k in ragged] + ([] if inner or even else [taken + 1])

    def shard_flattened(self, tv: TensorView, shape: tuple[int, ...], p: ParallelType, ranks: int) -> bool:
        """Two neighbours as one axis, the outer or inner part of it on ``p``, where a rank's piece is a box."""
        found = [k for k in range(len(shape) - 1) if 0 not in shape[k : k + 2] and shape[k] % ranks == 0]
        inner = [k for k in range(len(shape) - 1) if 0 not in shape[k : k + 2] and shape[k + 1] % ranks == 0]
        if not (found or inner):
            return False
        cyclic = not found or (bool(inner) and self.rng.random() < 0.5)
        at = self.rng.choice(inner if cyclic else found)
        tv.merge(at)
        tv.split(at, ranks, inner_split=cyclic)
        tv.axis(at + cyclic).parallelize(p)
        return True


def _broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    try:
        return tuple(torch.broadcast_shapes(tuple(a), tuple(b)))
    except RuntimeError:
        return None


def _reduced(shape: Sequence[int], axes: Sequence[int], keepdim: bool) -> list[int]:
    return [1 if k in axes else n for k, n in enumerate(shape) if keepdim or k not in axes]


def _factors(total: int, rng: random.Random) -> list[int]:
    """A random shape of ``total`` elements."""
    out: list[int] = []
    while total > 1 and len(out) < 3:
        out.append(rng.choice([d for d in range(1, total + 1) if total % d == 0]))
        total //= out[-1]
    return [*out, total] if total != 1 or not out else out
