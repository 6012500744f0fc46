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
from torch.utils.flop_counter import flop_registry

from ..device.region_costs import AHEAD, FLOPS_PER_US, LAUNCH_US
from .regions import is_kernel
from .translation import hinted

_UNKNOWN = object()
"""Stands for the value of a node of which the graph does not say it."""


def hides_host(graph: Graph) -> bool:
    """At the sizes of the call for which the graph was made."""
    kernels = [n for n in graph.nodes if is_kernel(n)]
    return sum(map(_flops, kernels)) / FLOPS_PER_US > AHEAD * LAUNCH_US * len(kernels)


def _flops(node: Node) -> float:
    """Of a product on a GPU; 0 for any other op."""
    value = node.meta.get("val")
    is_on_gpu = any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in _flat(value))
    op = getattr(node.target, "overloadpacket", None)
    count: Callable[..., Any] | None = cast("dict[object, Callable[..., Any]]", flop_registry).get(op)
    if count is None or not is_on_gpu:
        return 0.0
    values = [v for n in (node, *node.all_input_nodes) for v in _flat(n.meta.get("val", _UNKNOWN))]
    if not all(map(_is_known, values)):
        return 0.0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _sized(n.meta["val"]))
    return float(count(*args, **kwargs, out_val=_sized(value)))


def _flat(value: object) -> list[Any]:
    return list(cast("list[Any]", value)) if isinstance(value, tuple | list) else [value]


def _is_known(value: object) -> bool:
    """Do the inputs of the graph tell the sizes of a tensor, or the number?"""
    if value is _UNKNOWN:
        return False
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return all(n.node.has_hint() for n in sizes if isinstance(n, torch.SymInt))


def _sized(value: Any) -> Any:
    """With numbers in place of symbols, as nothing may come to depend on what is compared here."""
    if isinstance(value, torch.Tensor):
        return torch.empty(tuple(map(hinted, value.shape)), dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return tuple(map(_sized, cast("list[Any]", value)))
    return hinted(value) if isinstance(value, torch.SymInt) else value
