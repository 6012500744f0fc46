# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
# pyright: reportMissingTypeStubs=false
"""A region as one op: its program, and the graph with a call of it in its place.

before::

    %mean = aten.mean.dim(%x, [-1], True)
    %sub = aten.sub.Tensor(%x, %mean)
    %view = aten.view.default(%sub, [8, 8, 8])
    return %view

after::

    %region = shardfuse.region_v1.default("def nvfuser_fusion(fd ...", [%x], [64, 8])
    %item = getitem(%region, 0)
    %view = aten.view.default(%item, [8, 8, 8])
    return %view
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from ..ir.call import Select, Slice
from ..ir.op import View
from ..ir.tensor_view import TensorView
from .aten_table import is_view, translate
from .compile_errors import UntranslatableError
from .node_facts import expression_of, is_fusable
from .program_text import printed
from .random_op import is_seed
from .rank_region_op import RANK_REGION
from .region_op import REGION
from .regions import Region, epochs, ordered_nodes
from .translation import Translation, hinted, is_same_size, memory_order, stride_places, tensor_of


@dataclass(frozen=True)
class RegionProgram:
    """``text``: of the definition.  ``numbers``: integers of the graph that it reads.  ``group``: collectives' one."""

    text: str
    numbers: tuple[Node, ...]
    group: str | None = None


def program_of_region(region: Region) -> RegionProgram:
    """Raises ``UntranslatableError``, and what a definition refuses."""
    t = Translation()
    with t.fd:
        for n in region.inputs:
            t.add_input(n)
        for n in region.numbers:
            t.add_number(n)
        for n in (*region.again, *region.nodes):
            translate(t, n)
        for n in region.outputs:
            value = t.values[n]
            assert isinstance(value, TensorView), "outputs are tensors"
            _add_output(t, n, value)
    return RegionProgram(printed(t.fd), tuple(t.numbers), t.group)


def _add_output(t: Translation, node: Node, value: TensorView) -> None:
    """``value`` in the memory order that the graph says: dense, or it is refused."""
    tensor = tensor_of(node)
    order = memory_order(tensor) or list(range(tensor.ndim))
    step = 1
    for d in reversed(order):
        if hinted(tensor.shape[d]) != 1 and hinted(tensor.stride(d)) != step:
            raise UntranslatableError(f"the result of {node.target}", f"of strides {list(tensor.stride())}", "dense")
        step *= hinted(tensor.shape[d])
    is_plain = order == sorted(order)
    if value in t.fd.fusion.outputs or value.domain.allocation is not None or _is_view(t, value):
        value, is_plain = t.ops.set(value), False
    t.fd.add_output(value, stride_order=None if is_plain else stride_places(order))


def _is_view(t: Translation, value: TensorView) -> bool:
    """Is ``value`` an input, or made by a view?  Its storage, and its strides, would be another tensor's."""
    made_by = [record.op for record in t.fd.fusion.records if value in record.outputs]
    return not made_by or isinstance(made_by[0], View | Slice | Select)


# --- the graph ---------------------------------------------------------------------------------------------


def put_in(graph: Graph, taken: Sequence[tuple[Region, RegionProgram]]) -> None:
    """Replace the regions by calls.  The graph is ordered anew as far as the calls ask for it."""
    nodes = list(graph.nodes)
    place: dict[Node, tuple[int, ...]] = {n: (e, k) for k, (n, e) in enumerate(zip(nodes, epochs(nodes), strict=True))}
    now: dict[Node, Node] = {}
    for region, program in taken:
        _put_in(graph, region, program, place, now)
    copies = [now[n] for region, _ in taken for n in region.outside]
    while unread := [n for n in copies if not n.users]:  # it is rematerialised in all that read it
        copies = [n for n in copies if n.users]
        for n in unread:
            graph.erase_node(n)
    _reorder(graph, place)
    graph.lint()


def _put_in(
    graph: Graph, region: Region, program: RegionProgram, place: dict[Node, tuple[int, ...]], now: dict[Node, Node]
) -> None:
    """``now``: what stands for nodes that are gone, to which this region's are added."""
    at = place[next(iter(region.collectives), region.nodes[0])]  # collectives keep their order
    inputs, numbers = ([now.get(n, n) for n in given] for given in (region.inputs, program.numbers))
    with graph.inserting_before(region.nodes[0]):
        inputs = [_as_view(graph, n, place) for n in inputs]
        sizes: list[Any] = []
        for out in region.outputs:
            sizes += [_size(graph, [*numbers, *inputs], n, place, at) for n in tensor_of(out).shape]
        given = (program.text, inputs, [*sizes, *numbers])
        call = graph.call_function(
            *((REGION, given) if program.group is None else (RANK_REGION, (*given, program.group)))
        )
        call.meta["val"] = [tensor_of(o) for o in region.outputs]
        call.meta["stack_trace"] = region.nodes[-1].meta.get("stack_trace")
        place[call] = (*at, 1)
        replaced: dict[Node, Node] = {}
        for k, out in enumerate(region.outputs):
            item = graph.call_function(operator.getitem, (call, k))
            item.meta["val"] = tensor_of(out)
            place[item] = (*at, 2, k)
            replaced[out] = item
        for n in region.outside:
            copy = graph.node_copy(n, lambda a: replaced.get(a, a))
            place[copy] = place[n]
            replaced[n] = copy
    for old, new in replaced.items():
        old.replace_all_uses_with(new, propagate_meta=False)
    for n in reversed(region.replaced):
        graph.erase_node(n)
    now.update(replaced)


