# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
"""Images are in channels-last between convolutions: copies to another order of memory are left out.

before, of a group norm, which torch takes of contiguous images on a GPU (``%x`` is what a convolution gave)::

    %clone = aten.clone(%x, memory_format=torch.contiguous_format)
    %view = aten.reshape(%clone, [16, 32, 10, 4096])
    %var_mean = aten.var_mean(%view, [2, 3])
    ...
    %convolution_1 = aten.convolution(%silu, %weight, ...)

after, where all between are in the order of ``%x``::

    %view = aten.reshape(%x, [16, 32, 10, 4096])
    %var_mean = aten.var_mean(%view, [2, 3])
    ...
    %convolution_1 = aten.convolution(%silu, %weight, ...)

A convolution that reads one operand in channels-last copies the other into that order, in its forward and again in its
backward, and a kernel that reads one order and writes another takes three to five times as long as its bytes.  What a
tensor holds does not follow from its order, so that a copy into another is left out where everything that reads it
computes each element by itself, reduces, or is a convolution.  Random numbers follow from the place of an element in
the tensor, not in memory: those that a dropout draws are drawn in the order in which they are read (``random_op``).

Convolutions of contiguous images in 16 bits are of kernels that take channels-last, too: cuDNN turns image, weight and
result at each call.  Where that is more than turning the weights once, weights and first images are turned in the
graph, and everything between convolutions follows them.
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
from .random_op import channels_last_strides, draws_as_rand, register
from .regions import is_mutation, nbytes
from .translation import known

aten: Any = torch.ops.aten
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_READERS = frozenset(
    (
        *_CONVOLUTIONS,
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        operator.getitem,
    )
)
"""Ops beside those of regions that read any order of memory."""
_SMALL = 64
"""A view that this order of memory forbids is made a copy where it has so many times fewer elements than the image."""

Values = dict[Node, Any]
"""What nodes are in the new order: fake tensors."""


def keep_channels_last(graph: Graph, *, only_gpu: bool = True) -> int:
    """Leave out copies between orders of memory; how many have been, or have been moved to where they are smaller.

    The nodes' metadata say the new strides.
    """
    output = next(iter(graph.find_nodes(op="output")))
    asked = {n: n.meta["val"] for n in _seen(output) if isinstance(n.meta.get("val"), torch.Tensor)}
    turned = _turn_convolutions(graph)
    written = {a for n in graph.nodes if is_mutation(n) for a in n.all_input_nodes}
    images = [n for n in graph.nodes if _is_copy_of_image(n) and not (only_gpu and not n.meta["val"].is_cuda)]
    copies = [n for n in images if written.isdisjoint(_with_bases(_source(n)))]
    values: Values = {}
    gone: list[Node] = []
    for copy in copies:
        found = _follow(copy, {**values, copy: values.get(_source(copy), _source(copy).meta["val"])})
        if found is not None:
            values, gone = found, [*gone, copy]
    _commit(graph, values, gone)
    if turned + len(gone):
        _give_strides(graph, output, asked)
    return turned + len(gone)


def _give_strides(graph: Graph, output: Node, asked: Mapping[Node, Any]) -> None:
    """Give gradients of weights of one pixel the strides that they had: with images in channels-last cuDNN has others.

    Strides of axes of one element say nothing, and no metadata has them, but DistributedDataParallel compares a
    gradient's with its weight's.
    """
    for n in _seen(output):
        if n in asked and _is_gradient_of_one_pixel(n):
            with graph.inserting_before(output):
                view = graph.call_function(aten.as_strided.default, (n, list(asked[n].shape), list(asked[n].stride())))
            view.meta["val"] = asked[n]
            output.replace_input_with(n, view)


def _is_gradient_of_one_pixel(n: Node) -> bool:
    if n.target is not operator.getitem or n.args[1] != 1:
        return False
    shape = n.meta["val"].shape
    return _source(n).target is aten.convolution_backward.default and all(known(k) == 1 for k in shape[2:])


def is_image_in_channels_last(value: object) -> bool:
    """Is it a dense tensor [n, c, ...] whose channels, several of them, are innermost in memory, and pixels not one?"""
    return _is_image(value) and _is_dense(cast(torch.Tensor, value))


def _is_image(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim not in (4, 5) or any(known(n) < 0 for n in value.shape):
        return False
    shape = [known(n) for n in value.shape]
    return shape[1] > 1 and math.prod(shape[2:]) > 1


def _is_dense(value: torch.Tensor) -> bool:
    """In channels-last; the strides of axes of one element say nothing."""
    expected = channels_last_strides(list(map(known, value.shape)))
    return all(n == 1 or a == b for n, a, b in zip(value.shape, value.stride(), expected, strict=True))


def _source(copy: Node) -> Node:
    return cast(Node, copy.args[0])


def _is_copy_of_image(n: Node) -> bool:
    source = n.args[0] if n.target is aten.clone.default else None
    if not isinstance(source, Node) or not is_image_in_channels_last(source.meta.get("val")):
        return False
    return not is_image_in_channels_last(n.meta.get("val"))


def _commit(graph: Graph, values: Values, gone: Sequence[Node]) -> None:
    """Write ``values`` down, and leave out the nodes of ``gone``, each for what it is a copy of."""
    for n, value in values.items():
        if n not in gone:
            n.meta["val"], n.target = value, _target(n)
            if draws_as_rand(n):
                n.target, n.args = register(), n.args[:2]
    for n in gone:
        n.replace_all_uses_with(_source(n), propagate_meta=False)
        graph.erase_node(n)


# --- what follows from another order -----------------------------------------------------------------------


def _follow(start: Node, values: Values) -> Values | None:
    """``values``, and what follows from them behind ``start``; None where something asks for the order that it had."""
    values = dict(values)
    n = start
    while (n := n.next).op != "output":
        if n.op != "call_function" or n in values or not any(a in values for a in n.all_input_nodes):
            continue
        if not _allows(n):
            return None
        found = _computed(n, values)
        if found is None:
            return None
        if not _is_alike(found, n.meta["val"]):
            values[n] = found
    return values if not any(_is_moved(b, values) for a in _seen(n) for b in _with_bases(a)) else None


def _is_moved(n: Node, values: Mapping[Node, Any]) -> bool:
    return n in values and not _is_alike(values[n], n.meta["val"])


def _with_bases(n: Node) -> list[Node]:
    """``n``, and what it may be a view of, step by step: autograd makes views that a caller gets of one tensor anew, of
    that tensor."""
    found = [n]
    while is_view(n) and isinstance(n.args[0], Node):
        n = n.args[0]
        found.append(n)
    return found


def _seen(output: Node) -> list[Node]:
    """What the caller gets of a graph, whose order it may ask for; not what the backward alone reads."""
    given: Any = output.args[0]
    found: Sequence[Any] = given if isinstance(given, tuple | list) else [given]
    places = output.meta.get("user_visible_output_idxs", range(len(found)))
    return [found[k] for k in places if isinstance(found[k], Node)]


def _allows(n: Node) -> bool:
    """Does ``n`` give the same elements whatever the order in memory of what it reads?"""
    target: Any = n.target
    if target is aten.as_strided.default:  # which counts places in memory
        return False
    if target in _READERS or target in aten_ops().rules:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


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
            values[made] = _in_channels_last(made.meta["val"])


def _in_channels_last(value: Any) -> Any:
    strides = channels_last_strides(list(map(known, value.shape)))
    with value.fake_mode:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _drawn(n: Node) -> list[Node]:
    """``n`` and what it is made of back to random numbers that nothing else reads; empty where it is not."""
    found = [n]
    while not draws_as_rand(found[-1]):
        last = found[-1]
        is_pointwise = isinstance(last.target, torch._ops.OpOverload) and torch.Tag.pointwise in last.target.tags
        sources = last.all_input_nodes
        if not is_pointwise or len(sources) != 1 or len(sources[0].users) != 1:
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


# --- convolutions of contiguous images ---------------------------------------------------------------------


def _turn_convolutions(graph: Graph) -> int:
    """Turn weights and first images of convolutions in 16 bits on a GPU, where that is less than what cuDNN turns."""
    convolutions = [n for n in graph.find_nodes(op="call_function", target=aten.convolution.default) if _is_turned(n)]
    turned = sum(nbytes(n) + nbytes(cast(Node, n.args[0])) for n in convolutions)
    weights = {cast(Node, n.args[1]): None for n in convolutions}
    if not convolutions or turned <= sum(map(nbytes, weights)):
        return 0
    images = {cast(Node, n.args[0]): None for n in convolutions}
    made = [_turn(graph, n) for n in dict.fromkeys((*weights, *images)) if _is_contiguous(n)]
    values = _follow(min(made), {n: n.meta["val"] for n in made})
    if values is None:
        for n in made:
            n.replace_all_uses_with(_source(n), propagate_meta=False)
            graph.erase_node(n)
        return 0
    alike = [n for n in made if is_image_in_channels_last(values.get(_source(n)))]
    _commit(graph, values, alike)
    return len(made) - len(alike)


def _is_turned(convolution: Node) -> bool:
    """Does cuDNN turn what a convolution reads and gives?"""
    x, w, groups = (convolution.args[k] for k in (0, 1, 8))
    if not isinstance(x, Node) or not isinstance(w, Node) or groups != 1:
        return False
    value: Any = x.meta["val"]
    is_narrow = value.dtype in (torch.bfloat16, torch.float16) and value.device.type == "cuda"
    return is_narrow and _is_contiguous(x) and not is_image_in_channels_last(w.meta["val"])


def _is_contiguous(n: Node) -> bool:
    value = n.meta["val"]
    return _is_image(value) and value.is_contiguous() and not _is_dense(value)


def _turn(graph: Graph, n: Node) -> Node:
    """A copy of ``n`` in channels-last behind it, for all that read it; of a graph's input for convolutions alone."""
    value = n.meta["val"]
    order = torch.channels_last if value.ndim == 4 else torch.channels_last_3d
    with graph.inserting_after(n):
        copy = graph.call_function(aten.clone.default, (n,), {"memory_format": order})
    copy.meta["val"] = _in_channels_last(value)
    is_input = n.op == "placeholder"
    n.replace_all_uses_with(
        copy, lambda u: u is not copy and (not is_input or u.target in _CONVOLUTIONS), propagate_meta=False
    )
    return copy
