# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
"""The pass over Inductor's graphs: regions are found, weighed, noted, and replaced where they are worth it."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, get_args

import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from ..base_error import ShardfuseError
from ..frontend.definition import FusionDefinition
from ..frontend.explain import Explanation, explain_plan
from ..in_kernel_sums import EXCHANGE
from ..mesh.inductor_order import register_fallback
from . import cast_lowering
from .aten_collectives import collective_text
from .cast_op import join_casts
from .channels_last import keep_channels_last
from .compile_errors import CompileOptionError
from .convolution_biases import add_biases
from .convolution_layouts import read_in_other_orders
from .cost import Cost, cost_of, why_never
from .garbage_collection import without_garbage_collection
from .hidden_host import hides_host
from .kept_regions import sources_hash
from .ledger import RegionReport, note
from .node_facts import nominal
from .padded import share_pads
from .pool_op import take_pools
from .published import log, publish
from .random_op import compare_unrounded
from .rank_region_op import RANK_REGION, has_collectives, rank_program_of
from .rank_regions import facts_here, starts_in, why_never_inside, why_not_alike
from .region_lowering import register
from .region_op import program_of
from .region_times import graph_of
from .regions import Region, nearest_behind, regions_of
from .relu_signs import take_signs_from_inputs
from .replacement import RegionProgram, program_of_region, put_in, why_no_order, why_no_size
from .saved_orders import keep_saved_orders
from .traced_lines import lines_of
from .translation import hinted, tensor_of
from .written_back import join_copies

Take = Literal["auto", "all", "none"]
GraphPass = Callable[[Graph], None]


class _Pass(CustomGraphPass):
    """A pass of shardfuse's over Inductor's graphs.

    ``take``: "auto", regions that are expected to gain; "all" that can be; "none".  ``before``: passes that run first,
    the caller's own.
    """

    def __init__(self, take: Take = "auto", before: Sequence[GraphPass] = ()) -> None:
        if take not in get_args(Take):
            raise CompileOptionError("shardfuse.take", take, get_args(Take))
        self.take: Take = take
        self.before = tuple(before)

    def __call__(self, graph: Graph) -> None:
        for other in self.before:
            other(graph)
        if self.take != "none":
            self.change(graph)

    @abstractmethod
    def change(self, graph: Graph) -> None:
        """Unless ``take`` is "none", and behind the caller's passes."""

    def uuid(self) -> object:
        """Tells compiled graphs apart in torch's caches; None, for no caching, where a pass before it has no uuid.

        Asked for at each look-up: process groups may have been made since the last one.
        """
        others: list[object] = []
        for other in self.before:
            found: Any = other.uuid() if isinstance(other, CustomGraphPass) else None
            if not found:
                return None
            others.append(found)
        return ("shardfuse", sources_hash(), self.take, *facts_here(), *others)


class PostGradPass(_Pass):
    """Hands regions of a graph over to shardfuse."""

    def change(self, graph: Graph) -> None:
        # That C++ calls no object of Python; a package made ahead of time would need shardfuse wherever it runs.
        if inductor_config.cpp_wrapper:
            log.info("no region is handed over: Inductor writes C++ here, which does not call them")
            return
        hand_over(graph, self.take)


class JointGraphPass(_Pass):
    """Changes the graph of a forward and its backward before torch divides it, so that regions read less."""

    def change(self, graph: Graph) -> None:
        if not inductor_config.cpp_wrapper:
            take_signs_from_inputs(graph, only_gpu=self.take == "auto")


_graphs = count()
"""Numbers of the graphs that the pass has seen in this process."""
_TURNED = (
    "Inductor will lay its images out in channels-last, for which no region is planned where the caller gets a view of "
    "an image, or an op writes to one: return, or write to, a copy"
)
"""Why a region has no plan: it would be for images in another order."""


@dataclass(frozen=True)
class _Weighed:
    """A region with its program, or why there is none."""

    region: Region
    program: RegionProgram | None
    plan: Explanation | None
    cost: Cost | None
    taken: bool
    why: str


