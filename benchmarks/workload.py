"""What is measured: a workload is a fusion as people write it, the same in torch, and the shapes to run it at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from shardfuse import DataType, FusionDefinition
from shardfuse.ir.tensor_view import TensorView

GROUPS = 32
EPS = 1e-5

OWN = "shardfuse"
"""The name of the implementation that the others are compared with."""
Tensors = tuple[torch.Tensor, ...]
Run = Callable[[], Sequence[torch.Tensor]]
Compiler = Callable[[Callable[..., Tensors]], Callable[..., Tensors]]


class CaseError(ValueError):
    """A ``--case`` that cannot be read."""

    def __init__(self, text: str, part: str) -> None:
        super().__init__(
            f"case {text!r}: {part!r} is none of: sizes as 8192x5140, a dtype such as float16, channels_last, groups=32"
        )


class GroupsError(CaseError):
    """Channels that cannot be put in so many groups."""

    def __init__(self, case: Case) -> None:
        ValueError.__init__(
            self, f"case {case}: {case.shape[1]} channels in groups={case.groups}, which must divide them"
        )


@dataclass(frozen=True)
class Case:
    """One shape of a workload.  ``channels_last``: in and out.  ``groups``: of a group norm."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    channels_last: bool = False
    groups: int = GROUPS

    @staticmethod
    def parse(text: str) -> Case:
        """``"8192x5140:float16"``, ``"2x320x128x128:float16:channels_last:groups=32"``.  Raises ``CaseError``."""
        sizes, *rest = text.split(":")
        if not all(n.isdigit() for n in sizes.split("x")):
            raise CaseError(text, sizes)
        dtype, channels_last, groups = torch.bfloat16, False, GROUPS
        for part in rest:
            named = getattr(torch, part, None)
            if isinstance(named, torch.dtype):
                dtype = named
            elif part == "channels_last":
                channels_last = True
            elif part.startswith("groups=") and part[7:].isdigit():
                groups = int(part[7:])
            else:
                raise CaseError(text, part)
        return Case(tuple(int(n) for n in sizes.split("x")), dtype, channels_last, groups)

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")]
        parts += ["channels_last"] if self.channels_last else []
        parts += [f"groups={self.groups}"] if self.groups != GROUPS else []
        return ":".join(parts)

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def data_type(self) -> DataType:
        return DataType.from_torch(self.dtype)

    @property
    def compute(self) -> DataType:
        """float32, or float64 for float64."""
        return DataType.Double if self.dtype is torch.float64 else DataType.Float

    @property
    def accurate(self) -> torch.dtype:
        return self.compute.torch

    @property
    def stride_order(self) -> list[int] | None:
        """For each dim its place in memory, 0 innermost; ``None`` where row-major."""
        ndim = len(self.shape)
        return [ndim - 1, 0, *range(ndim - 2, 0, -1)] if self.channels_last else None

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in this case's memory format."""
        if not self.channels_last:
            return tensor.contiguous()
        form = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
        return tensor.contiguous(memory_format=form)

    def is_arranged(self, tensor: torch.Tensor) -> bool:
        """Is an output in memory as this case asks: activations in its format, everything else row-major?"""
        if self.channels_last and tensor.ndim == len(self.shape):
            form = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
            return tensor.is_contiguous(memory_format=form)
        return tensor.is_contiguous()


@dataclass(frozen=True)
class Draw:
    """Fresh random inputs.  On "meta" there are shapes only, for plans."""

    device: torch.device
    seed: int = 0
    _generator: list[torch.Generator] = field(default_factory=list[torch.Generator], repr=False)

    def _source(self) -> torch.Generator | None:
        if self.device.type == "meta":
            return None
        if not self._generator:
            self._generator.append(torch.Generator(self.device).manual_seed(self.seed))
        return self._generator[0]

    def normal(self, shape: Sequence[int], dtype: torch.dtype, mean: float = 0.0) -> torch.Tensor:
        drawn = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return drawn.normal_(mean, 1.0, generator=self._source())

    def integers(self, shape: Sequence[int], below: int) -> torch.Tensor:
        drawn = torch.empty(tuple(shape), dtype=torch.int64, device=self.device)
        return drawn.random_(0, below, generator=self._source())


