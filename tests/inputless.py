"""Fusions without inputs, as nvFuser's programs have them: their outputs are on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardfuse.compat.nvfuser_direct import DataType, FusionDefinition


def halves_of_ones(fd: FusionDefinition) -> None:
    one, size = fd.define_scalar(1.0, dtype=DataType.Double), fd.define_scalar(5, dtype=DataType.Int)
    ones = fd.ops.full(shape=[size], fill_value=one, dtype=DataType.Float)
    for start, stop in ((0, 2), (2, 5)):
        piece = fd.ops.slice(ones, start_indices=[start], end_indices=[stop], strides=[1])
        fd.add_output(fd.ops.cast(piece, dtype=DataType.Half))


def causal_mask(fd: FusionDefinition) -> None:
    rows, columns, first, step = (fd.define_scalar(n, dtype=DataType.Int) for n in (4, 5, 0, 1))
    along = fd.ops.iota(columns, first, step, dtype=DataType.Int)
    down = fd.ops.iota(rows, first, step, dtype=DataType.Int)
    across = fd.ops.expand(fd.ops.broadcast(along, is_broadcast_dim=[True, False]), shape=[rows, columns])
    below = fd.ops.expand(fd.ops.broadcast(down, is_broadcast_dim=[False, True]), shape=[rows, columns])
    lowest = fd.define_scalar(-3.38953e38, dtype=DataType.BFloat16)
    masked = fd.ops.full(shape=[rows, columns], fill_value=lowest, dtype=DataType.BFloat16)
    is_after = fd.ops.ge(fd.ops.sub(across, below), fd.define_scalar(1, dtype=DataType.Int))
    fd.add_output(fd.ops.gt(across, below))
    fd.add_output(fd.ops.where(is_after, masked, fd.define_scalar(0.0, dtype=DataType.Double)))


def drawn(fd: FusionDefinition) -> None:
    shape = [fd.define_scalar(n, dtype=DataType.Int) for n in (3, 4)]
    bounds = [fd.define_scalar(v, dtype=DataType.Double) for v in (-1.0, 2.0)]
    fd.add_output(fd.ops.uniform(*bounds, shape, dtype=DataType.Float))


def counted_twice(fd: FusionDefinition) -> None:
    """A library's call that reads no tensor, which writes into a part of what is made."""
    counted = fd.ops.iota(5)
    two = fd.ops.cat([counted, fd.ops.neg(counted)], 0)
    fd.add_output(fd.ops.neg(two))
    fd.add_output(fd.ops.logical_not(two))


def _counted_twice_by_torch() -> list[torch.Tensor]:
    two = torch.cat([-torch.arange(5), torch.arange(5)])
    return [two, two == 0]


def _causal_mask_by_torch() -> list[torch.Tensor]:
    is_after = torch.ones(4, 5).triu(1).bool()
    return [is_after, torch.where(is_after, torch.tensor(-3.38953e38).bfloat16(), torch.tensor(0.0).bfloat16())]


INPUTLESS: dict[str, tuple[Callable[[FusionDefinition], None], Callable[[], list[torch.Tensor]] | None]] = {
    "halves of ones": (halves_of_ones, lambda: [torch.ones(2).half(), torch.ones(3).half()]),
    "causal mask": (causal_mask, _causal_mask_by_torch),
    "counted twice": (counted_twice, _counted_twice_by_torch),
    "drawn": (drawn, None),
}


def defined(define: Callable[[FusionDefinition], None]) -> FusionDefinition:
    with FusionDefinition() as fd:
        define(fd)
    return fd


def check_inputless(name: str, device: torch.device) -> None:
    """Executed twice, from its own text, and validated: the same values, all on ``device``."""
    define, by_torch = INPUTLESS[name]
    fd = defined(define)
    space: dict[str, object] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
    exec(repr(fd), space)
    found: list[list[torch.Tensor]] = []
    for run in (fd.execute, defined(space["nvfuser_fusion"]).execute, fd.validate, defined(define).validate):
        torch.manual_seed(0)
        found.append(run([]))
    for outputs in found:
        assert [x.device for x in outputs] == [device] * len(outputs)
        expected = found[0] if by_torch is None else by_torch()
        for x, wanted in zip(outputs, expected, strict=True):
            assert x.dtype is wanted.dtype
            assert torch.equal(x.cpu(), wanted.cpu())
