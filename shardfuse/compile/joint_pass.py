"""The pass over a forward and its backward together, before torch decides what of the forward is kept for the backward.

A graph that is compiled without gradients has the forward alone.
"""

from __future__ import annotations

from torch.fx import Graph

from .convolution_biases import add_biases
from .own_pass import OwnPass


class JointPass(OwnPass):
    """Rewrites what a backward may compute anew (``convolution_biases``)."""

    def run(self, graph: Graph) -> None:
        add_biases(graph, only_gpu=self.take == "auto")
