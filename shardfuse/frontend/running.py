"""What a definition does once all of it is said: it runs, is tuned and validated, and tells of its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, cast

import torch

from ..base_error import shown
from ..errors import DefinitionError, InputError, NoReproError
from ..executor.agreement import failures_told
from ..executor.binding import Argument, check_kinds
from ..executor.options import CompileOptions
from ..executor.uncompiled import uncompiled
from ..ir.caller_lines import lines_named
from ..ir.fusion import Fusion
from ..ir.scalar import Number
from ..ir.tensor_view import TensorView
from ..ops.host import python_number
from .argument_checks import ranks_of
from .counted_calls import RefusalsNoted
from .detection import has_dtensor
from .repeat import Repeated, SameCall
from .repro import described, repro_script, reproduced
from .validation import validated

if TYPE_CHECKING:  # what runs a fusion is imported when the first one is run
    from ..analysis.communication_table import Communication
    from ..compiler import Plan
    from ..executor.choices import Tuned
    from ..executor.timeline import Timeline
    from ..executor.timing import Timer
    from .dtensor import DTensorExecutor
    from .executor_cache import FusionExecutorCache, Made
    from .explain import Explanation

_closing = Lock()
"""Held while a definition is closed: threads that run it first close it once."""


class Running:
    """The runs of a fusion.  The executor is made by the first one, and closes the definition."""

    fusion: Fusion
    _options: CompileOptions
    _fec: FusionExecutorCache | None
    _dtensors: DTensorExecutor | None
    _described: list[str] | None
    _again: SameCall | None = None
    """The last program that two calls in a row have run."""

    @property
    def fec(self) -> FusionExecutorCache:
        """The executor; with it the definition is closed."""
        if self._fec is None:
            with _closing:
                self._close()
        assert self._fec is not None, "made now, or by another thread"
        return self._fec

    def _close(self) -> None:
        if self._fec is not None:
            return
        from shardfuse.frontend.dtensor import DTensorExecutor
        from shardfuse.frontend.executor_cache import FusionExecutorCache

        said = [i.val.domain if isinstance(i.val, TensorView) else None for i in self.fusion.inputs]
        self._dtensors = DTensorExecutor(self.fusion, said, self._options)
        self._fec = FusionExecutorCache(self.fusion, self._options)

    @property
    def sends(self) -> bool | None:
        """Do ranks send one another anything in its programs of plain tensors?  None where none was made yet."""
        return None if self._fec is None else self._fec.sends

    @property
    def _last(self) -> FusionExecutorCache:
        """The executor of the last call."""
        fec = self.fec
        return fec if self._dtensors is None or self._dtensors.last is None else self._dtensors.last

    @uncompiled
    def execute(
        self,
        inputs: Sequence[Argument],
        *,
        sizes: Mapping[TensorView, Sequence[int]] | None = None,
        device: torch.device | str | int | None = None,
        save_repro_inputs: bool = False,
    ) -> list[torch.Tensor]:
        """Run on this rank's tensors; returns this rank's outputs.  With a DTensor among them, outputs are DTensors.

        inputs: tensors and numbers in the order in which they were declared.
        sizes: unsharded shapes of inputs where a shard of symbolic size is uneven; without it such a size costs an
        exchange of 8 bytes a call.
        device: where the outputs are to be; left out, where the inputs are.
        save_repro_inputs: remember shapes, strides and dtypes for ``last_repro_script``.

        An output whose mesh does not have this rank is ``None``.

        Outputs have no gradient, whatever the backend: a fusion is not an op of autograd.  ``NoGradientsWarning`` is
        given once for each definition where an input requires one.  For gradients use ``shardfuse.nn``, or run one
        fusion in the forward and one in the backward of a ``torch.autograd.Function``.

        Raises ``InputError``, ``InputCountError``, ``ShapeError``, ``ShardingError``, ``EmptyFusionError``.
        """
        fec = self._fec
        if fec is not None and sizes is None and device is None and not save_repro_inputs:
            assert self._dtensors is not None, "made with the executor"
            outputs = None if self._again is None else self._again.run(inputs)
            if outputs is not None:
                self._dtensors.last_variant = None
                return outputs
            programs, last = fec.programs, fec.last_made
            made = fec.ready(inputs)
            if made is not None:
                outputs = self._run_again(fec, made, inputs)
                if made is last and fec.is_found_by_layouts and (self._again is None or self._again.made is not made):
                    self._again = SameCall(made, Repeated(self, fec, made, programs, inputs), inputs)
                return outputs
        return self._execute(inputs, sizes=sizes, device=device, save_repro_inputs=save_repro_inputs)

    def _run_again(self, fec: FusionExecutorCache, made: Made, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """A run that finds all that it takes: what can go wrong is named when it has."""
        assert self._dtensors is not None, "made with the executor"
        try:
            outputs = fec.run(made, inputs)
        except Exception:
            with lines_named(self.fusion), reproduced(lambda: self._script_for(inputs)):
                raise
        self._dtensors.last_variant = None
        return outputs  # pyright: ignore[reportReturnType]

    def repeat(self, inputs: Sequence[torch.Tensor], name: str = "") -> Repeated | None:
        """What runs it on inputs like these, with which it has run, and gives ``None`` where they are not as it takes.

        It is for callers that have compared shapes, strides, dtypes and devices.  ``name``: as a profiler shows it.
        """
        fec = self._fec
        if fec is None:
            return None
        programs = fec.programs  # as they are before they are looked at: another thread may tune, and put others there
        made = fec.ready(inputs)
        return None if made is None else Repeated(self, fec, made, programs, inputs, name)

    def _execute(
        self,
        inputs: Sequence[Argument],
        *,
        sizes: Mapping[TensorView, Sequence[int]] | None,
        device: torch.device | str | int | None,
        save_repro_inputs: bool,
    ) -> list[torch.Tensor]:
        if save_repro_inputs:
            self._described = [described(v) for v in inputs]
        fec, home = self.fec, None
        if sizes or device is not None:
            team = ranks_of(self.fusion)
            with RefusalsNoted(fec, team), failures_told(team):
                home = _device(device)
                self._check_sizes(sizes)
        assert self._dtensors is not None, "made with the executor"
        with lines_named(self.fusion), reproduced(lambda: self._script_for(inputs)):
            if has_dtensor(inputs):
                return self._dtensors.execute(inputs, sizes, home)  # pyright: ignore[reportReturnType]
            outputs = fec.execute(inputs, sizes=sizes, device=home)
            self._dtensors.last_variant = None
            return outputs  # pyright: ignore[reportReturnType]

    def tune(
        self,
        inputs: Sequence[Argument],
        *,
        sizes: Mapping[TensorView, Sequence[int]] | None = None,
        device: torch.device | str | int | None = None,
        seconds: float | None = None,
        timer: Timer | None = None,
    ) -> list[Tuned]:
        """Tune the kernels for these inputs (as for ``execute``): later calls of their sizes run what was chosen.

        Schedules near those proposed are compiled, checked against them and timed on random tensors, with a bar on
        stderr; choices are kept in the cache directory.  Every rank calls it: one tunes for all.
        ``SHARDFUSE_AUTOTUNE=1`` does so before each first run on a GPU.

        seconds: when to stop trying; left out, after half of SHARDFUSE_TIMEOUT.
        timer: gives the microseconds of several runs that take turns, instead of CUDA events.

        Returns, for each segment that has kernels, what was proposed and chosen, with its microseconds.  Kernels in
        which ranks exchange are left as proposed, and a UserWarning names them: one rank alone would wait in them.
        Raises ``TuningUnavailableError`` without a GPU, and what ``execute`` does.
        """
        fec, home = self.fec, _device(device)
        self._check_sizes(sizes)
        tuner = fec.tuner(timer, seconds)
        assert self._dtensors is not None, "made with the executor"
        with lines_named(self.fusion), reproduced(lambda: self._script_for(inputs)):
            if has_dtensor(inputs):
                return self._dtensors.tune(inputs, sizes, home, tuner)
            tuned = fec.tune(inputs, sizes, home, tuner)
            self._dtensors.last_variant = None
            return tuned

    def execute_with_dtensors(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Run on DTensors; returns DTensors.

        An input about which the definition says nothing is sharded as its DTensor is; unsharded sizes are those of the
        DTensors.
        A plain tensor among them is this rank's piece.
        Raises ``InputError`` where a DTensor contradicts the definition, ``PlacementError``, and what ``execute`` does.
        """
        if not has_dtensor(inputs):
            for k, (declared, value) in enumerate(zip(self.fusion.inputs, inputs, strict=False)):
                if isinstance(declared.val, TensorView):
                    kind = type(value).__name__
                    raise InputError(k, declared.val.name, kind, "a DTensor", "use execute() where there are none")
        return self.execute(inputs)

    def validate(
        self,
        inputs: Sequence[Argument],
        reference_outputs: Sequence[torch.Tensor] | None = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> list[torch.Tensor]:
        """``execute``, with the outputs compared to ``reference_outputs``, or to the same ops one by one in torch.

        On one rank, or of DTensors, which are compared whole.  ``device``: as of ``execute``.  Raises
        ``ValidationError``, and ``DefinitionError`` for local tensors of a mesh of several ranks without references.
        """
        if reference_outputs is None and inputs and len(ranks_of(self.fusion)) > 1 and not has_dtensor(inputs):
            found = f"local tensors of {len(ranks_of(self.fusion))} ranks and no reference_outputs"
            expected = "DTensors, which are compared whole, or reference_outputs, this rank's pieces of the outputs"
            raise DefinitionError("validate", found, expected)
        run = partial(self.execute, inputs, device=device)
        return validated(self.fusion, inputs, run, reference_outputs, _device(device))

    def repro_script_for(self, inputs: Sequence[Argument] | None = None) -> str:
        """A script that defines this fusion and, with ``inputs``, runs it on random tensors of their layout.

        Raises ``InputError`` and ``InputCountError`` for tensors in place of numbers, or the other way round.
        """
        if inputs is not None:
            inputs = [python_number(v) for v in inputs]
            with lines_named(self.fusion):
                check_kinds(self.fusion, inputs)
        return self._script_for(inputs)

    def _script_for(self, inputs: Sequence[Argument] | None) -> str:
        """As ``repro_script_for``, of inputs that may be what is wrong."""
        return repro_script(self, None if inputs is None else [described(v) for v in inputs])

    def last_repro_script(self) -> str:
        """The script for the inputs of the last ``execute(..., save_repro_inputs=True)``.  Raises ``NoReproError``."""
        if self._described is None:
            raise NoReproError
        return repro_script(self, self._described)

    def explain(
        self,
        inputs: Sequence[torch.Tensor | Number] | None = None,
        *,
        sizes: Mapping[TensorView, Sequence[int]] | None = None,
        html: str | Path | None = None,
        timeline: Timeline | None = None,
    ) -> Explanation:
        """Say what the fusion is compiled to: segments, kernels, collectives, bytes, and the reasons.

        inputs, sizes: local tensors, or unsharded shapes, to plan for; with neither, the last plan that ran.
        html: a file to write the same to as a page, with the graph, the cuts, the time of a copy of as many bytes, and
        the part of each tensor that every rank holds.  Each rank that passes it writes it.
        timeline: of a run, for the page to show measured times.

        Raises ``NoPlanError``; ``InputError`` for what `execute` refuses, and for uneven shards without ``sizes``;
        ``DefinitionError`` for a timeline without a page, or for what is no path; ``PageError`` where that cannot be
        written.
        """
        from shardfuse.frontend.explain import explain_plan

        if timeline is not None and html is None:
            raise DefinitionError("explain", "timeline= without html=", "html= as well: the page shows it")
        self._check_sizes(sizes)
        with lines_named(self.fusion), reproduced(lambda: self._script_for(inputs)):
            plan, moved = self._plan_for(inputs, sizes)
            explained = explain_plan(plan, moved)
        if html is not None:
            from shardfuse.frontend.page import write_page

            write_page(html, plan, explained, timeline)
        return explained

    def _plan_for(
        self, inputs: Sequence[torch.Tensor | Number] | None, sizes: Mapping[TensorView, Sequence[int]] | None
    ) -> tuple[Plan, Sequence[Communication]]:
        """The plan, and what the pieces of DTensors are exchanged by."""
        fec = self.fec
        if self._dtensors is not None and has_dtensor(inputs or ()):
            return self._dtensors.plan_for(inputs or (), sizes)
        plan = (fec if inputs is not None else self._last).plan_for(inputs, sizes)
        is_last = inputs is None and sizes is None
        return plan, self._dtensors.moved if is_last and self._dtensors is not None else ()

    def timeline(
        self, inputs: Sequence[Argument], *, sizes: Mapping[TensorView, Sequence[int]] | None = None
    ) -> Timeline:
        """What ran when, on which stream, in a run on this rank's tensors (after one to warm up); prints as bars.

        Every rank of the fusion's meshes calls it.  ``.chrome_trace()`` is JSON for chrome://tracing and Perfetto.
        """
        fec = self.fec
        self._check_sizes(sizes)
        assert self._dtensors is not None, "made with the executor"
        with lines_named(self.fusion):
            if has_dtensor(inputs):
                return self._dtensors.timeline(inputs, sizes)
            found = fec.timeline(inputs, sizes)
        self._dtensors.last_variant = None
        return found

    def _check_sizes(self, sizes: Mapping[TensorView, Sequence[int]] | None) -> None:
        """Raises ``DefinitionError`` for what is no input, a shape of another rank, and sizes below 0."""
        inputs = [i.val for i in self.fusion.inputs] if sizes else []
        for tv, shape in (sizes or {}).items():
            if tv not in inputs:
                raise DefinitionError("sizes", repr(tv), "TensorViews that are inputs of this definition")
            if len(shape) != tv.ndim or min(shape, default=0) < 0:
                raise DefinitionError("sizes", f"{list(shape)} for {tv!r}", f"{tv.ndim} unsharded sizes of 0 or more")
            if any(static not in (-1, n) for static, n in zip(tv.shape, shape, strict=True)):
                raise DefinitionError("sizes", f"{list(shape)} for {tv!r}", f"{list(tv.shape)}, as it is defined")

    def last_trace(self) -> str:
        """The text of every stage of the last plan, and of the host program and kernels that ran."""
        return self._last.last_trace()


def _device(named: torch.device | str | int | None) -> torch.device | None:
    """A number is a GPU's; a GPU without a number is the current one."""
    if named is None:
        return None
    try:
        device = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    except (RuntimeError, TypeError, ValueError):
        expected = "a torch.device, its text, or a GPU's number of 0 or more"
        raise DefinitionError("execute", f"device={shown(named)}", expected) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DefinitionError("execute", f"device={shown(named)}", "a device that is here: torch finds no GPU")
    is_any = device.type == "cuda" and cast(int | None, device.index) is None
    return torch.device("cuda", torch.cuda.current_device()) if is_any else device