def hand_over(graph: Graph, take: Take) -> None:
    """Replace the regions of ``graph`` that are taken, and note all of them."""
    compare_unrounded(graph)
    add_biases(graph, only_gpu=take == "auto")
    keep_channels_last(graph, only_gpu=take == "auto")
    settings: Any = inductor_config.triton
    is_host_hidden = bool(settings.cudagraphs) or hides_host(graph)
    take_pools(graph, only_gains=take == "auto", is_host_hidden=is_host_hidden)
    shared = share_pads(graph, only_gpu=take == "auto")
    starts = starts_in(graph)
    stays = why_never_inside(graph, starts, is_auto=take == "auto")
    turned = read_in_other_orders(graph, only_gpu=take == "auto")
    with without_garbage_collection():
        weighed = _weighed(graph, take, stays, turned, is_host_hidden=is_host_hidden)
        stored = {n for w in weighed if w.taken for n in w.region.outputs}
        unused = [s for s in shared if s.pad not in stored]
        if unused:
            for s in unused:
                s.undo()
            weighed = _weighed(graph, take, stays, turned, is_host_hidden=is_host_hidden)
    regions = [w.region for w in weighed]
    kind = "backward" if any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder")) else "forward"
    behind = nearest_behind(graph, regions)
    of = next(_graphs)
    found = [
        replace(
            _reported(kind, w), of=of, number=k, behind=behind[k], collectives=_collectives(w.region, starts, stays)
        )
        for k, w in enumerate(weighed)
    ]
    note(found)
    publish(found)
    taken = [(w.region, w.program) for w in weighed if w.taken and w.program is not None]
    if taken:
        register()
        register_fallback(RANK_REGION, has_collectives)
        put_in(graph, taken)
    keeps_addresses = inductor_config.triton.cudagraphs  # pyright: ignore[reportAttributeAccessIssue]
    if not keeps_addresses and join_casts(graph, only_gpu=take == "auto"):
        cast_lowering.register()
    join_copies(graph, only_gpu=take == "auto")
    if not turned:
        keep_saved_orders(graph, only_gpu=take == "auto")


def _weighed(
    graph: Graph, take: Take, stays: dict[Node, str], turned: Set[Node], *, is_host_hidden: bool
) -> list[_Weighed]:
    """All regions.  Collectives of one that is not taken are added to ``stays``, with why: regions are cut there.  What
    would be rematerialised in it, or for others of its results, is stored.

    ``turned``: what reads images in another order than the graph says.
    """
    stored: set[Node] = set()
    known: dict[Region, _Weighed] = {}
    while True:
        regions, _ = regions_of(graph, stays, stored)
        for region in regions:
            if region not in known:
                known[region] = _weigh(region, take, turned, is_host_hidden=is_host_hidden)
        weighed = [known[region] for region in regions]
        left = [w for w in weighed if not w.taken and (w.region.collectives or w.region.rematerialised)]
        if not left:
            return weighed
        for w in left:
            stays.update(dict.fromkeys(w.region.collectives, w.why))
            stored.update(w.region.rematerialised)


def _weigh(region: Region, take: Take, turned: Set[Node], *, is_host_hidden: bool) -> _Weighed:
    """What does not translate, or has no plan, stays Inductor's: the definition's own errors say why."""
    if region.collectives:
        return _weigh_with_ranks(region, take)
    why = why_no_size(region) or why_no_order(region) or (None if turned.isdisjoint(region.nodes) else _TURNED)
    if why is not None:
        return _Weighed(region, None, None, None, False, why)
    try:
        program = program_of_region(region)
        plan = _plan(program_of(program.text).fd, region)
    except ShardfuseError as error:
        return _Weighed(region, None, None, None, False, str(error).splitlines()[0])
    is_gpu = any(tensor_of(n).device.type == "cuda" for n in region.inputs)
    settings: Any = inductor_config.triton
    is_mix_order = bool(getattr(settings, "mix_order_reduction", False))  # not in every torch
    cost = cost_of(region, plan, is_host_hidden=is_host_hidden, is_mix_order=is_mix_order)
    if take == "all":
        return _Weighed(region, program, plan, cost, True, f"all regions are taken; {cost}")
    why = "there is nothing to gain on a CPU" if not is_gpu else why_never(plan)
    if why is not None:
        return _Weighed(region, program, plan, cost, False, why)
    return _Weighed(region, program, plan, cost, cost.gains, str(cost))


