# pyright: reportUnknownMemberType=false
"""Calls of ops that run collectives, in what Inductor compiles: all of them, on each rank in the order of the graph.

Our ops are pure, so that Inductor may drop a call whose results nothing reads and may order calls by the memory they
need.  Both depend on shapes, and shards differ in size:

- what has no elements is never read in Inductor's code.  A rank whose shard is empty would leave out the norm of
  ``norm(x) * 2``, and the other ranks would wait in its collectives;
- two ranks could run the same collectives in two orders.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch._library.utils import get_layout_constraint_tag

T = TypeVar("T")

_LAST = "_shardfuse_last_collective"
"""The attribute of Inductor's graph that holds the name of the buffer of the last such call."""


def register_fallback(op: Any, has_collectives: Callable[..., bool]) -> None:
    """Have Inductor, where it is imported, call ``op`` as it is, with the strides that torch itself asks for.

    has_collectives: of the op's arguments, does it run collectives?  Such a call is kept, behind the last one.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    make_fallback = getattr(lowering, "make_fallback", None)  # another thread may be importing it
    if make_fallback is None or op in lowering.lowerings or op in lowering.decompositions:
        return
    tag = cast("Any", get_layout_constraint_tag)(op, with_default=True)
    make_fallback(op, lowering.tag_to_layout_constraint(tag), warn=False)
    lowering.lowerings[op] = _in_order(op, lowering.lowerings[op], has_collectives)


def _in_order(op: Any, lower: Callable[..., T], has_collectives: Callable[..., bool]) -> Callable[..., T]:
    @wraps(lower)
    def lowered(*arguments: Any) -> T:
        from torch._inductor.virtualized import V

        graph = cast("Any", V.graph)
        known = len(graph.operations)
        made = lower(*arguments)
        if has_collectives(*arguments):
            (call,) = (found for found in graph.operations[known:] if getattr(found, "op_overload", None) is op)
            _keep(graph, call)
        return made

    return lowered


def _keep(graph: Any, call: Any) -> None:
    """Have Inductor write ``call``, behind the last one; results of that one do not live longer for it."""
    call.has_side_effects = lambda: True
    last = cast("dict[str, str]", vars(graph)).get(_LAST)
    if last is not None:
        graph.additional_buffer_deps[call.get_operation_name()].add(last)
    setattr(graph, _LAST, call.get_name())
