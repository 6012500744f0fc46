# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Has the GPU so much to do in a graph that it runs behind the host, whose calls then take no time of their own?

Matrix products, convolutions and attention decide, at the peak rate of the GPU: they take longer than that, and what
else there is comes on top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ..device.region_costs import FLOPS_PER_US, PRODUCTS_US
from .node_facts import is_kernel, tensors_of
from .translation import hinted


def hides_host(graph: Graph) -> bool:
    """At the sizes of the call for which the graph was made."""
    kernels = [n for n in graph.nodes if is_kernel(n)]
    return sum(map(_flops, kernels)) / FLOPS_PER_US > PRODUCTS_US * len(kernels)


def _flops(node: Node) -> float:
    """Of a product on a GPU; 0 for any other op, and where the inputs of the graph do not tell the sizes."""
    op = getattr(node.target, "overloadpacket", None)
    count: Callable[..., Any] | None = cast("dict[object, Callable[..., Any]]", flop_registry).get(op)
    if count is None or not any(t.device.type == "cuda" for t in tensors_of(node)):
        return 0.0
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    if any(v is None for v in values) or not all(map(_is_known, tree_leaves(values))):
        return 0.0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: tree_map(_sized, n.meta["val"]))
    return float(count(*args, **kwargs, out_val=tree_map(_sized, node.meta["val"])))


def _is_known(value: object) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return all(n.node.has_hint() for n in sizes if isinstance(n, torch.SymInt))


def _sized(value: object) -> object:
    """With numbers in place of symbols: what is compared here is no fact that the graph then holds for."""
    if isinstance(value, torch.Tensor):
        return torch.empty(tuple(map(hinted, value.shape)), dtype=value.dtype, device="meta")
    return hinted(value) if isinstance(value, torch.SymInt) else value
