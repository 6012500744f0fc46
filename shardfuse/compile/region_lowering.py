# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false
"""What Inductor writes for a region: one call of an object of the generated module, see ``region_call.py``.

before, as for any op that Inductor does not know::

    buf3 = torch.ops.shardfuse.region_v1.default('def nvfuser_fusion(...', [buf0, reinterpret_tensor(buf1, ...)], [64])
    buf4 = buf3[0]
    assert_size_stride(buf4, (64, 8), (8, 1), 'torch.ops.shardfuse.region_v1.default')

after::

    buf3 = region_0f3a.run(buf0, buf1)
    del buf0
    buf4 = buf3[0]

``buf0`` is read here for the last time: ``buf4`` may have its memory.

Where Inductor writes for another host than Python the op is called; into C++ the pass hands nothing over.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import sympy
import torch
from torch._inductor import ir, lowering
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.virtualized import V

from .ahead import compile_ahead
from .dying_buffers import dying_buffers, let_go
from .program_text import statements_of
from .region_op import REGION, Program, program_of

_IMPORT = "from shardfuse.compile.region_call import RegionCall as shardfuse_region"
_WRAPPERS = (PythonWrapperCodegen, SubgraphPythonWrapperCodegen)


def is_python(wrapper: Any) -> bool:
    """Does ``wrapper`` write the Python module of a graph, in which an object may be declared?"""
    return type(wrapper) in _WRAPPERS and not V.graph.cpp_wrapper and not V.graph.aot_mode


def declare(wrapper: Any, imported: str, declared: str) -> bool:
    """Write ``imported`` and ``declared``, the lines of an object, at the head of the module, once.  Is it new?"""
    wrapper.add_import_once(imported)
    found: set[str] = vars(wrapper).setdefault("_shardfuse_declared", set())
    is_new = declared not in found
    if is_new:
        found.add(declared)
        wrapper.header.writelines(declared.split("\n"))
    return is_new


class RegionKernel(ir.FallbackKernel):
    """The op, but for the text that stands for it in Python."""

    def codegen(self, wrapper: Any) -> None:
        if is_python(wrapper):
            _write_call(self, wrapper)
            return
        super().codegen(wrapper)


@functools.cache
def register() -> None:
    """Have Inductor lower the op so, in this process."""
    lower_as(REGION, RegionKernel)


def lower_as(op: torch._ops.OpOverload, kernel: type[ir.FallbackKernel]) -> None:
    """``op``, whose results are laid out as its fake implementation says, by ``kernel``."""
    lowering.make_fallback(op, lowering.constrain_to_fx_strides, warn=False)

    def lower(*arguments: Any) -> list[Any]:
        outputs: Any = kernel.create(op, *_as_the_graph_says(arguments, V.graph.current_node.args))
        for output in outputs:
            output.skip_size_stride_alignment_checks = True
        return [ir.TensorBox.create(output) for output in outputs]

    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _as_the_graph_says(given: Any, said: Any) -> Any:
    """Tensors, also those of a list, in the order in memory for which a region was planned: that of nodes ``said``.

    The tag of the op asks Inductor for it, but torch 2.11 passes lists by.
    """
    if isinstance(given, list | tuple):
        return [_as_the_graph_says(*pair) for pair in zip(given, said, strict=True)]
    if not isinstance(given, ir.TensorBox):
        return given
    order = ir.get_stride_order(said.meta["val"].stride(), V.graph.sizevars.shape_env)
    return ir.ExternKernel.require_stride_order(given, order)


def _write_call(node: RegionKernel, wrapper: Any) -> None:
    text, *integers = cast("Sequence[Any]", node.constant_args)
    program = program_of(text)
    numbers = integers[program.size_count :]
    inputs = cast("Sequence[Any]", node.inputs)
    sizes = [e for x in inputs for e in (*x.get_size(), *x.get_stride())]
    symbols = _symbols(sizes + [_expression(numbers[k - len(inputs)]) for k in program.shape_numbers])
    given, views = _references(inputs, are_static=not symbols)
    given += [wrapper.val_to_arg_str(n) for n in numbers]
    rest = iter(integers)
    shapes = [tuple(_declared_size(next(rest), symbols) for _ in range(rank)) for rank in program.ranks]
    dying = dying_buffers(inputs)
    name, is_new = _declared(wrapper, text, inputs, views, shapes, tuple(dying))
    if is_new and not symbols:
        _compile_ahead(program_of(text, tuple(dying)), inputs, numbers)
    node.codegen_comment(wrapper)
    call = f"at(({', '.join(map(str, symbols))}, ), " if symbols else "run("
    wrapper.writeline(f"{node.get_name()} = {name}.{call}{', '.join(given)})")
    for buffer in dying.values():
        let_go(wrapper, buffer)


def _expression(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else number


def _declared_size(number: Any, symbols: Sequence[sympy.Symbol]) -> int | None:
    """A size of an output as ``RegionCall`` takes it."""
    found = _expression(number)
    if isinstance(found, int | sympy.Integer):
        return int(found)
    return -1 - symbols.index(found) if found in symbols else None


def _symbols(expressions: Iterable[Any]) -> list[sympy.Symbol]:
    found = {s for e in expressions if isinstance(e, sympy.Expr) for s in e.free_symbols}
    return sorted(cast("set[sympy.Symbol]", found), key=str)


def _references(inputs: Sequence[Any], *, are_static: bool) -> tuple[list[str], dict[int, object]]:
    """The text of each input; for a view at offset 0 that of its base, and the view's shape and strides."""
    found: list[str] = []
    views: dict[int, object] = {}
    for k, x in enumerate(inputs):
        is_bare = isinstance(x, ir.ReinterpretView) and x.layout.offset == 0 and x.layout.dtype == x.data.get_dtype()
        if is_bare and are_static:
            views[k] = tuple(map(int, x.get_size())), tuple(map(int, x.get_stride()))
        found.append((x.data if k in views else x).codegen_reference())
    return found, views


def _declared(
    wrapper: Any,
    text: str,
    inputs: Sequence[Any],
    views: dict[int, object],
    shapes: Sequence[tuple[int | None, ...]],
    given_up: tuple[int, ...],
) -> tuple[str, bool]:
    """The name of the object, one for all places whose inputs are laid out alike, and is it new to the module?"""
    layouts = [(x.get_dtype(), x.get_device(), tuple(x.get_size()), tuple(x.get_stride())) for x in inputs]
    name = f"region_{hashlib.sha256(repr((text, layouts, views, shapes, given_up)).encode()).hexdigest()[:12]}"
    lines = "".join(f"\n    {line!r}" for line in statements_of(text))
    call = f"{name} = shardfuse_region({lines},\n    {views!r}, {shapes!r}{f', {given_up!r}' if given_up else ''})"
    return name, declare(wrapper, _IMPORT, call)


def _compile_ahead(program: Program, inputs: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Sizes of the inputs are static."""
    layouts = [
        (tuple(map(int, x.get_size())), tuple(map(int, x.get_stride())), x.get_dtype(), x.get_device()) for x in inputs
    ]
    if not any(isinstance(n, torch.SymInt | torch.SymFloat) for n in numbers):
        compile_ahead(program, layouts, numbers)
