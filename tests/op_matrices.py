"""Cases of products of matrices, grouped and scaled, and of attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from op_attention import ATTENTION
from op_cases import Draw, OpCase, called

from shardfuse import DataType


def _matmul(d: Draw) -> OpCase:
    m, k, n = (d.pick(1, 2, 3, 4, 7) for _ in range(3))
    batch = d.shape(0, 2, 2, 3, 4)
    dtype = d.pick(torch.float64, torch.float32)
    left, right = d.pick(([*batch, m, k], [k, n]), ([*batch, m, k], [*batch, k, n]), ([*batch, m, k], [k]), ([k], [k]))
    return called(lambda o, t: o.matmul(*t), torch.matmul, [d.tensor(left, dtype), d.tensor(right, dtype)])


def _linear(d: Draw) -> OpCase:
    k, n, rows = d.pick(1, 2, 4, 7), d.pick(1, 2, 4, 7), d.shape(0, 2)
    weight = d.pick([n, k], [k])
    shapes = [[*rows, k], weight, *([weight[:-1]] if d.pick(True, False) else [])]
    dtype = d.pick(torch.float64, torch.float32)

    def torchs(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        if weight.ndim == 1 and bias:  # which torch does not take
            return x @ weight + bias[0]
        return torch.nn.functional.linear(x, weight, *bias)

    return called(lambda o, t: o.linear(*t), torchs, [d.tensor(s, dtype) for s in shapes])


def _ends(d: Draw, groups: int) -> tuple[int, torch.Tensor]:
    """How many rows ``groups`` have, some none, and where each ends."""
    counts = [d.integer(0, 3) for _ in range(groups - 1)]
    ends = list(itertools.accumulate([*counts, d.integer(1, 3)]))
    return ends[-1], torch.tensor(ends, dtype=torch.int32)


def grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A product for each group, group by group; where no matrix has an axis of groups, they cut the contracted one."""
    spans = list(zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True))
    if a.ndim == 3 and b.ndim == 3:
        return torch.stack([x @ y for x, y in zip(a, b, strict=True)])
    if a.ndim == 2 and b.ndim == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    if a.ndim == 2:
        return torch.cat([a[i:j] @ b[g] for g, (i, j) in enumerate(spans)])
    return torch.cat([a[g] @ b[:, i:j] for g, (i, j) in enumerate(spans)], 1)


def _group_shapes(d: Draw) -> tuple[list[int], list[int], torch.Tensor, int]:
    """Shapes of two matrices and the ends of their groups, which lie along m, n or k, or are an axis."""
    groups, m, k, n = d.integer(1, 3), *(d.pick(1, 2, 4, 5) for _ in range(3))
    total, ends = _ends(d, groups)
    left, right = d.pick(
        ([total, k], [groups, k, n]),
        ([groups, m, k], [k, total]),
        ([m, total], [total, n]),
        ([groups, m, k], [groups, k, n]),
    )
    return left, right, ends, groups


def _grouped_mm(d: Draw) -> OpCase:
    left, right, ends, _ = _group_shapes(d)
    dtype = d.pick(torch.float64, torch.float32)
    values = [d.tensor(left, dtype), d.tensor(right, dtype), ends]
    return called(lambda o, t: o.grouped_mm(*t), grouped, values)


def _scaled_grouped_mm(d: Draw) -> OpCase:
    """Scales of the rows and columns: with the groups in front where those cut the contracted axis, or are one."""
    left, right, ends, groups = _group_shapes(d)
    values = [d.tensor(left, torch.float32), d.tensor(right, torch.float32), ends]
    own = len(left) == len(right)
    rows = [left[0], 1] if len(left) == 2 else [groups, left[1], 1]
    columns = [1, right[-1]] if len(right) == 2 else [groups, 1, right[-1]]
    if own:
        rows, columns = [groups, left[-2], 1], [groups, 1, right[-1]]
    values += [d.tensor(rows, torch.float32), d.tensor(columns, torch.float32)]

    def torchs(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, s: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        if len(left) == 2 and len(right) == 2:
            return grouped(a, b, ends) * s * r
        return grouped(a * s, b * r, ends)

    return called(lambda o, t: o.scaled_grouped_mm(*t, dtype=DataType.Float), torchs, values)


def _block_scaled_mm(d: Draw) -> OpCase:
    m, n, blocks, width = (d.pick(1, 2, 3, 4) for _ in range(4))
    k = blocks * width
    shapes = [[m, k], [k, n], [m, blocks], [blocks, n], *([[], [n]] if d.pick(True, False) else [])]

    def torchs(*given: torch.Tensor) -> torch.Tensor:
        a, b, s, r, *rest = given
        out = (a * s.repeat_interleave(width, 1)) @ (b * r.repeat_interleave(width, 0))
        return out if not rest else out * rest[0] + rest[1]

    def build(o: Any, t: list[Any]) -> Any:
        alpha, bias = t[4:] or (None, None)
        return o.block_scaled_mm(*t[:4], alpha=alpha, bias=bias, dtype=DataType.Float)

    return called(build, torchs, [d.tensor(s, torch.float32) for s in shapes])


MATRICES: dict[str, Callable[[Draw], OpCase]] = {
    "matmul": _matmul, "linear": _linear, "grouped_mm": _grouped_mm, "scaled_grouped_mm": _scaled_grouped_mm,
    "block_scaled_mm": _block_scaled_mm, **ATTENTION,
}  # fmt: skip
