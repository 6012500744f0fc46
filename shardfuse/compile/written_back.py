# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""What a graph writes back to its inputs at its end, running statistics and counters say, as one kernel.

before, of each batch norm of a model::

    %copy_ = aten.copy_(%running_mean, %mean)
    %copy__1 = aten.copy_(%running_var, %var)
    %copy__2 = aten.copy_(%num_batches_tracked, %count)

after::

    %foreach_copy_ = aten._foreach_copy_([%running_mean, %running_var, ...], [%mean, %var, ...])

Inductor writes each in the kernel that makes it, where it makes it: of what a region gives, each would be a kernel.
The copies of a list run side by side.  Where one reads what another writes, as buffers that are shifted by one do, both
stay as they are, in their order.  What a region gives was computed before them all, and reads nothing of what they
write; Inductor may compute other sources where they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .rank_region_op import RANK_REGION
from .region_op import REGION
from .translation import known

_COPY: Any = torch.ops.aten.copy_.default
_COPIES: Any = torch.ops.aten._foreach_copy_.default
_REGIONS = (REGION, RANK_REGION)
FEWEST = 3


def join_copies(graph: Graph, *, only_gpu: bool = True) -> int:
    """Make lists of the copies that stand last; how many copies are in one."""
    from torch._inductor import lowering

    if _COPIES not in lowering.lowerings:  # not in every torch
        return 0
    (behind,) = graph.find_nodes(op="output")
    while behind.prev.target is torch.ops.prims.inductor_force_stride_order.default:  # an order for what is given
        behind = behind.prev
    last: list[Node] = []
    while (n := (last[0] if last else behind).prev).target is _COPY and not n.users:
        last.insert(0, n)
    stay = _bound(graph, last)
    lists: dict[object, list[Node]] = {}
    for n in last:
        kind = None if n in stay else _kind(n, only_gpu=only_gpu)
        if kind is not None:
            lists.setdefault(kind, []).append(n)
    found = [one for one in lists.values() if len(one) >= FEWEST]
    for one in found:
        with graph.inserting_before(behind):
            targets, sources = ([n.args[k] for n in one] for k in (0, 1))
            call = graph.call_function(_COPIES, (targets, sources))
        call.meta |= {**one[0].meta, "val": None}
        for n in one:
            graph.erase_node(n)
    return sum(map(len, found))


def _bound(graph: Graph, copies: Sequence[Node]) -> set[Node]:
    """Those of ``copies`` that read what another writes, through whatever ops, or write what another reads or writes.

    Bit k of ``read[n]``: ``n`` is made of what the k-th copy writes, and may be computed after that copy.
    """
    targets = [c.args[0] for c in copies]
    found = {c for c in copies if targets.count(c.args[0]) > 1}
    read = {t: 1 << k for k, t in enumerate(targets)}
    for n in graph.nodes:
        if n not in read:
            read[n] = 0
            for a in () if n.target in _REGIONS else n.all_input_nodes:
                read[n] |= read[a]
    for k, c in enumerate(copies):
        others = read[c.args[1]] & ~(1 << k) if isinstance(c.args[1], Node) else 0
        found |= {o for j, o in enumerate(copies) if others >> j & 1} | ({c} if others else set())
    return found


def _kind(n: Node, *, only_gpu: bool) -> object:
    """What copies of one list have in common; None of one that stays by itself."""
    if len(n.args) != 2 or n.kwargs or not all(isinstance(a, Node) for a in n.args):
        return None
    target, source = (cast(Node, a).meta.get("val") for a in n.args)
    if not isinstance(target, torch.Tensor) or not isinstance(source, torch.Tensor):
        return None
    is_alike = (target.dtype, target.shape, target.device) == (source.dtype, source.shape, source.device)
    is_static = all(known(s) > 0 for s in target.shape)
    if not is_alike or not is_static or cast(Node, n.args[0]).op != "placeholder" or (only_gpu and not target.is_cuda):
        return None
    return target.dtype, target.device
