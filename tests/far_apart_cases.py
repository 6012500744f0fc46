"""Tensors of few elements that lie further apart than 32 bits with a sign count, and what reads them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from shardfuse import DataType, FusionDefinition

ROWS, COLUMNS = 4, 5
STRIDES = (2**30 + 8, 2**31 + 8)
"""Elements between two rows: two of the first, and one of the second, are an offset that has no sign in 32 bits."""
BYTES = (ROWS - 1) * STRIDES[-1] + COLUMNS
"""Of memory that holds them."""

Op = Callable[[Any, Any], Any]
OPS: dict[str, tuple[Op, Callable[[torch.Tensor], torch.Tensor]]] = {
    "flip": (lambda ops, x: ops.add(ops.flip(x, [0]), 1), lambda x: x.flip(0) + 1),
    "flip both": (lambda ops, x: ops.add(ops.flip(x, [0, 1]), 1), lambda x: x.flip(0, 1) + 1),
    "cat": (
        lambda ops, x: ops.add(ops.cat([ops.slice(x, [0, 0], [2, 4]), ops.slice(x, [1, 0], [4, 4])], 0), 1),
        lambda x: torch.cat([x[:2, :4], x[1:4, :4]]) + 1,
    ),
    "pad": (
        lambda ops, x: ops.add(ops.pad(x, [1, 1, 2, 1]), 1),
        lambda x: torch.nn.functional.pad(x, (1, 1, 2, 1)) + 1,
    ),
    "slice with a step": (
        lambda ops, x: ops.add(ops.slice(x, [1, 0], [4, 4], [2, 2]), 1),
        lambda x: x[1:4:2, :4:2] + 1,
    ),
    "sum of what is flipped": (lambda ops, x: ops.sum(ops.flip(x, [0]), [0]), lambda x: x.sum(0)),
    "sum along what is flipped": (lambda ops, x: ops.sum(ops.flip(x, [0, 1]), [1]), lambda x: x.flip(0, 1).sum(1)),
}


def far_apart(memory: torch.Tensor, stride: int, *, is_transposed: bool) -> torch.Tensor:
    """[ROWS, COLUMNS], or the other way round where it is transposed, of other numbers each."""
    x = memory.as_strided((ROWS, COLUMNS), (stride, 1))
    x.copy_(torch.arange(ROWS * COLUMNS, dtype=torch.uint8).view(ROWS, COLUMNS))
    return x.T if is_transposed else x


def check_op(name: str, memory: torch.Tensor, stride: int, *, is_transposed: bool) -> None:
    """The same definition takes contiguous tensors and these: its kernels are for their strides."""
    define, by_torch = OPS[name]
    x = far_apart(memory, stride, is_transposed=is_transposed)
    with FusionDefinition(backend="triton") as fd:
        fd.add_output(define(fd.ops, fd.define_tensor([-1, -1], dtype=DataType.UInt8)))
    for given in (x.contiguous(), x):
        (found,) = fd.execute([given])
        assert torch.equal(found, by_torch(x.contiguous())), name


def check_cat(memory: torch.Tensor, stride: int) -> None:
    """Of one or several rows, and those behind the first: the second begins at a negative offset."""
    x = far_apart(memory, stride, is_transposed=False)
    for rows in range(1, ROWS):
        with FusionDefinition(backend="triton") as fd:
            inputs = [fd.define_tensor([-1, -1], dtype=DataType.UInt8) for _ in range(2)]
            fd.add_output(fd.ops.add(fd.ops.cat(inputs, 0), 1))
        (found,) = fd.execute([x[:rows], x[1:]])
        assert torch.equal(found, torch.cat([x[:rows], x[1:]]) + 1), rows


def check_sums(memory: torch.Tensor, stride: int) -> None:
    """Along rows and down columns, by one kernel."""
    x = far_apart(memory, stride, is_transposed=False)
    with FusionDefinition(backend="triton") as fd:
        t = fd.define_tensor([-1, -1], dtype=DataType.UInt8)
        fd.add_output(fd.ops.sum(t, [0]))
        fd.add_output(fd.ops.sum(t, [1]))
    for given in (x.contiguous(), x):
        columns, rows = fd.execute([given])
        assert torch.equal(columns, x.sum(0))
        assert torch.equal(rows, x.sum(1))


CASES: dict[str, Callable[[torch.Tensor], None]] = {
    **{
        f"{name}, {stride} apart, {'columns' if is_transposed else 'rows'}": partial(
            check_op, name, stride=stride, is_transposed=is_transposed
        )
        for name, stride, is_transposed in product(OPS, STRIDES, (False, True))
    },
    **{f"cat of two, {stride} apart": partial(check_cat, stride=stride) for stride in STRIDES},
    **{f"sums both ways, {stride} apart": partial(check_sums, stride=stride) for stride in STRIDES},
}
"""Each takes a tensor of ``BYTES`` bytes to lie in."""
