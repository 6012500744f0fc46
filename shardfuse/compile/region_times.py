# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What regions take, alone: shardfuse's kernels against those that Inductor makes of the same ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from ..executor.timing import behind_flush, flush_buffer
from .region_op import program_of
from .regions import Region
from .translation import hinted, tensor_of

ROUNDS = 15
FLUSHES = 4
"""Before each run, 75 us apiece: a call of what Inductor compiled takes the host up to 200."""


def graph_of(region: Region) -> Graph:
    """The region alone: its inputs and its integers, in order, to its outputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for n in (*region.inputs, *region.numbers):
        copies[n] = graph.placeholder(n.name)
        copies[n].meta["val"] = n.meta["val"]
    for n in (*region.again, *region.nodes):
        copies[n] = graph.node_copy(n, lambda a: copies[a])
    graph.output(tuple(copies[n] for n in region.outputs))
    return graph


def sizes_of(graph: Graph) -> tuple[object, ...]:
    """Sizes and strides of its inputs, and its integers, at the call for which the graph was made."""
    found: list[object] = []
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.Tensor):
            tensor = tensor_of(node)
            found += [tuple(hinted(n) for n in given) for given in (tensor.shape, tensor.stride())]
        else:
            found.append(hinted(node.meta["val"]))
    return tuple(found)


def measured(graph: Graph, program: str, device: torch.device) -> tuple[float, float]:
    """Microseconds of shardfuse and of Inductor, medians of rounds in which both take their turns behind a flush of L2.

    At the sizes of the call for which the graph was made; floats are random, integers 0, which is an index everywhere.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    inputs = [_filled(n, device) for n in graph.find_nodes(op="placeholder")]
    fd = program_of(program).fd
    with config.patch(post_grad_custom_post_pass=None):
        compiled = cast("Callable[..., object]", compile_fx(GraphModule({}, graph), inputs))
    with torch.no_grad():
        return _timed([lambda: fd.execute(inputs), lambda: compiled(*inputs)], device)


def _filled(node: Node, device: torch.device) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return hinted(value)
    tensor = tensor_of(node)
    shape, strides = ([hinted(n) for n in given] for given in (tensor.shape, tensor.stride()))
    where = device if tensor.device.type != "cpu" else tensor.device
    found = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=where)
    return found.normal_() if found.is_floating_point() else found.zero_()


def _timed(runs: Sequence[Callable[[], object]], device: torch.device) -> tuple[float, float]:
    flush = flush_buffer(device)
    for run in runs:
        for _ in range(3):
            run()
    torch.cuda.synchronize(device)
    taken = [[behind_flush(run, flush, FLUSHES) for run in runs] for _ in range(ROUNDS)]
    torch.cuda.synchronize(device)
    own, inductor = (median(read() for read in column) for column in zip(*taken, strict=True))
    return own, inductor
