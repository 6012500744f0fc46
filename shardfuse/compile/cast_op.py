# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""``shardfuse::cast_list_v1(Tensor[] inputs, ScalarType dtype) -> Tensor[]``: many tensors in another type, at once.

Under autocast each weight is cast for its product and each gradient back, a kernel each: of a ResNet 160 kernels of one
to three microseconds, which the GPU starts as fast as it ends them.  This is one kernel for all of a list.

before::

    %w0 = prims.convert_element_type(%primals_1, torch.bfloat16)
    %w1 = prims.convert_element_type(%primals_2, torch.bfloat16)

after::

    %cast = shardfuse.cast_list_v1([%primals_1, %primals_2], torch.bfloat16)
    %w0 = getitem(%cast, 0)
    %w1 = getitem(%cast, 1)

A list holds casts that Inductor would give a kernel of their own: of what is in memory, for what reads memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..executor.cache import LRUCache
from .aten_table import is_view
from .cast_call import CastCall
from .node_facts import is_fusable, is_mutation, nbytes
from .region_op import define_op
from .translation import known

LIST_BYTES = 64 << 20
"""Of results of a list: gradients in 16 bits wait for so many others, and take that much memory longer."""
FEWEST = 3
"""Casts of a list: the first pays for what the host does for a list more than for one kernel."""
_CAST: Any = torch.ops.prims.convert_element_type.default
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- the graph ---------------------------------------------------------------------------------------------


def join_casts(graph: Graph, *, only_gpu: bool = True) -> int:
    """Make lists of casts; how many casts are in one."""
    place = {n: k for k, n in enumerate(graph.nodes)}
    stop = next((k for n, k in place.items() if is_mutation(n)), len(place))
    lists: dict[object, list[list[Node]]] = {}
    for n in graph.find_nodes(op="call_function", target=_CAST):
        kind = _kind(n, only_gpu=only_gpu) if place[n] < stop else None
        if kind is None:
            continue
        of = lists.setdefault(kind, [[]])
        if sum(map(nbytes, of[-1])) >= LIST_BYTES:
            of.append([])
        of[-1].append(n)
    found = [one for of in lists.values() for one in of if len(one) >= FEWEST]
    for one in found:
        _join(graph, one)
    return sum(map(len, found))


def _kind(n: Node, *, only_gpu: bool) -> tuple[object, ...] | None:
    """What casts of one list have in common; None of one that stays by itself."""
    source, value = n.args[0], n.meta["val"]
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    given: torch.Tensor = source.meta["val"]
    is_static = all(known(s) > 0 for s in given.shape) and given.ndim > 0
    if not is_static or given.dtype not in _TYPES or value.dtype not in _TYPES or (only_gpu and not given.is_cuda):
        return None
    if given.stride() != value.stride() or not _is_dense(given):
        return None
    if source.op == "placeholder":
        is_alone = all(_reads_memory(u) for u in n.users)
    else:
        is_alone = not is_fusable(source) and not is_view(source) and all(u.op == "output" for u in n.users)
        is_alone &= _is_of_product(source)
    return (source.op == "placeholder", given.dtype, value.dtype, given.device) if is_alone and n.users else None


def _is_dense(x: torch.Tensor) -> bool:
    """Has it as many elements as its places in memory span?"""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return span == x.numel() and all(s > 0 or n == 1 for n, s in zip(x.shape, x.stride(), strict=True))


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution_backward", "aten::convolution")


def _is_product(n: Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and n.target.name().split(".")[0] in _PRODUCTS


def _is_of_product(n: Node) -> bool:
    while n.target is operator.getitem:
        n = cast(Node, n.args[0])
    return _is_product(n)


def _reads_memory(n: Node) -> bool:
    """Is it a product, or the end of the graph, or a view that such read alone?"""
    return n.op == "output" or _is_product(n) or (is_view(n) and bool(n.users) and all(map(_reads_memory, n.users)))


def _join(graph: Graph, casts: Sequence[Node]) -> None:
    """One op before the first of ``casts`` where all are of inputs of the graph, else behind the last."""
    is_first = cast(Node, casts[0].args[0]).op == "placeholder"
    with graph.inserting_before(casts[0]) if is_first else graph.inserting_after(casts[-1]):
        inputs = [n.args[0] for n in casts]
        call = graph.call_function(CASTS, (inputs, casts[0].meta["val"].dtype))
    call.meta |= {**casts[0].meta, "val": [n.meta["val"] for n in casts]}
    last = call
    for k, n in enumerate(casts):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, k))
        last.meta |= n.meta
        n.replace_all_uses_with(last, propagate_meta=False)
    for n in casts:
        graph.erase_node(n)


# --- the op ------------------------------------------------------------------------------------------------


LISTS = 256
"""Lists of casts that a process keeps."""
_calls: LRUCache[tuple[object, ...], CastCall] = LRUCache(LISTS)


def run_casts(inputs: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """New tensors, each laid out as its input."""
    layouts = tuple((tuple(x.shape), x.stride()) for x in inputs)
    key = (inputs[0].device, inputs[0].dtype, dtype, layouts)
    call = _calls.get(key)
    if call is None:
        call = CastCall(dtype, layouts)
        _calls.put(key, call)
    return call.run(*inputs)


def fake_casts(inputs: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """What ``run_casts`` gives, without data."""
    return [torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device) for x in inputs]


define_op("cast_list_v1", "Tensor[] inputs, ScalarType dtype", run_casts, fake_casts)

CASTS = torch.ops.shardfuse.cast_list_v1.default
