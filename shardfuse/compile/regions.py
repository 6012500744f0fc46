# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
# pyright: reportMissingTypeStubs=false
"""Regions of a graph: which nodes one fusion is to take, what it reads, and what it gives.

A region is a maximal convex set of nodes around reductions, or, where these have left it, around a pointwise op that
costs more than the bytes that it moves (``grouping``).  At its rim it is cut where that moves fewer bytes:

- a view, or a cast to a wider type, that others read is not handed out: it is made once more outside, of what it is
  made of, so that no output shares storage with another tensor, and the narrow tensor is what is stored;
- likewise a view, a widening cast, or a tensor made of numbers that the region reads is made once more inside;
- what a pointwise kernel of Inductor computes at the rim from more bytes than it gives, a dropout's mask from random
  numbers say, stays there;
- likewise a large tensor that one region would store for others is rematerialised in each, from what they read
  anyway (``rematerialised``);
- a slice that is all that the region reads of a tensor, as of logits that were padded for a matrix product, is an input
  with strides of its own: its rows then begin where the padded tensor's do, and wide loads need no mask.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .aten_collectives import NAMESPACE, is_gather, is_start, is_wait
from .aten_table import aten_ops, is_view, is_widening, why_not
from .grouping import grouped
from .node_facts import PARTS, is_fusable, is_kernel, is_mutation, nbytes, nominal, tensors_of
from .random_op import draws_inside, is_draw
from .region_parts import parts_of
from .rematerialised import Rematerialised, rematerialised_in
from .translation import hinted


@dataclass(frozen=True)
class Region:
    """Nodes in the order of the graph.

    ``nodes``: what the fusion computes.  ``replaced``: all that it stands for, what is not read among them.
    ``again``: made inside once more.  ``inputs``: tensors that are read.  ``numbers``: integers of the graph that are
    read.  ``outputs``: tensors that others read.  ``outside``: nodes of it that others read and that are made outside
    once more.  ``rematerialised``: large tensors that several regions compute, this one among them.
    """

    nodes: tuple[Node, ...]
    replaced: tuple[Node, ...]
    again: tuple[Node, ...]
    inputs: tuple[Node, ...]
    numbers: tuple[Node, ...]
    outputs: tuple[Node, ...]
    outside: tuple[Node, ...]
    rematerialised: tuple[Node, ...] = ()

    @property
    def reductions(self) -> list[Node]:
        return [n for n in self.nodes if n.target in aten_ops().reductions]

    @property
    def collectives(self) -> list[Node]:
        """What starts each; its wait is in the region too."""
        return [n for n in self.nodes if is_start(n)]


def regions_of(
    graph: Graph, stays: Collection[Node] | None = None, stored: Collection[Node] = frozenset()
) -> tuple[list[Region], dict[str, str]]:
    """The regions of a graph, and why each other op that was asked is in none.

    ``stays``: collectives that no region may hold; all of them where it is left out.  ``stored``: what no region
    rematerialises.
    """
    nodes = list(graph.nodes)
    number = {n: k for k, n in enumerate(nodes)}
    refusals: dict[str, str] = {}
    joinable: list[bool] = []
    reasons: dict[str, str | None] = {}  # of ops alike, as those of a model's layers are: each is tried once
    for n in nodes:
        key = _signature(n)
        if key not in reasons:
            reasons[key] = why_not(n)
        reason = reasons[key]
        joinable.append(reason is None)
        if reason is not None and n.op == "call_function":
            refusals.setdefault(str(n.target), reason)
    for n in nodes:  # made anew wherever it is read
        if n.target in aten_ops().factories:
            joinable[number[n]] = False
        start = n.args[0] if is_wait(n) else n
        if is_wait(n) or is_start(n):
            joinable[number[n]] &= (
                isinstance(start, Node) and is_start(start) and stays is not None and start not in stays
            )
    followers = [[number[u] for u in n.users] for n in nodes]
    apart = {(number[a], number[n]) for n in nodes if is_start(n) and not is_gather(n) for a in n.all_input_nodes}
    apart |= {(number[n], number[u]) for n in nodes for u in n.users if not _is_on_one_device(n, u)}
    for before, after in pairwise(ordered_nodes(nodes)):
        if after not in before.users:
            apart.add((number[before], number[after]))
        followers[number[before]].append(number[after])
    seeds = [number[n] for n in nodes if n.target in aten_ops().reductions]
    epoch = epochs(nodes)
    later = [number[n] for n in nodes if n.target in aten_ops().costly]
    found = grouped(followers, joinable, seeds, epoch, _siblings(nodes, number), apart, later)
    now = {n: epoch[k] for n, k in number.items()}
    heavy = [number[n] for n in nodes if not joinable[number[n]] and is_kernel(n)]
    parts = [p for group in found for p in _in_parts([nodes[k] for k in group], number, heavy)]
    return _made(parts, now, stored), refusals


def _made(parts: Sequence[Sequence[Node]], epoch: Mapping[Node, int], stored: Collection[Node]) -> list[Region]:
    """The regions of ``parts``; what would be rematerialised in a part of which no region is left is stored."""
    shared = rematerialised_in(parts, epoch, stored)
    made = [_region(part, epoch, shared) for part in parts]
    lost = {n for n, units in shared.results.items() if any(made[k] is None for k in units)}
    if lost:
        return _made(parts, epoch, {*stored, *lost})
    own: list[list[Node]] = [[] for _ in parts]
    for n, units in shared.results.items():
        for k in units:
            own[k].append(n)
    return [replace(r, rematerialised=tuple(nodes)) for r, nodes in zip(made, own, strict=True) if r is not None]


def _in_parts(group: list[Node], number: Mapping[Node, int], heavy: Sequence[int]) -> list[list[Node]]:
    """All ranks cut regions with collectives alike, which sizes of a call do not tell."""
    return [group] if any(map(is_start, group)) else parts_of(group, number, heavy, nbytes)


def _signature(node: Node) -> str:
    """What ``why_not`` looks at: the op, its arguments, and of tensors what is known without their data."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return _signature(node.args[0])
    given = map_arg((node.args, node.kwargs), _described)
    if is_draw(node):
        given = (given, draws_inside(node))
    return f"{node.op} {node.target} {given} {_Described(node.meta.get('val'))}"


