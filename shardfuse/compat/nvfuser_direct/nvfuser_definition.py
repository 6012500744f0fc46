"""nvFuser's FusionDefinition, its guard, and the module-level ``define_tensor``, ``define_scalar`` and ``ops``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch

from shardfuse.compat.nvfuser_direct.execution import (
    Fusion,
    FusionExecutorCache,
    KernelExecutor,
    home_of,
    nvfuser_script,
)
from shardfuse.compat.nvfuser_direct.listed_inputs import checked_inputs, flattened, listed
from shardfuse.compat.nvfuser_direct.nvfuser_errors import translated
from shardfuse.compat.nvfuser_direct.operations import Operations
from shardfuse.compat.nvfuser_direct.values import TensorView, Val, plain
from shardfuse.executor.binding import Argument
from shardfuse.frontend import definition as native
from shardfuse.frontend.repro import described, repro_script, reproduced
from shardfuse.frontend.validation import validated
from shardfuse.ir.dtype import DataType as NativeDataType
from shardfuse.ir.scalar import Scalar
from shardfuse.ir.tensor_view import TensorView as NativeTensorView

_guarded: list[Fusion] = []
"""The fusions whose guards are open, the current one last: what module-level functions record in."""


class FusionGuard:
    """``with FusionGuard(fusion):`` makes ``fusion`` the one that the module's own functions record in."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion

    def __enter__(self) -> FusionGuard:
        _guarded.append(self._fusion)
        return self

    def __exit__(self, *error: object) -> None:
        _guarded.remove(self._fusion)


def current_fusion() -> Fusion:
    """Raises ``RuntimeError`` where no guard is open."""
    if not _guarded:
        raise RuntimeError("no fusion is being defined: use `with FusionDefinition() as fd:` or FusionGuard")
    return _guarded[-1]


class CurrentOperations:
    """``ops`` of the module: those of the current fusion."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return cast("Callable[..., Any]", getattr(Operations(current_fusion().native), name))


def _writer(fusion: Fusion) -> native.FusionDefinition:
    """shardfuse's own definition, recording in ``fusion``."""
    return native.FusionDefinition.recording(fusion.native)


def define_tensor(*args: Any, **kwargs: Any) -> TensorView:
    """An input of the current fusion, in any of the forms of ``FusionDefinition.define_tensor``."""
    return _define_tensor(current_fusion(), *args, **kwargs)


def define_scalar(*args: Any, **kwargs: Any) -> Val:
    """An input of the current fusion, or a constant."""
    return _define_scalar(current_fusion(), *args, **kwargs)


@translated
def _define_tensor(fusion: Fusion, *args: Any, **kwargs: Any) -> TensorView:
    if "dtype" in kwargs and kwargs["dtype"] is None:
        kwargs.pop("dtype")
    sizes: object = args[0] if args else kwargs.get("shape", kwargs.get("sizes", ()))
    listed = cast("Sequence[object]", sizes) if isinstance(sizes, Sequence) else [None]
    if any(not isinstance(n, int) or n > _LARGEST for n in listed):
        raise TypeError(f"define_tensor: sizes are {sizes}, expected integers of 64 bits")
    if args and len(args) > 1 and isinstance(args[1], list | tuple) and _are_strides(cast("Sequence[object]", args[1])):
        kwargs |= dict(zip(("sizes", "strides", "dtype", "static_sizes", "is_cpu"), args, strict=False))
        args = ()
    if (not args and "sizes" not in kwargs and "strides" not in kwargs) or len(args) == 1:
        kwargs.setdefault("contiguity", False)
    return TensorView(_writer(fusion).define_tensor(*args, **kwargs), fusion.native)


_LARGEST = 2**63 - 1


def _are_strides(values: Sequence[object]) -> bool:
    return any(isinstance(n, int) and not isinstance(n, bool) for n in values)


@translated
def _define_scalar(fusion: Fusion, value: Any = None, dtype: Any = None) -> Val:
    return Val(_writer(fusion).define_scalar(value, dtype))


