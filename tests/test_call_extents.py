"""Sizes that do not fit each other in one call of torch's: one sentence of shardfuse's, and never torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thread_check import X, shard, world_mesh

from shardfuse import DataType, FusionDefinition
from shardfuse.errors import OperandError, ShapeError

Build = Callable[..., Any]
Shapes = Sequence[tuple[int, ...]]
F, INT, U = torch.float32, torch.int64, torch.uint64


def defined(build: Build, shapes: Shapes, dtypes: Sequence[torch.dtype], *, is_static: bool) -> FusionDefinition:
    with FusionDefinition(backend="torch") as fd:
        given = [
            fd.define_tensor(list(s) if is_static else [-1] * len(s), dtype=DataType.from_torch(d))
            for s, d in zip(shapes, dtypes, strict=True)
        ]
        found = build(fd.ops, *given)
        for out in found if isinstance(found, tuple) else (found,):
            fd.add_output(out)
    return fd


def values(shapes: Shapes, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    return [torch.zeros(s).to(d) for s, d in zip(shapes, dtypes, strict=True)]


def scaled(o: Any, *given: Any) -> Any:
    return o.block_scaled_mm(*given)


def grouped(o: Any, *given: Any) -> Any:
    return o.scaled_grouped_mm(*given)


def attention(o: Any, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    return o.sdpfa_fwd(q, k, v, mask)


def backward(o: Any, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any) -> Any:
    return o.sdpfa_bwd(grad, q, k, v, out, lse, 0.0, False, seed, offset)


Q, MANY = (2, 2, 4, 8), (2, 2, 5, 8)


def backward_of(**other: tuple[int, ...]) -> Shapes:
    right = {"grad": Q, "q": Q, "k": MANY, "v": MANY, "out": Q, "lse": (2, 2, 4), "seed": (2,), "offset": ()}
    return list({**right, **other}.values())


BACKWARD = (*[F] * 6, U, U)
GROUPED = (F, F, torch.int32, *[F] * 5)
MISFITS: dict[str, tuple[Build, Shapes, Sequence[torch.dtype], str]] = {
    "gather, a longer index": (
        lambda o, x, i: o.gather(x, i, 1), [(3, 4), (5, 2)], (F, INT),
        "gather: found extent 5 in axis 0 of T1 and 3 in axis 0 of T0, expected 3 at most in "
        "the former; correct the sizes",
    ),
    "gather, of one row": (lambda o, x, i: o.gather(x, i, 1), [(1, 4), (5, 2)], (F, INT), "expected 1 at most"),
    "scatter, a longer index": (
        lambda o, x, i, s: o.scatter(x, i, s, 1), [(3, 4), (5, 2), (5, 2)], (F, INT, F), "axis 0 of T0",
    ),
    "scatter, a shorter source": (
        lambda o, x, i, s: o.scatter(x, i, s, 1), [(3, 4), (3, 2), (3, 1)], (F, INT, F), "axis 1 of T2",
    ),
    "scatter, of a number": (lambda o, x, i: o.scatter(x, i, 1.0, 1), [(3, 4), (5, 2)], (F, INT), "expected 3 at most"),
    "index_put, a longer value": (
        lambda o, x, i, v: o.index_put_accumulate(x, i, v), [(3, 4), (1,), (5, 4)], (F, INT, F), "expected 1 in",
    ),
    "index_put, wider values": (
        lambda o, x, i, v: o.index_put_accumulate(x, i, v), [(3, 1), (5,), (5, 4)], (F, INT, F), "axis 1 of T2",
    ),
    "linear, one row and a longer bias": (
        lambda o, *t: o.linear(*t), [(3, 4), (1, 4), (5,)], (F, F, F), "linear: found extent 5 in axis 0 of T2",
    ),
    "attention, fewer keys": (attention, [Q, (2, 2, 1, 8), MANY], (F, F, F), "extent 1 in axis 2 of T1"),
    "attention, fewer values": (attention, [Q, MANY, (2, 2, 1, 8)], (F, F, F), "1 in axis 2 of T2"),
    "attention, features of one": (attention, [Q, (2, 2, 5, 1), MANY], (F, F, F), "expected 8 in the former"),
    "attention, more heads than the query's": (
        attention, [(2, 1, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)], (F, F, F), "extent 3 in axis 1 of T1",
    ),
    "attention, other heads": (attention, [Q, (2, 3, 5, 8), (2, 3, 5, 8)], (F, F, F), "expected 1 or 2 in the former"),
    "attention, a longer mask": (
        attention, [(2, 2, 1, 8), MANY, MANY, (4, 5)], (F, F, F, F), "extent 4 in axis 0 of T3",
    ),
    "attention, a wider mask": (attention, [Q, (2, 2, 1, 8), (2, 2, 1, 8), (4, 5)], (F, F, F, F), "axis 1 of T3"),
    "attention backward, one gradient": (backward, backward_of(grad=(2, 2, 1, 8)), BACKWARD, "axis 2 of T0"),
    "attention backward, one key": (backward, backward_of(k=(2, 2, 1, 8)), BACKWARD, "axis 2 of T2"),
    "attention backward, sums of one": (backward, backward_of(lse=(2, 2, 1)), BACKWARD, "axis 2 of T5"),
    "blocks that do not divide": (
        scaled, [(4, 8), (8, 6), (4, 3), (2, 6)], [F] * 4, "expected a number of blocks that divides 8 in the former",
    ),
    "no blocks": (scaled, [(4, 8), (8, 6), (4, 0), (2, 6)], [F] * 4, "extent 0 in axis 1 of T2"),
    "more blocks than elements": (scaled, [(4, 8), (8, 6), (4, 2), (2, 12)], [F] * 4, "extent 12 in axis 1 of T3"),
    "a longer bias of scaled blocks": (
        scaled, [(4, 8), (8, 6), (4, 2), (2, 6), (), (5,)], [F] * 6, "extent 5 in axis 0 of T5",
    ),
    "a batch of biases": (
        scaled, [(4, 8), (8, 6), (4, 2), (2, 6), (), (2, 4, 6)], [F] * 6, "expected 1; correct the sizes",
    ),
    "scales of other rows": (
        grouped, [(4, 8), (2, 8, 6), (2,), (3, 1), (2, 1, 6)], GROUPED[:5], "expected 4 in the former",
    ),
    "scales of other groups": (
        grouped, [(4, 8), (2, 8, 6), (2,), (4, 1), (3, 1, 6)], GROUPED[:5], "expected 2 in the former",
    ),
    "scales of what is added up": (
        grouped, [(4, 8), (2, 8, 6), (2,), (4, 8), (2, 1, 6)], GROUPED[:5], "extent 8 in axis 1 of T3",
    ),
    "a longer bias of scaled groups": (
        grouped, [(4, 8), (2, 8, 6), (2,), (4, 1), (2, 1, 6), (), (5,)], GROUPED[:7], "extent 5 in axis 0 of T6",
    ),
    "a row beyond an embedding's": (
        lambda o, i, w: o.embedding(i, w, 7), [(3,), (2, 4)], (INT, F), "padding_idx",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_sizes_that_do_not_fit(case: str) -> None:
    """Known when the program is called; what a definition says is refused by itself, in the same words."""
    build, shapes, dtypes, said = MISFITS[case]
    fd = defined(build, shapes, dtypes, is_static=False)
    with pytest.raises(ShapeError) as error:
        fd.execute(values(shapes, dtypes))
    sentence, *lines = str(error.value).split("\n")
    assert said in sentence
    assert "test_call_extents.py" in "".join(lines), "the line of the call"
    assert not getattr(error.value, "__notes__", [])
    with pytest.raises((ShapeError, OperandError)) as at_once:
        defined(build, shapes, dtypes, is_static=True)
    assert not getattr(at_once.value, "__notes__", [])


TAKEN: dict[str, tuple[Build, Shapes, Sequence[torch.dtype]]] = {
    "a shorter index": (lambda o, x, i: o.gather(x, i, 1), [(3, 4), (2, 9)], (F, INT)),
    "an index of nothing": (lambda o, x, i: o.gather(x, i, 1), [(3, 4), (5, 0)], (F, INT)),
    "a longer source": (lambda o, x, i, s: o.scatter(x, i, s, 1), [(3, 4), (2, 5), (3, 6)], (F, INT, F)),
    "nothing to write": (lambda o, x, i, s: o.scatter(x, i, s, 1), [(3, 4), (5, 0), (1, 1)], (F, INT, F)),
    "one value for all": (lambda o, x, i, v: o.index_put_accumulate(x, i, v), [(3, 4), (5,), (1, 1)], (F, INT, F)),
    "a bias of one": (lambda o, *t: o.linear(*t), [(3, 4), (5, 4), (1,)], (F, F, F)),
    "one head of keys": (attention, [(2, 3, 4, 8), (2, 1, 5, 8), (2, 1, 5, 8)], (F, F, F)),
    "a mask of keys": (attention, [Q, MANY, MANY, (5,)], (F, F, F, F)),
    "values of other features": (attention, [Q, MANY, (2, 2, 5, 3)], (F, F, F)),
    "a scale of the whole matrix": (scaled, [(4, 8), (8, 6), (), (2, 6)], [F] * 4),
    "blocks of rows too": (scaled, [(4, 8), (8, 6), (2, 2), (2, 3)], [F] * 4),
    "a bias of columns": (scaled, [(4, 8), (8, 6), (4, 2), (2, 6), (), (1, 4, 6)], [F] * 6),
}


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("case", TAKEN)
def test_sizes_that_fit(case: str, is_static: bool) -> None:
    build, shapes, dtypes = TAKEN[case]
    found = defined(build, shapes, dtypes, is_static=is_static).execute(values(shapes, dtypes))
    assert not found[0].any(), "of zeros"


def test_a_single_scale_multiplies_the_whole_matrix() -> None:
    """It ended by an error of zip's."""
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    fd = defined(
        lambda o, *t: o.block_scaled_mm(*t, dtype=DataType.Float), [(4, 8), (8, 6), (), ()], [F] * 4, is_static=False
    )
    (found,) = fd.execute([a, b, torch.tensor(2.0), torch.tensor(0.25)])
    torch.testing.assert_close(found, a @ b / 2)