def _weigh_with_ranks(region: Region, take: Take) -> _Weighed:
    """By what all ranks have alike; where it is taken for what it gains, its kernel exchanges what is reduced."""
    why = why_no_size(region) or why_not_alike(region)
    if why is not None:
        return _Weighed(region, None, None, None, False, why)
    try:
        program = program_of_region(region)
        assert program.group is not None, "it has collectives"
        made = rank_program_of(program.text, program.group)
        leading = [(made.mesh.size,) if is_part else () for is_part in made.made.input_parts]
        exchanges = EXCHANGE in [s.scheduler for s in _plan(made.made.fd, region, leading, nominal).segments]
    except ShardfuseError as error:
        return _Weighed(region, None, None, None, False, str(error).splitlines()[0])
    plan = None
    with suppress(ShardfuseError):  # at this rank's sizes: told in the report, and nothing follows from it
        plan = _plan(made.made.fd, region, leading)
    if take == "all":
        return _Weighed(region, program, plan, None, True, "all regions are taken, with their collectives")
    why = "its kernel exchanges what the ranks add up" if exchanges else "no kernel of it exchanges what ranks add up"
    return _Weighed(region, program, plan, None, exchanges, why)


def _plan(
    fd: FusionDefinition,
    region: Region,
    leading: Sequence[tuple[int, ...]] = (),
    size: Callable[[int | torch.SymInt], int] = hinted,
) -> Explanation:
    """At the sizes of the call for which the graph was made, or at what ``size`` says instead of them.

    ``leading``: axes of the inputs that the graph does not have.
    """
    own = [tuple(map(size, tensor_of(n).shape)) for n in region.inputs]
    shapes = [(*first, *shape) for first, shape in zip(leading or [()] * len(own), own, strict=True)]
    numbers = [size(n.meta["val"]) for n in region.numbers]
    scalars = [i.val for i in fd.fusion.inputs[len(shapes) :]]
    shape_scalars = fd.fusion.shape_scalars()
    known = {s: n for s, n in zip(scalars, numbers, strict=True) if s in shape_scalars}
    return explain_plan(fd.fec.plan(dict(zip(fd.fec.tensors(), shapes, strict=True)), known))


def _collectives(region: Region, starts: Sequence[Node], stays: Mapping[Node, str]) -> tuple[str, ...]:
    """Those of a region, and those beside it with why they are."""
    own = [f"{collective_text(n)}: inside" for n in region.collectives]
    nodes = dict.fromkeys((*region.nodes, *region.replaced))
    beside = [
        f"{collective_text(n)}: by itself, {stays.get(n, 'what reads it is in no region')}"
        for n in starts
        if n not in nodes and (n.args[0] in nodes or any(u in nodes for wait in n.users for u in wait.users))
    ]
    return (*own, *beside)


def _reported(kind: str, w: _Weighed) -> RegionReport:
    region, plan = w.region, w.plan
    ops = Counter(_op_name(n) for n in region.nodes if n.target is not operator.getitem)
    return RegionReport(
        kind,
        tuple(sorted(ops.items())),
        len(region.inputs),
        len(region.outputs),
        None if plan is None else plan.bytes,
        None if plan is None else plan.kernels,
        None if w.cost is None else w.cost.ours,
        None if w.cost is None else w.cost.inductor,
        w.taken,
        w.why,
        lines_of(region.nodes),
        "" if w.program is None else w.program.text,
        plan=plan,
        alone=None if w.program is None or region.collectives else graph_of(region),
    )


def _op_name(node: Node) -> str:
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else str(target)
