# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
"""The pass over Inductor's graphs: regions are found, weighed, noted, and replaced where they are worth it."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from ..base_error import ShardfuseError
from ..config import VERSION
from ..frontend.explain import Explanation, explain_plan
from .compile_errors import CompileOptionError
from .cost import Cost, cost_of, why_never
from .ledger import RegionReport, note
from .published import publish
from .region_op import Program, program_of
from .region_times import module_of
from .regions import Region, lines_of, nearest_behind, regions_of
from .replacement import RegionProgram, program_of_region, put_in, why_no_size
from .translation import hinted, tensor_of

Take = Literal["auto", "all", "none"]
GraphPass = Callable[[Graph], None]


@functools.cache
def source_hash() -> str:
    """Of this package's sources: what they make of a graph is kept in torch's caches."""
    found = hashlib.sha256(VERSION.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


class PostGradPass(CustomGraphPass):
    """Hands regions of a graph over to shardfuse.

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
            hand_over(graph, self.take)

    def uuid(self) -> object:
        """Tells compiled graphs apart in torch's caches; None, for no caching, where a pass before it has no uuid."""
        others: list[object] = []
        for other in self.before:
            found: Any = other.uuid() if isinstance(other, CustomGraphPass) else None
            if not found:
                return None
            others.append(found)
        return ("shardfuse", source_hash(), self.take, *others)


_graphs = count()
"""Numbers of the graphs that the pass has seen in this process."""


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
    regions, _ = regions_of(graph)
    weighed = [_weigh(region, take) for region in regions]
    kind = "backward" if any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder")) else "forward"
    behind = nearest_behind(graph, regions)
    of = next(_graphs)
    found = [replace(_reported(kind, w), of=of, number=k, behind=behind[k]) for k, w in enumerate(weighed)]
    note(found)
    publish(found)
    taken = [(w.region, w.program) for w in weighed if w.taken and w.program is not None]
    if taken:
        put_in(graph, taken)


def _weigh(region: Region, take: Take) -> _Weighed:
    """What does not translate, or has no plan, stays Inductor's: the definition's own errors say why."""
    why = why_no_size(region)
    if why is not None:
        return _Weighed(region, None, None, None, False, why)
    try:
        program = program_of_region(region)
        plan = _plan(program_of(program.text), region)
    except ShardfuseError as error:
        return _Weighed(region, None, None, None, False, str(error).splitlines()[0])
    is_gpu = any(tensor_of(n).device.type == "cuda" for n in region.inputs)
    settings: Any = inductor_config.triton
    is_mix_order = bool(getattr(settings, "mix_order_reduction", False))  # not in every torch
    cost = cost_of(region, plan, has_cuda_graphs=bool(settings.cudagraphs), is_mix_order=is_mix_order)
    if take == "all":
        return _Weighed(region, program, plan, cost, True, f"all regions are taken; {cost}")
    why = "there is nothing to gain on a CPU" if not is_gpu else why_never(plan)
    if why is not None:
        return _Weighed(region, program, plan, cost, False, why)
    return _Weighed(region, program, plan, cost, cost.gains, str(cost))


def _plan(program: Program, region: Region) -> Explanation:
    """At the sizes of the call for which the graph was made."""
    fec = program.fd.fec
    shapes = [tuple(hinted(s) for s in tensor_of(n).shape) for n in region.inputs]
    numbers = [hinted(n.meta["val"]) for n in region.numbers]
    scalars = [i.val for i in program.fd.fusion.inputs[len(shapes) :]]
    shape_scalars = program.fd.fusion.shape_scalars()
    known = {s: n for s, n in zip(scalars, numbers, strict=True) if s in shape_scalars}
    return explain_plan(fec.plan(dict(zip(fec.tensors(), shapes, strict=True)), known))


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
        module=None if w.program is None else module_of(region),
    )


def _op_name(node: Node) -> str:
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else str(target)
