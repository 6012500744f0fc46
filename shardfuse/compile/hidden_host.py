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


def hides_host(graph: Graph) -> bool:
    """At the sizes of the call for which the graph was made."""
    kernels = [n for n in graph.nodes if is_kernel(n)]
    return sum(map(_flops, kernels)) / FLOPS_PER_US > AHEAD * LAUNCH_US * len(kernels)


def _flops(node: Node) -> float:
    """Of a product on a GPU; 0 for any other op."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    op = getattr(node.target, "overloadpacket", None)
    count: Callable[..., Any] | None = cast("dict[object, Callable[..., Any]]", flop_registry).get(op)
    if count is None or not isinstance(first, torch.Tensor) or first.device.type != "cuda":
        return 0.0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(hinted(count(*args, **kwargs, out_val=value)))