def _described(node: Node) -> Any:
    """Instead of a node its value, which ``map_arg`` puts into the arguments whatever it is.

    Of what is made of numbers alone, these too: an op may be taken where it reads nothing else.
    """
    found = _Described(node.meta.get("val"))
    if node.target in aten_ops().factories:
        found.text += f" of {node.target}{node.args}"
    return found


class _Described:
    """A value of a graph; its text tells kind, dtype, layout and device."""

    def __init__(self, value: object) -> None:
        values = cast("Sequence[object]", value) if isinstance(value, tuple | list) else (value,)
        self.text = ", ".join(map(_description, values))

    def __repr__(self) -> str:
        return self.text


def _description(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    strides = value.stride() if value.layout is torch.strided else None
    return f"{value.dtype}{list(value.shape)}{strides}{value.device}{value.layout}"


def epochs(nodes: Sequence[Node]) -> list[int]:
    """Of each node how many nodes that change a tensor stand before it; such a node is alone in its epoch.

    What reads a tensor before it is changed must stay before, whatever data says.
    """
    found: list[int] = []
    epoch = 0
    for n in nodes:
        if is_mutation(n):
            found.append(epoch + 1)
            epoch += 2
        else:
            found.append(epoch)
    return found


def ordered_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Nodes that keep their order among themselves: random numbers, and collectives, which all ranks start alike."""
    return [n for n in nodes if _is_ordered(n.target)]


def _is_ordered(op: object) -> bool:
    if not isinstance(op, torch._ops.OpOverload):
        return False
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    is_collective = op.namespace == NAMESPACE and "wait_tensor" not in op.name()
    return is_random or is_collective or op.name() == "shardfuse::rank_region_v1"


def _siblings(nodes: Sequence[Node], number: dict[Node, int]) -> list[tuple[int, int]]:
    """Pairs that read the same tensor, of which a reduction's group would read it once."""
    pairs: list[tuple[int, int]] = []
    for n in nodes:
        readers = [u for u in n.users if isinstance(u.meta.get("val"), torch.Tensor | tuple | list) and not is_start(u)]
        pairs += [(number[a], number[b]) for a, b in pairwise(readers) if _is_on_one_device(a, b)]
    return pairs


def _is_on_one_device(a: Node, b: Node) -> bool:
    """A number on the CPU may be read on a GPU, and is computed elsewhere then."""
    devices = {v.device for v in (*tensors_of(a), *tensors_of(b))}
    return len(devices) < 2


# --- the rim -----------------------------------------------------------------------------------------------


def _region(group: Sequence[Node], epoch: Mapping[Node, int], shared: Rematerialised) -> Region | None:
    """The region of a group; None where nothing is left of it.

    ``epoch``: of every node.  What is made once more is of the region's: its inputs have not changed in between.
    """
    kept = _without_slices_at_rim(_without_narrowing_rim(_without_draws_beside_collectives(group), shared))
    outputs, outside = _outputs(kept, shared)
    nodes = _needed(kept, outputs)
    if not any(map(_is_seed, nodes)) or not all(map(_is_tensor, outputs)):
        return None
    inside, now = set(nodes), epoch[nodes[0]]
    read = [a for n in nodes for a in n.all_input_nodes if a not in inside]
    again: list[Node] = []
    inputs: dict[Node, None] = {}
    waiting = [(n, n in shared.results) for n in dict.fromkeys(read)]
    while waiting:
        n, is_shared = waiting.pop(0)
        if n in inputs or n in again:
            continue
        is_slice = _is_slice_read_alone(n, (*inside, *read, *again))
        if (is_shared or (not is_slice and _is_cheap(n))) and epoch[n] == now and why_not(n) is None:
            again.append(n)
            waiting += [(a, a in shared.results or (is_shared and a in shared.nodes)) for a in n.all_input_nodes]
        else:
            inputs[n] = None
    tensors = tuple(n for n in inputs if _is_tensor(n))
    numbers = tuple(n for n in inputs if n not in tensors)
    if not tensors:
        return None
    return Region(tuple(nodes), tuple(kept), tuple(sorted(again)), tensors, numbers, tuple(outputs), tuple(outside))


def _is_seed(n: Node) -> bool:
    return n.target in aten_ops().reductions or n.target in aten_ops().costly


def _is_tensor(n: Node) -> bool:
    return isinstance(n.meta.get("val"), torch.Tensor)


def _is_cheap(n: Node) -> bool:
    return is_view(n) or n.target in aten_ops().factories or (n.op == "call_function" and is_widening(n))


def _outputs(nodes: Sequence[Node], shared: Rematerialised) -> tuple[list[Node], list[Node]]:
    """What others read: tensors to be stored, and what is made of them outside."""
    inside = set(nodes)
    wanted = {n for n in nodes if any(u not in inside for u in n.users)}
    parts: set[Node] = set()  # of what is rematerialised, read by nothing else outside
    outside: list[Node] = []
    for n in reversed(nodes):
        is_shared = n in shared.results or (n in parts and n not in wanted)
        if is_shared or (n in wanted and (is_view(n) or is_widening(n))):
            outside.append(n)
            wanted.discard(n)
            for a in n.all_input_nodes:
                if a in inside:
                    (parts if is_shared and a in shared.nodes and a not in wanted else wanted).add(a)
    return [n for n in nodes if n in wanted], outside[::-1]


def _needed(nodes: Sequence[Node], outputs: Sequence[Node]) -> list[Node]:
    """What the outputs rest on."""
    inside, wanted = set(nodes), set(outputs)
    for n in reversed(nodes):
        if n in wanted:
            wanted.update(a for a in n.all_input_nodes if a in inside)
    return [n for n in nodes if n in wanted]


def _without_draws_beside_collectives(group: Sequence[Node]) -> Sequence[Node]:
    """Each rank draws by seeds of its own: a mask is read, as any other tensor of which ranks have different ones."""
    if not any(map(is_start, group)):
        return group
    return [n for n in group if not is_draw(n)]


def _without_narrowing_rim(group: Sequence[Node], shared: Rematerialised) -> list[Node]:
    """Without what Inductor computes at the rim, in the kernel of what it is made of, from more bytes than it gives."""
    kept = dict.fromkeys(group)
    count = partial(nbytes, size=nominal if any(map(is_start, group)) else hinted)
    for n in group:
        sources = n.all_input_nodes
        is_kept = n.target in aten_ops().reductions or n.target is operator.getitem or is_start(n)
        if is_kept or any(a in kept or a in shared.results for a in sources):
            continue
        fusable = [a for a in sources if is_fusable(a) and all(u is n or u not in kept for u in a.users)]
        if fusable and count(n) < sum(map(count, fusable)):
            del kept[n]
    return list(kept)


def _without_slices_at_rim(group: Sequence[Node]) -> list[Node]:
    """Without slices that are all that the group reads of a tensor, and the views of it that they are taken of."""
    kept = dict.fromkeys(group)
    for n in group:
        chain = [n]
        while chain[-1] in kept and _is_slice_read_alone(chain[-1], kept):
            chain.append(cast(Node, chain[-1].args[0]))
            while chain[-1] in kept and is_view(chain[-1]) and _is_read_alone(chain[-1], kept):
                chain.append(cast(Node, chain[-1].args[0]))
            if chain[-1] not in kept:
                for gone in chain[:-1]:
                    del kept[gone]
    return list(kept)


def _is_slice_read_alone(n: Node, readers: Collection[Node]) -> bool:
    """Is it a part of a tensor of which ``readers`` read nothing else?"""
    return n.target in PARTS and _is_read_alone(n, readers)


def _is_read_alone(n: Node, readers: Collection[Node]) -> bool:
    source = n.args[0]
    return isinstance(source, Node) and all(u is n or u not in readers for u in source.users)


def nearest_behind(graph: Graph, regions: Sequence[Region]) -> list[tuple[int, ...]]:
    """Of each region the numbers of those on whose results it rests, through other ops alone."""
    of = {n: k for k, r in enumerate(regions) for n in (*r.nodes, *r.outside)}
    sources: dict[Node, dict[int, None]] = {}  # of every node outside, the regions that it rests on
    found: list[dict[int, None]] = [{} for _ in regions]
    for n in graph.nodes:
        read: dict[int, None] = {}
        for a in n.all_input_nodes:
            read |= {of[a]: None} if a in of else sources.get(a, {})
        if n in of:
            found[of[n]] |= read
        else:
            sources[n] = read
    return [tuple(b for b in behind if b != k) for k, behind in enumerate(found)]