@pytest.mark.parametrize("ndim", [0, 1, 3])
def test_scales_of_another_rank(ndim: int) -> None:
    shapes = [(4, 8), (2, 8, 6), (2,), (4, 1, 1)[:ndim], (2, 1, 6)]
    with pytest.raises(OperandError, match=r"scaled_grouped_mm: scale1 is .*, expected one of 2 dims"):
        defined(grouped, shapes, GROUPED[:5], is_static=False)


def test_a_longer_bias_where_the_contracted_axis_is_sharded() -> None:
    """Partial sums of one column met a bias of five: "shape '[1, 3, 5]' is invalid for input of size 3"."""

    def run(rank: int, world: int) -> str:
        with FusionDefinition() as fd:
            x, weight, bias = fd.define_tensor([3, 8]), fd.define_tensor([1, 8]), fd.define_tensor([-1])
            fd.add_output(fd.ops.linear(x, weight, bias))
        shard(x, world_mesh(world), (X, (1, "outer")))
        shard(weight, world_mesh(world), (X, (1, "outer")))
        bias.set_device_mesh(world_mesh(world))
        with pytest.raises(ShapeError) as error:
            fd.execute([torch.ones(3, 4), torch.ones(1, 4), torch.ones(5)])
        return str(error.value)

    for message in run_ranks(2, run):
        assert "linear: found extent 5 in axis 0 of T2" in message


@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize(
    "shapes", [[(0, 8), (8, 4), (0, 1), (1, 4)], [(3, 8), (8, 0), (3, 1), (1, 0)], [(3, 0), (0, 4), (3, 1), (1, 4)]]
)
def test_products_of_nothing_have_scales(shapes: Shapes, is_static: bool) -> None:
    """As of a rank without tokens."""
    fd = defined(lambda o, *t: o.block_scaled_mm(*t, dtype=DataType.Float), shapes, [F] * 4, is_static=is_static)
    (found,) = fd.execute(values(shapes, [F] * 4))
    assert found.shape == (shapes[0][0], shapes[1][1])
    assert not found.any()
