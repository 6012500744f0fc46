# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
"""Which collectives of a graph a region may hold.

What is decided here, every rank has to decide alike: a rank whose region exchanges sums would wait for ranks whose
graph has a collective in its place.  So it follows from the ops, the static sizes, the options and ``facts_here``,
never from the sizes of a call or from this rank's time, and a region holds nothing of which ranks may have more or
less: what is not known to be of the shape of what the collective gives, indices, slices.

torch's caches keep what was decided.  ``facts_here`` is part of the key that they find it by, so that a rank that finds
a compiled graph there has the decision that a rank that compiles it would make now.

A collective that Inductor would run beside other work stays by itself: a region starts it and waits for it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch._inductor import config as inductor_config
from torch.fx import Graph, Node

from ..config import read_settings
from ..device import device_here
from ..errors import ShardfuseError
from ..executor.options import CompileOptions
from ..executor.symmetric_slots import why_not_together
from ..mesh.groups import groups_here, ranks_of_group, world_size
from .aten_collectives import NAMESPACE, group_of, is_start, is_wait
from .aten_table import aten_ops, is_view
from .node_facts import expression_of, is_fusable, nominal, shape_of
from .regions import Region
from .uneven_collectives import why_uneven


def facts_here() -> tuple[object, ...]:
    """All that a decision about a graph follows from beside the graph and the options, alike on all ranks of a group.

    The size of the world and of each process group, whether the ranks of one reach each other's memory, the GPU, and
    the settings that plans follow.
    """
    options = CompileOptions.from_environment()
    groups = sorted((name, len(ranks), why_not_together(ranks) is None) for name, ranks in groups_here().items())
    plans = options.exchange, options.interpret, options.ranks_per_node
    return world_size(), str(groups), repr(device_here()), *plans


def starts_in(graph: Graph) -> list[Node]:
    """The collectives of a graph that a region could hold."""
    return [n for n in graph.nodes if is_start(n)]


def why_never_inside(graph: Graph, starts: Sequence[Node], *, is_auto: bool) -> dict[Node, str]:
    """Of each collective that stays by itself, why.  ``starts``: all collectives of the graph.

    ``is_auto``: regions are taken that are expected to gain; one with a collective gains where its kernel exchanges.
    """
    place = {n: k for k, n in enumerate(graph.nodes)}
    found: dict[Node, str] = {}
    for n in starts:
        why = _why_apart(n) or why_uneven(n) or (_why_not_exchanged(n) if is_auto else None)
        why = why or _why_beside(n, graph, place)
        if why is not None:
            found[n] = why
    return found


def _why_apart(start: Node) -> str | None:
    users = list(start.users)
    if len(users) != 1 or not is_wait(users[0]):
        return "it is not waited for in one place"
    try:
        ranks = ranks_of_group(group_of(start))
    except ShardfuseError as error:
        return str(error).splitlines()[0]
    return "its group has a single rank" if len(ranks) < 2 else None


def _why_not_exchanged(start: Node) -> str | None:
    value = start.meta["val"]
    if value.device.type != "cuda":
        return "there is nothing to gain on a CPU"
    asked = read_settings().exchange
    if asked == "nccl":
        return "kernels exchange nothing, SHARDFUSE_EXCHANGE is nccl"
    why = why_not_together(ranks_of_group(group_of(start)))
    return None if why is None else f"kernels exchange nothing: {why or 'the job was not started by initialize()'}"


# --- overlap -----------------------------------------------------------------------------------------------


def _why_beside(start: Node, graph: Graph, place: Mapping[Node, int]) -> str | None:
    """What would run beside it: kernels of Inductor's between it and its wait, or anywhere if Inductor moves waits."""
    (wait,) = start.users
    apart = list(graph.nodes)[place[start] + 1 : place[wait]]
    if not any(map(_is_work, apart)) and _moves_waits():
        apart = _independent(start, graph)
    work = next(filter(_is_work, apart), None)
    return None if work is None else f"{work.target} runs beside it"


def _moves_waits() -> bool:
    """Does Inductor start collectives early and wait late?"""
    settings: Any = inductor_config
    overlap = getattr(settings, "aten_distributed_optimizations", None)  # not in every torch
    return bool(settings.reorder_for_compute_comm_overlap) or bool(getattr(overlap, "enable_overlap_scheduling", False))


