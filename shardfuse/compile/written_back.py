# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""What a graph writes back to its inputs at its end, running statistics and counters say, as one kernel.

before, of each batch norm of a model::

    %copy_ = aten.copy_(%running_mean, %mean)
    %copy__1 = aten.copy_(%running_var, %var)
    %copy__2 = aten.copy_(%num_batches_tracked, %count)

after::

    %foreach_copy_ = aten._foreach_copy_([%running_mean, %running_var, ...], [%mean, %var, ...])

Inductor writes each in the kernel that makes it, where it makes it: of what a region gives, each would be a kernel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .translation import known

_COPY: Any = torch.ops.aten.copy_.default
_COPIES: Any = torch.ops.aten._foreach_copy_.default
FEWEST = 3


def join_copies(graph: Graph, *, only_gpu: bool = True) -> int:
    """Make lists of the copies that stand last; how many copies are in one."""
    from torch._inductor import lowering

    if _COPIES not in lowering.lowerings:  # not in every torch
        return 0
    (output,) = graph.find_nodes(op="output")
    lists: dict[object, list[Node]] = {}
    n = output.prev
    while n.target is _COPY and not n.users:
        kind = _kind(n, only_gpu=only_gpu)
        if kind is not None:
            lists.setdefault(kind, []).insert(0, n)
        n = n.prev
    found = [one for one in lists.values() if len(one) >= FEWEST]
    for one in found:
        with graph.inserting_before(output):
            targets, sources = ([n.args[k] for n in one] for k in (0, 1))
            call = graph.call_function(_COPIES, (targets, sources))
        call.meta |= {**one[0].meta, "val": None}
        for n in one:
            graph.erase_node(n)
    return sum(map(len, found))


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
