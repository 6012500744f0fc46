# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""One padded tensor where Inductor pads a matrix product's operand twice, as it is and transposed.

before, of the gradient ``y`` of logits, whose length no wide load takes::

    %pad = aten.constant_pad_nd(%y, [0, 7])
    %permute = aten.permute(%y, [1, 0])
    %pad_1 = aten.constant_pad_nd(%permute, [0, 0, 0, 7])
    %sum = aten.sum(%y, [0])

after::

    %pad = aten.constant_pad_nd(%y, [0, 7])
    %permute_1 = aten.permute(%pad, [1, 0])
    %sum_1 = aten.sum(%pad, [0])
    %slice = aten.slice(%sum_1, 0, 0, 50257)

``y`` itself then need not be stored.  A product reads its operands in any order of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.fx import Graph, Node

from .translation import argument, known, tensor_of

_PAD = torch.ops.aten.constant_pad_nd.default
_PERMUTE = torch.ops.aten.permute.default
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_SUM = torch.ops.aten.sum.dim_IntList
_SLICE = torch.ops.aten.slice.Tensor


def share_pads(graph: Graph) -> None:
    for y in list(graph.nodes):
        if y.op == "call_function" and isinstance(y.meta.get("val"), torch.Tensor):
            _share(graph, y)


def _share(graph: Graph, y: Node) -> None:
    """Of ``y``: pads behind its end that products read, as it is or transposed, as one."""
    shape = tensor_of(y).shape
    if any(known(n) < 0 for n in shape):
        return
    plain = [u for u in y.users if _is_pad_for_products(u)]
    turned = [(p, u) for p in y.users if p.target is _PERMUTE for u in p.users if _is_pad_for_products(u)]
    widths = {_after(u, None) for u in plain} | {_after(u, p) for p, u in turned}
    values = {argument(u, 2, "value", 0) for u in (*plain, *(u for _, u in turned))}
    if not turned or len(widths) != 1 or len(values) != 1:
        return
    (after,), value = widths, cast(float, next(iter(values)))
    if min(after) < 0:
        return
    whole = [n for k in reversed(range(len(shape))) for n in (0, after[k])]
    with graph.inserting_after(y):
        pad = graph.call_function(_PAD, (y, whole, value))
    pad.meta |= {**turned[0][1].meta, "val": _PAD(tensor_of(y), whole, value)}
    for u in plain:
        u.replace_all_uses_with(pad)
        graph.erase_node(u)
    for p, u in turned:
        with graph.inserting_before(u):
            other = graph.call_function(_PERMUTE, (pad, p.args[1]))
        other.meta |= {**u.meta, "val": _PERMUTE(tensor_of(pad), p.args[1])}
        u.replace_all_uses_with(other)
        graph.erase_node(u)
        if not p.users:
            graph.erase_node(p)
    _sum_padded(graph, y, pad, after)


def _sum_padded(graph: Graph, y: Node, pad: Node, after: Sequence[int]) -> None:
    """Sums along other axes are of what is stored, and cut to their length behind it."""
    padded = [k for k, n in enumerate(after) if n]
    for u in [u for u in y.users if u.target is _SUM]:
        dims = [d % len(after) for d in cast(Sequence[int], u.args[1])]
        if len(padded) != 1 or padded[0] in dims:
            continue
        (k,) = padded
        at = k if argument(u, 2, "keepdim", False) else k - sum(d < k for d in dims)
        with graph.inserting_before(u):
            whole = graph.call_function(_SUM, (pad, *u.args[1:]), dict(u.kwargs))
            cut = graph.call_function(_SLICE, (whole, at, 0, tensor_of(y).shape[k]))
        whole.meta |= {**u.meta, "val": _SUM(tensor_of(pad), *u.args[1:], **u.kwargs)}
        cut.meta |= {**u.meta, "val": _SLICE(tensor_of(whole), *cut.args[1:])}
        u.replace_all_uses_with(cut)
        graph.erase_node(u)


def _is_pad_for_products(n: Node) -> bool:
    return n.target is _PAD and bool(n.users) and all(u.target in _PRODUCTS for u in n.users)


def _after(pad: Node, permute: Node | None) -> tuple[int, ...]:
    """What is added behind each axis of the tensor that ``permute`` turns; -1s where something is added before one."""
    widths = cast(Sequence[int], pad.args[1])
    ndim = tensor_of(pad).ndim
    before, behind = [0] * ndim, [0] * ndim
    for k in range(len(widths) // 2):
        before[ndim - 1 - k], behind[ndim - 1 - k] = widths[2 * k], widths[2 * k + 1]
    if any(before) or any(n < 0 for n in behind):
        return (-1,) * ndim
    order = list(range(ndim)) if permute is None else [d % ndim for d in cast(Sequence[int], permute.args[1])]
    found = [0] * ndim
    for k, d in enumerate(order):
        found[d] = behind[k]
    return tuple(found)
