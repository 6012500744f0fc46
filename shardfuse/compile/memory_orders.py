# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false
"""What follows in a graph where a tensor gets another order in memory: the order of everything that is computed of it.

``follow`` computes it, without a change to the graph; ``commit`` writes it down.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .aten_table import aten_ops, is_view
from .node_facts import is_mutation, is_pointwise
from .random_op import channels_last_strides, draws_as_rand, register
from .translation import known

aten: Any = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_READERS = frozenset((*CONVOLUTIONS, aten.mm.default, aten.addmm.default, aten.bmm.default, operator.getitem))
"""Ops beside those of regions that read any order of memory."""
_OF_PLACES = frozenset((aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype))
"""Ops whose result follows from where elements are in memory."""
_SMALL = 64
"""A view that this order of memory forbids is made a copy where it has so many times fewer elements than the image."""

Values = dict[Node, Any]
"""What nodes are in the new order: fake tensors."""
Askers = dict[Node, list[Node]]
"""By a node that asks for the order that it had: what it reads that has another."""


def is_image_in_channels_last(value: object) -> bool:
    """Is it a dense tensor [n, c, ...] whose channels, several of them, are innermost in memory, and pixels not one?"""
    return is_image(value) and is_dense(cast(torch.Tensor, value))


def is_image(value: object) -> bool:
    """Is it a tensor [n, c, ...] of two or three dims of pixels, with several channels and several pixels, whose sizes
    are known?"""
    if not isinstance(value, torch.Tensor) or value.ndim not in (4, 5) or any(known(n) < 0 for n in value.shape):
        return False
    shape = [known(n) for n in value.shape]
    return shape[1] > 1 and math.prod(shape[2:]) > 1


def is_dense(value: torch.Tensor) -> bool:
    """Is an image dense in channels-last?  The strides of axes of one element say nothing."""
    expected = channels_last_strides(list(map(known, value.shape)))
    return all(n == 1 or a == b for n, a, b in zip(value.shape, value.stride(), expected, strict=True))


def source_of(copy: Node) -> Node:
    """What a copy, or an item of a list, is taken from."""
    return cast(Node, copy.args[0])


def commit(graph: Graph, values: Values, gone: Sequence[Node]) -> None:
    """Write ``values`` down, and leave out the nodes of ``gone``, each for what it is a copy of."""
    for n, value in values.items():
        if n not in gone:
            n.meta["val"], n.target = value, _target(n)
            if draws_as_rand(n):
                n.target, n.args = register(), n.args[:2]
    for n in gone:
        n.replace_all_uses_with(source_of(n), propagate_meta=False)
        graph.erase_node(n)


def follow(start: Node, values: Values, askers: Askers | None = None) -> Values | None:
    """``values``, and what follows from them behind ``start``.

    Who asks for the order that a tensor had, the caller's ``output`` among them, is put into ``askers``.  None where
    there are no ``askers``, and where one cannot be given a copy: it may write to it, or see that two share memory.
    """
    values = dict(values)
    n = start
    while (n := n.next).op != "output":
        read = [a for a in n.all_input_nodes if any(b in values for b in with_bases(a))]
        if n.op != "call_function" or n in values or not read:
            continue
        if is_mutation(n) and n.args[0] in read:
            return None
        found = _computed(n, values) if _allows(n) else None
        if found is None and (askers is None or not _takes_copies(n)):
            return None
        if found is None:
            cast(Askers, askers)[n] = [a for a in read if _is_moved(a, values)]
        elif not _is_alike(found, n.meta["val"]):
            values[n] = found
    given = dict.fromkeys(given_to_caller(n))
    shared = {b for a in given for b in with_bases(a)[1:]}
    if any(_is_moved(b, values) for b in (*shared, *(given if askers is None else ()))):
        return None
    moved = [a for a in given if _is_moved(a, values)]
    if moved:
        cast(Askers, askers)[n] = moved
    return values


def _takes_copies(n: Node) -> bool:
    """Does ``n`` compute new tensors of what it reads, or a view, and nothing else?"""
    target: Any = n.target
    if target in _OF_PLACES or not isinstance(target, torch._ops.OpOverload) or is_mutation(n):
        return False
    return is_view(n) or all(r.alias_info is None for r in target._schema.returns)


def _is_moved(n: Node, values: Mapping[Node, Any]) -> bool:
    return n in values and not _is_alike(values[n], n.meta["val"])


def with_bases(n: Node) -> list[Node]:
    """``n``, and what it may be a view of, step by step: autograd makes views that a caller gets of one tensor anew, of
    that tensor."""
    found = [n]
    while _shares_memory(n) and isinstance(n.args[0], Node):
        n = n.args[0]
        found.append(n)
    return found


def _shares_memory(n: Node) -> bool:
    """Is it a view of its first argument, or one of several, which come as a list, or these?"""
    made = source_of(n) if n.target is operator.getitem else n
    if not isinstance(made.target, torch._ops.OpOverload):
        return False
    return is_view(made) or any(r.alias_info is not None for r in made.target._schema.returns)


def given_to_caller(output: Node) -> list[Node]:
    """What the caller gets of a graph, whose order it may ask for; not what the backward alone reads."""
    given: Any = output.args[0]
    found: Sequence[Any] = given if isinstance(given, tuple | list) else [given]
    places = output.meta.get("user_visible_output_idxs", range(len(found)))
    return [found[k] for k in places if isinstance(found[k], Node)]


def _allows(n: Node) -> bool:
    """Does ``n`` give the same elements whatever the order in memory of what it reads?"""
    target: Any = n.target
    if target in _OF_PLACES:
        return False
    if target in _READERS or target in aten_ops().rules:
        return True
    return is_pointwise(n) or (isinstance(target, torch._ops.OpOverload) and _is_computed_by_inductor(target))


def _is_computed_by_inductor(target: torch._ops.OpOverload) -> bool:
    """Does Inductor write the op itself, which it does by indices, and not call a kernel that may ask for an order?"""
    from torch._inductor import lowering

    if target.namespace not in ("aten", "prims") or target in lowering.fallbacks:
        return False
    return target in lowering.lowerings and lowering.maybe_layout_constraints(target) is None


def _computed(n: Node, values: Values) -> Any:
    """The value of ``n``; None where it would be a view that cannot be."""
    _draw_alike(n, values)
    given: Any = map_arg((n.args, n.kwargs), lambda a: values.get(a, a.meta["val"]))
    args, kwargs = given
    if n.target is operator.getitem:
        return args[0][args[1]]
    one: Any = next(v for v in values.values() if isinstance(v, torch.Tensor))
    with one.fake_mode:
        found: Any = _target(n)(*args, **kwargs)
    if is_view(n) and isinstance(args[0], torch.Tensor) and not found._is_view() and found is not args[0]:
        most = max(v.numel() for v in values.values() if isinstance(v, torch.Tensor))
        return found if found.numel() * _SMALL <= most else None
    return found


def _target(n: Node) -> Any:
    """Of ``n``; what asks for a view takes a copy too."""
    return aten.reshape.default if n.target in (aten.view.default, aten._unsafe_view.default) else n.target


def _draw_alike(n: Node, values: Values) -> None:
    """Of an op on an image in channels-last and on random numbers: the numbers, and what is made of them, so too."""
    given = [(a, values.get(a, a.meta.get("val"))) for a in n.all_input_nodes]
    images: list[Any] = [v for _, v in given if is_image_in_channels_last(v)]
    for a, v in given:
        if not images or not isinstance(v, torch.Tensor) or v.shape != images[0].shape or is_image_in_channels_last(v):
            continue
        for made in _drawn(a):
            values[made] = in_channels_last(made.meta["val"])


def in_channels_last(value: Any) -> Any:
    """A fake tensor like ``value``, an image, dense in channels-last."""
    strides = channels_last_strides(list(map(known, value.shape)))
    with value.fake_mode:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _drawn(n: Node) -> list[Node]:
    """``n`` and what it is made of back to random numbers that nothing else reads; empty where it is not."""
    found = [n]
    while not draws_as_rand(found[-1]):
        last = found[-1]
        sources = last.all_input_nodes
        if not is_pointwise(last) or len(sources) != 1 or len(sources[0].users) != 1:
            return []
        found.append(sources[0])
    return found


def _is_alike(a: Any, b: Any) -> bool:
    """Are the elements of two tensors of one shape, or of each of several, at the same places in memory?"""
    if isinstance(a, tuple | list):
        return all(map(_is_alike, a, cast("tuple[Any, ...]", b)))
    if not isinstance(a, torch.Tensor):
        return True
    strides = zip(a.shape, a.stride(), cast(torch.Tensor, b).stride(), strict=True)
    return all(own == other or known(n) == 1 for n, own, other in strides)
