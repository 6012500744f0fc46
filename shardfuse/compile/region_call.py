# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportAttributeAccessIssue=false
"""A region as generated code of Inductor calls it: no dispatcher, no program text, nothing looked up by its tensors.

    region_0f3a = shardfuse_region("def nvfuser_fusion(fd ...", {1: ((2, 8, 64), (512, 64, 1))}, [(64, 8)])
    ...
    buf3 = region_0f3a.run(buf0, buf1, primals_2)          # all sizes are static
    buf3 = region_0f3a.at((s0, ), buf0, buf1, primals_2)   # sizes are those of the symbols

An object stands for one place of generated code, or for several whose inputs are laid out alike.  What Inductor has
guarded, or laid out itself, is not checked again: shapes, strides, dtypes and devices.  The first call, and the first
one of other sizes, goes the checked way, and what it bound runs from then on.

Second argument: shape and strides of inputs that are passed as their base tensor, which begins at the same address.
The list has the shapes of the outputs, -1 for the first symbol, -2 for the second: calls that go the checked way
compare them.  A fourth argument names the inputs that nothing reads behind the call, whose memory outputs may take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import cast

import torch
from torch._C._dynamo import guards

from ..executor.binding import Argument
from ..executor.host_program import Program as HostProgram
from ..executor.options import CompileOptions
from ..frontend.profiled import name_of, profiled, profiler
from .compile_errors import OutputShapeError
from .garbage_collection import without_garbage_collection
from .kept_regions import KeptRegion
from .ledger import note_cached_text, place_of
from .region_op import program_of

Layout = tuple[tuple[int, ...], tuple[int, ...]]
Run = Callable[..., Sequence[torch.Tensor]]
_view = cast(Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor], guards._reinterpret_tensor)
MOST = 256
"""Sizes for which one place keeps what it bound; one more empties the table."""


class RegionCall:
    """``run(*inputs, *numbers)`` and ``at(sizes, *inputs, *numbers)`` give the outputs.

    ``text``: of the program.  ``views``: by the place of an input, the shape and strides of a view of which the call is
    given the base.  ``shapes``: those of the outputs; of a symbol -1 less its place, and None where another expression
    gives the size.  ``given_up``: places of inputs that an output may be stored over.  ``sizes``: those of a call's
    symbols, from which its layouts follow, and those of which its shapes are made.  A number that is only computed with
    is none of them: what is bound holds for all of its values.

    Raises ``OutputShapeError`` where the program gives an output another shape.
    """

    __slots__ = ("_given_up", "_shapes", "_text", "_views", "bound", "run")

    def __init__(
        self,
        text: str,
        views: Mapping[int, Layout] | None = None,
        shapes: Sequence[Sequence[int | None]] = (),
        given_up: tuple[int, ...] = (),
    ) -> None:
        self._text, self._views, self._shapes, self._given_up = text, dict(views or {}), shapes, given_up
        self.run: Run = self._first
        self.bound: dict[Hashable, Run] = {}

    def at(self, sizes: tuple[int, ...], *arguments: Argument) -> Sequence[torch.Tensor]:
        run = self.bound.get(sizes)
        if run is not None:
            return run(*arguments)
        if len(self.bound) >= MOST:
            self.bound.clear()
        with without_garbage_collection():
            outputs, run = self._checked(arguments)
        self._check_shapes(outputs, sizes)
        self.bound[sizes] = run
        return outputs

    def _first(self, *arguments: Argument) -> Sequence[torch.Tensor]:
        with without_garbage_collection():
            outputs, run = self._checked(arguments)
        self._check_shapes(outputs, ())
        self.run = run
        return outputs

    def _check_shapes(self, outputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        """Inductor's kernels read the outputs by the sizes of the graph."""
        for k, (out, shape) in enumerate(zip(outputs, self._shapes, strict=bool(self._shapes))):
            declared = [sizes[-1 - n] if n is not None and n < 0 else n for n in shape]
            if len(declared) != out.ndim or any(n not in (None, m) for n, m in zip(declared, out.shape, strict=True)):
                raise OutputShapeError(k, list(out.shape), declared, self._text)

    def _checked(self, arguments: Sequence[Argument]) -> tuple[Sequence[torch.Tensor], Run]:
        """The outputs, and what gives those of later calls."""
        note_cached_text(self._text)
        whole = self._as_declared(arguments, self._views)
        kept = KeptRegion(self._text, self._given_up, whole, CompileOptions.from_environment())
        program = kept.read()
        if program is not None:
            run = self._direct(program)
            return run(*arguments), run
        fd = program_of(self._text, self._given_up).fd
        outputs = fd.execute(whole)
        made = fd.fec.ready(whole)
        if made is None:
            return outputs, self._always_checked
        kept.write(made.program)
        return outputs, self._direct(made.program)

    def _direct(self, program: HostProgram) -> Run:
        run = cast(Run, program.run)
        rest = {k: layout for k, layout in self._views.items() if k not in program.by_address}
        if rest:
            return self._seen_by_profilers(lambda *arguments: run(*self._as_declared(arguments, rest)))
        return self._seen_by_profilers(run)

    def _seen_by_profilers(self, run: Run) -> Run:
        """``run`` as a range of its own while torch's profiler records."""
        in_range = profiled(run, self._profiled_name)

        def observed(*arguments: Argument) -> Sequence[torch.Tensor]:
            return in_range(*arguments) if profiler._is_profiler_enabled else run(*arguments)

        return observed

    def _profiled_name(self, arguments: Sequence[Argument]) -> str:
        """What the region computes, of which sizes, and for which lines of the model."""
        name = name_of(program_of(self._text).fd.fusion, self._as_declared(arguments, self._views))
        return f"{name}{place_of(self._text)}"

    def _always_checked(self, *arguments: Argument) -> Sequence[torch.Tensor]:
        return self._checked(arguments)[0]

    @staticmethod
    def _as_declared(arguments: Sequence[Argument], views: Mapping[int, Layout]) -> list[Argument]:
        """With the views, where the call was given their bases."""
        found = list(arguments)
        for k, (shape, strides) in views.items():
            found[k] = _view(cast(torch.Tensor, found[k]), shape, strides, 0)
        return found