def _as_given(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(tensors)


@dataclass(frozen=True)
class Own:
    """What shardfuse runs of a case: by name, how to make what is timed; and the fusion, where it is one alone."""

    runs: dict[str, Callable[[], Run]]
    fusion: FusionDefinition | None = None

    @property
    def kernels(self) -> int | None:
        """Of the plan of what has run."""
        return None if self.fusion is None else self.fusion.explain().kernels


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What is compared with other implementations of it, and how.

    cases: the public grid; tiny: shapes for tests on a CPU.
    arguments: (case, draw) -> the inputs; eager, reference: (case, *inputs) -> the outputs, ``reference`` being called
    with float64.
    rows: for each input, is dim 0 of it cut where the reference is computed in pieces?  Empty: it is not.
    sums: for each output, is it a sum over the pieces (else the pieces' results are joined along dim 0)?  Empty: none.
    returned: ``eager`` without bringing its outputs into the case's memory format, where torch gives another.
    roundings: of each element, allowed beside twice eager torch's error in its row (``benchmarks/roundings.py``): 2 are
    the op's last and the one of what it is computed of, 4 where float32 results come of several functions or sums
    in a row, 0 where nothing is rounded.
    relative: are the elements of a row of so different magnitudes that each is held to its own?
    any_format: may outputs have other strides than the case's?
    """

    name: str
    title: str
    cases: tuple[str, ...]
    tiny: tuple[str, ...]
    arguments: Callable[[Case, Draw], list[torch.Tensor]]
    eager: Callable[..., Tensors]
    reference: Callable[..., Tensors]
    rows: tuple[bool, ...] = ()
    sums: tuple[bool, ...] = (False,)
    returned: Callable[..., Tensors] | None = None
    roundings: float = 2
    relative: bool = False
    any_format: bool = False

    def own(self, case: Case, inputs: Sequence[torch.Tensor]) -> Own:
        raise NotImplementedError

    def in_eager(self, case: Case, inputs: Sequence[torch.Tensor]) -> Run:
        """What is timed of eager torch."""
        return lambda: self.eager(case, *inputs)

    def compiled(self, case: Case, inputs: Sequence[torch.Tensor], compiler: Compiler) -> Run:
        """What is timed of ``compiler``, which is given a function of the inputs."""
        graph = compiler(lambda *tensors: self.eager(case, *tensors))
        return lambda: graph(*inputs)

    def moved(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
        """Bytes that have to be read and written; 0 where a copy of them says nothing."""
        return moved_bytes(inputs, outputs)

    def comparable(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs without what is drawn in each call."""
        return list(outputs)


@dataclass(frozen=True, kw_only=True)
class Workload(Compared):
    """A fusion, and what it is compared with.

    bind: the inputs as the fusion takes them, views of them.
    """

    fusion: Callable[[Case], FusionDefinition]
    bind: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = _as_given

    def own(self, case: Case, inputs: Sequence[torch.Tensor]) -> Own:
        fd = self.fusion(case)

        def prepare() -> Run:
            bound = self.bind(inputs)
            return lambda: fd.execute(bound)

        return Own({OWN: prepare}, fd)


def define(fd: FusionDefinition, shape: Sequence[int], dtype: torch.dtype, case: Case | None = None) -> TensorView:
    """A contiguous input; with ``case`` in its memory format."""
    order = case.stride_order if case is not None and len(shape) == len(case.shape) else None
    return fd.define_tensor(shape, contiguity=True, dtype=DataType.from_torch(dtype), stride_order=order)


def vector_bytes(case: Case) -> int:
    """The widest load, in bytes, that every row of ``case`` keeps aligned."""
    size = (case.shape[1] if case.channels_last else case.columns) * case.dtype.itemsize
    width = 16
    while size % width:
        width //= 2
    return width


def moved_bytes(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Each input read once, each output written once."""
    return sum(prod(t.shape) * t.dtype.itemsize for t in (*inputs, *outputs))
