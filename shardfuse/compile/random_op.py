# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false
"""``shardfuse::image_rand_v1``: the numbers of Inductor's ``inductor_random``, of an image in channels-last.

    image_rand_v1(SymInt[] size, Tensor seed) -> Tensor

An element's number follows from its place in a contiguous tensor of that size, whatever the order in memory: a dropout
keeps the same elements, but where Inductor draws four numbers at a time (``numbers_blocks``).  Inductor's own op is a
contiguous tensor, and what reads it in another order is a kernel that turns it; this one is computed where it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..ir.dtype import DataType
from ..ir.tensor_view import TensorView
from .aten_shapes import view_table
from .compile_errors import UntranslatableError
from .translation import Rule, Size, Translation, known, tensor_of


def draws_as_rand(node: Node) -> bool:
    """Is ``node`` Inductor's draw of uniform numbers, each by its own place alone?"""
    from torch._inductor import config

    if not is_draw(node) or len(node.args) != 3 or node.args[2] != "rand" or node.kwargs:
        return False
    if config.fallback_random or getattr(config, "align_random_eager", False):
        return False
    return not numbers_blocks(tensor_of(node).device) or _is_of_this_graph(cast(Node, node.args[1]))


def random_table() -> dict[object, Rule]:
    """Inductor's draws, as ops of shardfuse."""
    from torch._inductor import inductor_prims

    return {inductor_prims.random: _drawn}


def _drawn(t: Translation, node: Node) -> TensorView:
    """The same numbers: each of its place in the contiguous tensor, and of the seed."""
    if not draws_inside(node):
        raise UntranslatableError("inductor_random", node.args[2:], "uniform numbers, each by its place, on a GPU")
    shape = tensor_of(node).shape
    given = cast(Sequence[object], node.args[0])
    sizes: list[Size] = [known(n) if known(n) >= 0 else t.size(g) for g, n in zip(given, shape, strict=True)]
    count: Any = 1
    for n in sizes:
        count = t.ops.mul(count, n) if not isinstance(count, int) or not isinstance(n, int) else count * n
    return t.ops.philox_uniform(t.tensor(node.args[1]), t.ops.reshape(t.ops.iota(count, dtype=DataType.Int), sizes))


def draws_inside(node: Node) -> bool:
    """May a region draw the numbers of ``node``, so that all that is made of them is as Inductor's kernels have it?

    Not where they are cast to 16 bits: a region rounds there, and Inductor's kernels round what they store alone.
    """
    return _draws_by_place(node) and not any(map(_narrows, node.users))


def compare_unrounded(graph: Graph) -> None:
    """Where 16-bit numbers that were drawn are compared, and nothing else, compare what was drawn.

    Inductor's kernels do so, which round what they store alone: the mask of a dropout of 16-bit numbers is the same
    then, wherever it is made.
    """
    from torch._inductor import config

    if config.emulate_precision_casts or not config.triton.codegen_upcast_to_fp32:
        return
    for narrow in filter(_narrows, graph.find_nodes(op="call_function", target=_CAST)):
        drawn = cast(Node, narrow.args[0])
        views = _views_compared(narrow) if _draws_by_place(drawn) else None
        if views is None:
            continue
        narrow.replace_all_uses_with(drawn)
        graph.erase_node(narrow)
        for view in views:
            view.meta["val"] = _as_float32(tensor_of(view))


def _narrows(node: Node) -> bool:
    """Is it a cast to 16 bits?"""
    return node.target is _CAST and node.args[1] in (torch.float16, torch.bfloat16)


def _views_compared(narrow: Node) -> list[Node] | None:
    """The views through which it is compared; ``None`` where anything else is done with it."""
    views, of_views = list[Node](), view_table()
    waiting = [narrow]
    while waiting:
        for user in waiting.pop().users:
            if user.target in of_views:
                views.append(user)
                waiting.append(user)
            elif user.target not in _COMPARISONS:
                return None
    return views