def _as_view(graph: Graph, node: Node, place: dict[Node, tuple[int, ...]]) -> Node:
    """Instead of a seed that is looked up, which is a kernel of one element, the view of it among all seeds."""
    if not is_seed(node):
        return node
    view = graph.call_function(torch.ops.aten.select.int, (node.args[0], 0, node.args[1]))
    view.meta["val"], place[view] = tensor_of(node), place[node]
    return view


def _size(
    graph: Graph,
    given: Sequence[Node],
    size: int | torch.SymInt,
    place: dict[Node, tuple[int, ...]],
    at: tuple[int, ...],
) -> int | Node:
    """A size of an output: a number, an integer that the call is given, or a size of a tensor that it is given."""
    if isinstance(size, int):
        return size
    for n in given:
        if is_same_size(n.meta["val"], size):
            return n
        for d, own in enumerate(n.meta["val"].shape if isinstance(n.meta["val"], torch.Tensor) else ()):
            if is_same_size(own, size):
                node = graph.call_function(torch.ops.aten.sym_size.int, (n, d))
                node.meta["val"] = own
                place[node] = (*at, 0)
                return node
    raise AssertionError("asked for by why_no_size")


def why_no_size(region: Region) -> str | None:
    """A size of an output that is no size of an input; None where there is none."""
    have = [n.meta["val"] for n in region.numbers] + [s for n in region.inputs for s in tensor_of(n).shape]
    for out in region.outputs:
        for size in tensor_of(out).shape:
            if isinstance(size, torch.SymInt) and not any(is_same_size(own, size) for own in have):
                return f"a size of {out.name}, {size}, is none of an input's"
    return None


def why_no_order(region: Region) -> str | None:
    """A result of symbolic sizes that Inductor cannot lay out for its reader; None where there is none.

    What a region gives has a fixed layout.  Where a convolution or another kernel of its own reads such a tensor,
    Inductor asks of each two strides whether one is a multiple of the other.  Of sums of products, which a reshape of
    an image leaves, sympy answers with a quotient, for which torch has no range of values (``ValueRangeError``).
    """
    inside = set(region.nodes)
    waiting = list(region.outputs)
    while waiting:
        n = waiting.pop()
        readers = [u for u in n.users if u not in inside or u in region.outside]
        views = [u for u in readers if is_view(u)]
        if any(u.op == "call_function" and not is_fusable(u) for u in readers if u not in views):
            strides = [expression_of(s) for s in tensor_of(n).stride()]
            strides = [s.expand() for s in strides] if is_view(n) else strides  # as Inductor's views have them
            if any(_is_quotient(a % b) for a, b in permutations(strides, 2) if a.free_symbols and b != 0):
                return f"Inductor cannot order the strides of {n.name}, {list(tensor_of(n).stride())}"
        waiting += views
    return None


def _is_quotient(remainder: Any) -> bool:
    return any(power.exp.is_negative for power in remainder.atoms(sympy.Pow))


def _reorder(graph: Graph, place: Mapping[Node, tuple[int, ...]]) -> None:
    """A topological order that keeps the places that nodes had, where what they read allows it."""
    nodes = list(graph.nodes)
    chain = ordered_nodes(sorted(nodes, key=lambda n: place[n]))
    missing = {n: len(n.all_input_nodes) for n in nodes}
    behind: dict[Node, list[Node]] = {n: list(n.users) for n in nodes}
    for a, b in pairwise(chain):
        behind[a].append(b)
        missing[b] += 1
    ready = [(place[n], k, n) for k, n in enumerate(nodes) if not missing[n]]
    heapq.heapify(ready)
    last: Node | None = None
    count = 0
    while ready:
        _, _, n = heapq.heappop(ready)
        if last is not None:
            last.append(n)
        last, count = n, count + 1
        for m in behind[n]:
            missing[m] -= 1
            if not missing[m]:
                heapq.heappush(ready, (place[m], len(nodes) + count, m))
    assert count == len(nodes), "regions are convex, all of them at once"
