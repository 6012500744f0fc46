"""Numbers of a kernel as text: scalars, what is rounded to a narrow type, and the functions that it takes."""

from __future__ import annotations

from typing import cast

from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..ir.scalar import Number, Scalar
from ..kernel_functions import texts_of
from ..schedulers.plan import KernelPlan
from ..segments.rounding import saturated
from . import narrow
from .addresses import Addresses
from .arithmetic import number_text
from .tile import Tile


class Numbers(Addresses):
    """How one kernel writes numbers.  ``helpers``: the functions that its file has, by their names."""

    def __init__(self, plan: KernelPlan, tile: Tile, *, interpret: bool) -> None:
        super().__init__(plan, tile)
        self.interpret = interpret
        self.helpers: dict[str, str] = {}
        self.saturated = frozenset[BoundTensor]() if interpret else saturated(plan.segment)
        self._read = {t for e in plan.segment.exprs for t in e.tensors}

    def use(self, *functions: str) -> None:
        """Have these functions, and those that they call, in the kernel's file."""
        for name in filter(None, functions):
            for called, text in texts_of(name, interpret=self.interpret).items():
                self.helpers.setdefault(called, text)

    def scalar(self, scalar: Scalar, wanted: DataType) -> tuple[str, DataType]:
        """A literal is written in the type that is wanted; an argument comes as float64 or int64, exactly."""
        if scalar.is_literal:
            text, functions = number_text(cast(Number, scalar.value), wanted, interpret=self.interpret)
            self.use(*functions)
            return text, wanted
        if not (self.interpret and scalar.dtype.is_floating):
            return scalar.name, DataType.Double if scalar.dtype.is_floating else DataType.Int
        text = f"libdevice.float64({scalar.name})"  # the interpreter hands a float over as Python's own
        return (f"libdevice.int1({text})", wanted) if wanted is DataType.Bool else (text, DataType.Double)

    def rounded(self, text: str, tensor: BoundTensor) -> str:
        """Rounded to the dtype of ``tensor`` where that is narrow; where it is only stored, the store does that."""
        by_hand = self.interpret and tensor.dtype is DataType.BFloat16
        if not tensor.dtype.is_low_precision or (tensor not in self._read and not by_hand):
            return text
        if tensor in self.saturated:
            return f"{narrow.saturating(text, tensor.dtype)}.to(tl.float32)"
        self.use_rounding(tensor.dtype)
        return narrow.rounded(text, tensor.dtype, interpret=self.interpret)

    def stored_text(self, text: str, tensor: BoundTensor) -> str:
        """``text`` so that a store to ``tensor`` rounds it rightly."""
        if tensor in self.saturated:
            return narrow.saturating(text, tensor.dtype)
        self.use_rounding(tensor.dtype)
        return narrow.stored(text, tensor.dtype, interpret=self.interpret)

    def use_rounding(self, dtype: DataType) -> None:
        self.helpers |= narrow.helpers(dtype, interpret=self.interpret)