def _as_float32(value: torch.Tensor) -> torch.Tensor:
    with cast(Any, value).fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=torch.float32, device=value.device)


_CAST: Any = torch.ops.prims.convert_element_type.default
_COMPARISONS = tuple(
    getattr(getattr(torch.ops.aten, name), kind) for name in ("gt", "ge", "lt", "le") for kind in ("Scalar", "Tensor")
)


def _draws_by_place(node: Node) -> bool:
    return draws_as_rand(node) and draws_in_triton(tensor_of(node).device)


def draws_in_triton(device: torch.device) -> bool:
    """Does Inductor draw by ``tl.rand`` there?  On a CPU its numbers are others."""
    return device.type == "cuda"


def is_draw(node: Node) -> bool:
    """Is it Inductor's draw of random numbers, of any kind?"""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() == "prims::inductor_random"


def is_seed(node: Node) -> bool:
    """Is it one of the seeds of Inductor's draws?"""
    return node.target is torch.ops.prims.inductor_lookup_seed.default


def _is_of_this_graph(seed: Node) -> bool:
    """Can no other graph draw from it again, as the backward of a checkpoint does?  Its numbers would be others."""
    found = (seed, *seed.all_input_nodes)
    return not any(n.op == "placeholder" or any(u.op == "output" for u in n.users) for n in found)


def numbers_blocks(device: torch.device) -> bool:
    """Does ``ops.rand`` in a kernel of one axis number the elements of a block from the least of their places on?

    Inductor of torch 2.13 draws four numbers at a time so.  Where the elements of a block are not neighbours in the
    contiguous tensor, as those of an image in channels-last are not, blocks would then share their numbers.
    """
    from torch._inductor.runtime import triton_helpers

    return device.type == "cuda" and hasattr(triton_helpers, "rand4x")


def channels_last_strides(shape: Sequence[int]) -> list[int]:
    """Of a dense image [n, c, ...]: channels innermost, then the last axis."""
    strides, step = [0] * len(shape), 1
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        strides[d] = step
        step *= shape[d]
    return strides


@functools.cache
def register() -> Any:
    """The op, which Inductor then lowers, in this process."""
    from torch._inductor import inductor_prims, ir, lowering
    from torch._inductor.virtualized import ops

    def constant(value: int) -> Any:
        return ops.constant(value, torch.int64)

    def _by_place(seed: Any, place: Any) -> Any:
        """The first word of the element's own counter, as ``tl.rand`` makes a number of it."""
        word = ops.randint64(seed, place, constant(0), constant(1 << 32))
        folded = ops.where(ops.lt(word, constant(1 << 31)), word, ops.sub(constant((1 << 32) - 1), word))
        return ops.mul(ops.to_dtype(folded, torch.float32), ops.constant(4.6566127342e-10, torch.float32))

    @torch.library.custom_op("shardfuse::image_rand_v1", mutates_args=())
    def image_rand(size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
        drawn = inductor_prims.random(size, seed, "rand")
        return torch.empty_strided(size, channels_last_strides(size), device=drawn.device).copy_(drawn)

    @image_rand.register_fake
    def _(size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(size, channels_last_strides(size), dtype=torch.float32, device=seed.device)

    op = torch.ops.shardfuse.image_rand_v1.default

    def lower(size: Sequence[Any], seed: Any) -> Any:
        device, given = seed.get_device_or_error(), [*size]
        contiguous = ir.FlexibleLayout.contiguous_strides(given)
        place = ir.FixedLayout(device, torch.float32, given, contiguous).make_indexer()
        load = seed.make_loader()

        draw = _by_place if numbers_blocks(device) else ops.rand

        def one(index: Any) -> Any:
            return draw(load([]), ops.index_expr(place(index), torch.int32))

        return ir.Pointwise.create(device=device, dtype=torch.float32, inner_fn=one, ranges=given)

    lowering.register_lowering(op, type_promotion_kind=None)(lower)
    return op
