"""Ops of three operands, of which two have one index along different axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfuse import DataType, FusionDefinition
from shardfuse.compile import backend

CASES: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    "where": (lambda o, x, c: o.where(o.gt(x, 0), c, o.add(c, x)), lambda x, c: torch.where(x > 0, c, c + x)),
    "where, turned": (lambda o, x, c: o.where(o.ne(c, 0), x, o.add(c, x)), lambda x, c: torch.where(c != 0, x, c + x)),
    "where of two": (lambda o, x, c: o.where(o.gt(c, x), c, x), lambda x, c: torch.where(c > x, c, x)),
    "where, last": (lambda o, x, c: o.where(o.gt(x, 0), o.sub(c, x), c), lambda x, c: torch.where(x > 0, c - x, c)),
    "lerp": (lambda o, x, c: o.lerp(x, c, o.add(c, x)), lambda x, c: torch.lerp(x, c, c + x)),
    "addcmul": (lambda o, x, c: o.addcmul(x, c, o.add(c, x), 1.0), lambda x, c: torch.addcmul(x, c, c + x)),
}  # fmt: skip


@pytest.mark.parametrize("size", [-1, 5])
@pytest.mark.parametrize("name", CASES)
def test_a_vector_beside_itself_as_a_column(name: str, size: int) -> None:
    """What was relabelled to meet one of them no longer met the other, and so on without an end."""
    own, wanted = CASES[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([size], dtype=DataType.Float)
        fd.add_output(own(fd.ops, x, fd.ops.unsqueeze(x, 1)))
    for seed in range(2):
        given = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(fd.execute([given])[0], wanted(given, given[:, None]))


def test_a_mean_beside_the_column_that_it_is_of() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 1], dtype=DataType.Float)
        mean = fd.ops.mean(x, [1])
        fd.add_output(fd.ops.where(fd.ops.ne(mean, 0), x, fd.ops.add(x, mean)))
    given = torch.tensor([[1.0], [0.0], [3.0]])
    mean = given.mean(1)
    torch.testing.assert_close(fd.execute([given])[0], torch.where(mean != 0, given, given + mean))


def test_a_compiled_function() -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        column = x[:, None]
        return torch.where(x > 0, column, column + x).softmax(-1)

    x = torch.randn(5, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(chosen, backend=backend, options={"shardfuse.take": "all"})
    torch.testing.assert_close(compiled(x), chosen(x))