class FusionDefinition:
    """nvFuser's way in; what it records and runs is shardfuse's."""

    def __init__(self) -> None:
        self._guard: FusionGuard | None = None
        self._fusion: Fusion | None = None
        self.sched = Schedule()
        self._described: list[str] | None = None

    # the definition

    def __enter__(self) -> FusionDefinition:
        self._fusion = Fusion()
        self._guard = FusionGuard(self._fusion)
        self._guard.__enter__()
        self.ops = Operations(self._fusion.native)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._guard is not None:
            self._guard.__exit__()
            self._guard = None
        if kind is not None:
            print(f"Exception occurred: {kind.__name__}: {error}")
            traceback.print_tb(trace, file=sys.stdout)

    @property
    def fusion(self) -> Fusion:
        fec = self.__dict__.get("fec")
        return fec.fusion() if fec is not None else self._open()

    def _open(self) -> Fusion:
        fusion = self.__dict__.get("_fusion")
        if fusion is None:
            raise NotImplementedError(
                "Fusion does not exist! Use `with FusionDefinition() as fd: ...` to define a fusion."
            )
        return fusion

    def define_tensor(self, *args: Any, **kwargs: Any) -> TensorView:
        """``(shape, contiguity, dtype, is_cpu, stride_order)`` or ``(sizes, strides, dtype, static_sizes, is_cpu)``."""
        return _define_tensor(self._open(), *args, **kwargs)

    def define_scalar(self, value: Any = None, dtype: Any = None) -> Val:
        """With a value a constant, else an input of the fusion."""
        return _define_scalar(self._open(), value, dtype)

    def define_vector(self, size: int | Sequence[object]) -> list[Val]:
        """``size`` integer inputs."""
        count = size if isinstance(size, int) else len(size)
        return [self.define_scalar(None, NativeDataType.Int) for _ in range(count)]

    @translated
    def from_pytorch(self, tensor: torch.Tensor, static_sizes: bool = False) -> TensorView:
        """An input like ``tensor``.  Where there is a GPU, on the CPU only tensors without dims are taken."""
        if tensor.ndim and not tensor.is_cuda and torch.cuda.is_available():
            raise ValueError(f"Found unsupported device {tensor.device}, only scalar CPU or CUDA tensors are supported")
        return TensorView(_writer(self._open()).from_pytorch(tensor, static_sizes), self._open().native)

    @translated
    def add_output(self, output: Any, alias_input: Any = None, **kwargs: Any) -> None:
        """``output`` is returned by ``execute``, or written into ``alias_input`` and not returned."""
        writer = _writer(self._open())
        value = plain(output)
        if isinstance(value, Scalar | int | float):
            value = writer.ops.full([], value, value.dtype if isinstance(value, Scalar) else Val(value).dtype())
        writer.add_output(cast(NativeTensorView, value), cast("NativeTensorView | None", plain(alias_input)), **kwargs)

    def validate_definition(self) -> tuple[bool, str | None]:
        if self.__dict__.get("_fusion") is None and "fec" not in self.__dict__:
            return False, "Fusion does not exist! Use `with FusionDefinition() as fd: ...` to define a fusion."
        if not self.fusion.outputs():
            return False, "Fusion is empty!"
        return True, None

    # running

    def execute(
        self,
        inputs: Sequence[Argument],
        *,
        device: torch.device | int | str | None = None,
        save_repro_inputs: bool = False,
        _enable_options: Sequence[str] = (),
        _disable_options: Sequence[str] = (),
    ) -> list[torch.Tensor]:
        """Run on this rank's tensors."""
        assert not hasattr(self, "ke"), "KernelExecutor already exists! Use manual_execute() to execute the fusion."
        if "fec" not in self.__dict__:
            is_valid, message = self.validate_definition()
            if not is_valid:
                raise NotImplementedError(message)
            self.fec = FusionExecutorCache(self._open())
            del self._fusion
        inputs = self.fec.listed(inputs)
        if save_repro_inputs:
            self._described = [described(v) for v in inputs]
        flat = flattened(inputs)
        with reproduced(lambda: self.repro_script_for(inputs)):
            return self.fec.execute(
                flat, device=device, _enable_options=_enable_options, _disable_options=_disable_options
            )

    def manual_execute(self, inputs: Sequence[Argument], heuristic_params: object = None) -> list[torch.Tensor]:
        """Run by a KernelExecutor; the schedule is shardfuse's own."""
        inputs = listed("manual_execute", inputs)
        assert "fec" not in self.__dict__, "FusionExecutorCache already exists! Use execute() to execute the fusion."
        if not hasattr(self, "ke"):
            self.ke = KernelExecutor()
        if not self.ke.is_compiled():
            self.ke.compile(self.fusion, inputs)
        return self.ke.run(inputs)

    @translated
    def validate(
        self,
        inputs: Sequence[Argument],
        reference_outputs: Sequence[torch.Tensor] | None = None,
        device: torch.device | int | str | None = None,
        **kwargs: Any,
    ) -> list[torch.Tensor]:
        """``execute``, with the outputs compared to the references, or to torch."""
        fusion = self.fusion.native
        inputs = checked_inputs("validate", fusion, inputs, is_computed=reference_outputs is None)
        run = partial(self.execute, inputs, device=device, **kwargs)
        return validated(fusion, inputs, run, reference_outputs, home_of(inputs, device))

    @translated
    def manual_validate(
        self, inputs: Sequence[Argument], reference_outputs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        fusion = self.fusion.native
        inputs = checked_inputs("manual_validate", fusion, inputs, is_computed=reference_outputs is None)
        run, home = partial(self.manual_execute, inputs), home_of(inputs, None)
        return validated(fusion, inputs, run, reference_outputs, home)

    # text

    def repro_script_for(self, inputs: Sequence[Argument] | None = None) -> str:
        given = None if inputs is None else [described(v) for v in listed("repro_script_for", inputs)]
        return repro_script(self, given, module="nvfuser_direct")

    def last_repro_script(self) -> str:
        assert self._described is not None, (
            "fd.last_repro_script() cannot provide a repro because "
            "fd.execute(inputs, save_repro_inputs=True) was not executed!"
        )
        return repro_script(self, self._described, module="nvfuser_direct")

    def __repr__(self) -> str:
        return nvfuser_script(self.fusion.native)


class Schedule:
    """``fd.sched``: kernels are scheduled by shardfuse; TensorView's own methods say shardings and layouts."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"schedule.{name}: shardfuse schedules kernels by itself; leave hand scheduling out")