def _is_work(node: Node) -> bool:
    """Is it a kernel that takes its time?  Pointwise ops and views are part of others."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_light = is_fusable(node) or is_view(node) or node.target in aten_ops().factories
    return not is_light and node.target.namespace != NAMESPACE and isinstance(node.meta.get("val"), torch.Tensor)


def _independent(start: Node, graph: Graph) -> list[Node]:
    before, after = {start: None}, {start: None}
    for n in reversed(graph.nodes):
        if any(u in before for u in n.users):
            before[n] = None
    for n in graph.nodes:
        if any(a in after for a in n.all_input_nodes):
            after[n] = None
    return [n for n in graph.nodes if n not in before and n not in after]


# --- alike -------------------------------------------------------------------------------------------------


def why_not_alike(region: Region) -> str | None:
    """What ranks may have more or less of, or compute otherwise, in a region with collectives; None for nothing."""
    nodes = (*region.again, *region.nodes)
    for n in nodes:
        why = _why_not_plain(n)
        if why is not None:
            return why
    for n in region.inputs:
        dtype = cast(torch.Tensor, n.meta["val"]).dtype
        if not (dtype.is_floating_point or dtype == torch.bool):
            return f"{n.name}, of {dtype}, may stand for other places on other ranks"
    for n in region.collectives:
        if any(u not in region.nodes for u in n.users):
            return "it is waited for outside of the region"
    for n in (*region.inputs, *region.outputs):
        if not _is_order_known(n, is_dense=n not in region.inputs):
            return f"the order of the dims of {n.name} in memory follows from the sizes of a call"
    alike = _alike(nodes, region.inputs)
    unknown = next((n for n in (*region.inputs, *nodes) if n not in alike), None)
    return None if unknown is None else f"ranks may have more or less of {unknown.name}"


def _is_order_known(n: Node, *, is_dense: bool) -> bool:
    """Do its sizes and strides order its dims in memory whatever its symbols stand for?  Is it dense as well, then?"""
    tensor = cast(torch.Tensor, n.meta["val"])
    if not any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride())):
        return True
    shape, strides = list(map(expression_of, tensor.shape)), list(map(expression_of, tensor.stride()))
    moving = [d for d in range(tensor.ndim) if shape[d] != 1 and strides[d] != 0]
    ranked = sorted(moving, key=lambda d: -nominal(tensor.stride(d)))
    if ranked != moving and not all(shape[d].is_Integer or shape[d].is_Symbol for d in moving):
        return False  # a size that is computed may be 1, and such a dim has no place of its own
    for outer, inner in pairwise(ranked):
        beyond = (strides[outer] - strides[inner] * shape[inner]).expand()
        if beyond != 0 and (is_dense or not beyond.is_nonnegative):
            return False
    return not is_dense or not ranked or strides[ranked[-1]] == 1


def _why_not_plain(n: Node) -> str | None:
    ops = aten_ops()
    if is_start(n) or is_wait(n) or n.op != "call_function":
        return None
    values: Any = n.meta.get("val")
    tensors = cast("Iterable[object]", values if isinstance(values, tuple | list) else (values,))
    if any(isinstance(v, torch.Tensor) and not (v.is_floating_point() or v.dtype == torch.bool) for v in tensors):
        return f"{n.target} gives integers, which may be places"
    is_known = n.target in ops.pointwise or n.target in ops.reductions or n.target in ops.factories or is_view(n)
    if n.target in _PARTS or not (is_known or not isinstance(n.target, torch._ops.OpOverload)):
        return f"{n.target} may take other parts on other ranks"
    return None


_aten: Any = torch.ops.aten
_PARTS = (_aten.slice.Tensor, _aten.select.int, _aten.as_strided.default)


def _alike(nodes: Sequence[Node], inputs: Sequence[Node]) -> dict[Node, None]:
    """Tensors whose shape follows from that of a collective, which has to be the same on all ranks.

    A view and a reduction of one are such; what is computed for each element of one, and of what, too.
    """
    found: dict[Node, None] = {}
    known = {*nodes, *inputs}

    def add(*given: Node) -> bool:
        new = [n for n in given if n in known and n not in found]
        found.update(dict.fromkeys(new))
        return bool(new)

    grown = True
    while grown:
        grown = False
        for n in nodes:
            sources = [a for a in n.all_input_nodes if a in known]
            if is_start(n) or is_wait(n) or not sources:
                grown |= add(n, *sources)
            elif n.target in aten_ops().pointwise:
                if n in found or any(a in found and shape_of(a) == shape_of(n) for a in sources):
                    grown |= add(n, *sources)
            elif any(a in found for a in sources):
                grown |= add(n)
            elif n in found and is_view(n):
                grown |= add(*sources)
    return found
