"""Has the GPU so much to do in a graph that it runs behind the host, whose calls then take no time of their own?

Matrix products, convolutions and attention decide, at the peak rate of the GPU: they take longer than that, and what
else there is comes on top.
"""

from __future__ import annotations

from torch.fx import Graph

from ..device.region_costs import FLOPS_PER_US, PRODUCTS_US
from .node_facts import is_kernel, tensors_of
from .product_flops import flops_of


def hides_host(graph: Graph) -> bool:
    """At the sizes of the call for which the graph was made."""
    kernels = [n for n in graph.nodes if is_kernel(n)]
    on_gpu = [n for n in kernels if any(t.device.type == "cuda" for t in tensors_of(n))]
    return sum(map(flops_of, on_gpu)) / FLOPS_PER_US > PRODUCTS_US * len(kernels)
