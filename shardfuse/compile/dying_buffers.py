# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
"""Buffers of a graph of Inductor whose memory a region may take: the region is the last that reads them.

Inductor writes results over such buffers in its own kernels, and so it may those that autograd has saved for this
backward alone and hands over with it (donated buffers).  Here the same buffers are named to the region's program, which
takes the memory of those that its kernels read element by element before they write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch._inductor import config, ir
from torch._inductor.codegen.wrapper import FreeLine, PythonWrapperCodegen
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V

from .region_op import REGION

_OWNERS = (ir.ComputedBuffer, ir.ExternKernelOut, ir.TemplateBuffer)
"""Buffers that Inductor allocates, one by one."""


def dying_buffers(inputs: Sequence[Any]) -> dict[int, Any]:
    """By the place of an input its buffer, where the node that is being written is the last that reads it.

    No buffer that two inputs have, none that begins elsewhere than its storage does, none whose memory something else
    may have: a caller's, a constant's, an alias's, or that of a recorded CUDA graph's input.
    """
    node = V.graph.scheduler.current_node
    if node is None or not config.inplace_buffers or config.memory_planning:
        return {}
    names = [x.get_name() for x in inputs]
    found: dict[int, Any] = {}
    for k, (name, x) in enumerate(zip(names, inputs, strict=True)):
        if names.count(name) == 1 and name in node.last_usage and x.get_layout().offset == 0:
            buffer = _owned(name)
            is_tensor = buffer is not None and buffer.get_size() != []  # a kernel has numbers as well
            if is_tensor and _has_the_gaps(buffer, x):
                found[k] = buffer
    return found


def _has_the_gaps(buffer: Any, x: Any) -> bool:
    """Where rows of ``x`` are apart, are the gaps between and behind them the buffer's own?

    Gaps of an input of the graph are not: another tensor may be there.
    """
    known, own = V.graph.sizevars, buffer.get_layout()
    allocated = _allocated(own.size, own.stride)
    if isinstance(buffer, ir.InputBuffer) and not known.statically_known_equals(allocated, sympy_product(own.size)):
        return bool(
            known.statically_known_equals(_allocated(x.get_size(), x.get_stride()), sympy_product(x.get_size()))
        )
    spans = (n * s for n, s in zip(x.get_size(), x.get_stride(), strict=True))
    return all(known.statically_known_leq(sympy.expand(span - allocated), 0) for span in spans)


def _allocated(size: Sequence[Any], stride: Sequence[Any]) -> Any:
    """Elements from the first to the last."""
    return sympy.expand(1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)))


def _owned(name: str) -> Any:
    """The buffer of this name, where its memory is its own and nobody's else."""
    graph: Any = V.graph
    if not graph.wrapper_code.can_reuse(_Named(name)):
        return None
    given = graph.graph_inputs_original.get(name)
    if given is not None:  # what CUDA graphs record reads its inputs where they are
        is_plain = type(graph.wrapper_code) is PythonWrapperCodegen and not config.triton.cudagraphs
        return given if isinstance(given, ir.DonatedBuffer) and is_plain else None
    buffer = graph.name_to_buffer.get(name)
    is_of_region = isinstance(buffer, ir.MultiOutput) and getattr(buffer.inputs[0], "op_overload", None) is REGION
    if not (isinstance(buffer, _OWNERS) or is_of_region) or type(buffer.get_output_spec()) is not ir.FixedLayout:
        return None
    is_alone = not buffer.get_inputs_that_alias_output() and not buffer.get_mutation_names()
    return buffer if is_alone and graph.scheduler.name_to_buf[name].can_free() else None


class _Named:
    """What ``can_reuse`` asks of a buffer."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_name(self) -> str:
        return self._name


def let_go(wrapper: Any, buffer: Any) -> None:
    """Its name ends here, and Inductor gives its memory to no other buffer: an output may have it."""
    if not isinstance(buffer, ir.InputBuffer):  # inputs are let go of by Inductor, which reuses none of them
        wrapper.freed.add(buffer.get_name())
        wrapper.writeline(FreeLine(wrapper, buffer))
