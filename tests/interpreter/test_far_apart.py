"""Few elements that lie further apart than 32 bits with a sign count, read at other places: backward, and behind an
offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfuse import DataType, FusionDefinition

ROWS, COLUMNS = 4, 5
STRIDES = (2**30 + 8, 2**31 + 8)
"""Elements between two rows: two of the first, and one of the second, are an offset that has no sign in 32 bits."""


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Of a file without content: the system provides the pages that are touched alone."""
    path, size = tmp_path_factory.mktemp("far_apart") / "memory", (ROWS - 1) * STRIDES[-1] + COLUMNS
    with path.open("wb") as file:
        file.truncate(size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


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


@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", OPS)
def test_like_torch(name: str, stride: int, is_transposed: bool, memory: torch.Tensor) -> None:
    define, by_torch = OPS[name]
    x = far_apart(memory, stride, is_transposed=is_transposed)
    with FusionDefinition(backend="triton") as fd:
        fd.add_output(define(fd.ops, fd.define_tensor([-1, -1], dtype=DataType.UInt8)))
    for given in (x.contiguous(), x):  # the same definition: its kernels are for these strides
        (found,) = fd.execute([given])
        assert torch.equal(found, by_torch(x.contiguous())), name


@pytest.mark.parametrize("stride", STRIDES)
def test_two_that_follow_one_another(stride: int, memory: torch.Tensor) -> None:
    x = far_apart(memory, stride, is_transposed=False)
    for rows in range(1, ROWS):
        with FusionDefinition(backend="triton") as fd:
            inputs = [fd.define_tensor([-1, -1], dtype=DataType.UInt8) for _ in range(2)]
            fd.add_output(fd.ops.add(fd.ops.cat(inputs, 0), 1))
        (found,) = fd.execute([x[:rows], x[1:]])
        assert torch.equal(found, torch.cat([x[:rows], x[1:]]) + 1), rows


@pytest.mark.parametrize("stride", STRIDES)
def test_sums_both_ways(stride: int, memory: torch.Tensor) -> None:
    x = far_apart(memory, stride, is_transposed=False)
    with FusionDefinition(backend="triton") as fd:
        t = fd.define_tensor([-1, -1], dtype=DataType.UInt8)
        fd.add_output(fd.ops.sum(t, [0]))
        fd.add_output(fd.ops.sum(t, [1]))
    for given in (x.contiguous(), x):
        columns, rows = fd.execute([given])
        assert torch.equal(columns, x.sum(0))
        assert torch.equal(rows, x.sum(1))


def far_apart(memory: torch.Tensor, stride: int, *, is_transposed: bool) -> torch.Tensor:
    """[ROWS, COLUMNS], or the other way round where it is transposed, of other numbers each."""
    x = memory.as_strided((ROWS, COLUMNS), (stride, 1))
    x.copy_(torch.arange(ROWS * COLUMNS, dtype=torch.uint8).view(ROWS, COLUMNS))
    return x.T if is_transposed else x
