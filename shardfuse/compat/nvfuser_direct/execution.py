"""nvFuser's Fusion, FusionExecutorCache and KernelExecutor over shardfuse's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from shardfuse.compat.nvfuser_direct.listed_inputs import listed
from shardfuse.compat.nvfuser_direct.nvfuser_errors import translated
from shardfuse.compat.nvfuser_direct.values import TensorView, Val, handle, plain
from shardfuse.executor.agreement import failures_told
from shardfuse.executor.binding import Argument
from shardfuse.executor.options import CompileOptions
from shardfuse.frontend.argument_checks import ranks_of
from shardfuse.frontend.counted_calls import RefusalsNoted
from shardfuse.frontend.executor_cache import FusionExecutorCache as NativeCache
from shardfuse.frontend.explain import explain_plan
from shardfuse.frontend.script import definition_script
from shardfuse.ir import fusion as native
from shardfuse.ir.digits import cut_out
from shardfuse.ir.domain import BoundDomain
from shardfuse.ir.fusion import FusionInput
from shardfuse.ir.scalar import Scalar
from shardfuse.ir.tensor_view import TensorView as NativeTensorView
from shardfuse.mesh import DeviceMesh, ParallelType

last_run: list[FusionExecutorCache] = []
"""The executor that ran last, for the profiler."""


def nvfuser_script(fusion: native.Fusion) -> str:
    """The definition as nvFuser writes it: tensors are ``tv0, tv1, ...``, numbers have five places where those do."""
    text = re.sub(r"\bT(\d+)(?=\b|_)", r"tv\1", definition_script(fusion))
    return re.sub(r"(?<![\w.'])\d+\.\d+(?![\w.'])", lambda m: _five_places(m[0]), text)


def _five_places(number: str) -> str:
    short = f"{float(number):.5f}"
    return short if float(short) == float(number) else number


class Fusion:
    """A recorded fusion.  Two of the same structure are equal."""

    def __init__(self, fusion: native.Fusion | None = None) -> None:
        self.native = fusion or native.Fusion()

    def inputs(self) -> list[TensorView | Val]:
        return [cast("TensorView | Val", handle(i.val, self.native)) for i in self.native.inputs]

    def outputs(self) -> list[TensorView]:
        return [TensorView(t, self.native) for t in self.native.outputs]

    def vals(self) -> list[TensorView | Val]:
        records = [out for r in self.native.records for out in r.outputs]
        return [*self.inputs(), *(cast("TensorView | Val", handle(v, self.native)) for v in records)]

    def add_input(self, value: TensorView | Val) -> None:
        val = plain(value)
        if isinstance(val, Scalar | NativeTensorView) and all(i.val is not val for i in self.native.inputs):
            self.native.inputs.append(FusionInput(val))

    def print_math(self) -> str:
        """The definition as Python."""
        return nvfuser_script(self.native)

    def print_kernel(self) -> str:
        """The definition: kernels are written when sizes are known, see ``fec.get_cuda_kernel``."""
        return nvfuser_script(self.native)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fusion) and (self.native is other.native or self.print_math() == other.print_math())

    def __hash__(self) -> int:
        return hash(self.print_math())


class Sharding:
    """How an output is laid out over ranks."""

    def __init__(self, tv: NativeTensorView, mesh: DeviceMesh, sharded: dict[ParallelType, int]) -> None:
        self.name = tv.name
        self.mesh = mesh
        self._sharded = sharded

    def axis_sharded_on(self, parallel_type: ParallelType) -> int:
        """The logical axis that ``parallel_type`` cuts, or -1."""
        return self._sharded.get(parallel_type, -1)


class FusionExecutorCache:
    """Runs one fusion at any sizes."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self.native = NativeCache(fusion.native, CompileOptions.from_environment())

    def fusion(self) -> Fusion:
        return self._fusion

    @translated
    def execute(
        self,
        inputs: Sequence[Argument],
        *,
        device: int | torch.device | str | None = None,
        _enable_options: Sequence[str] = (),
        _disable_options: Sequence[str] = (),
    ) -> list[torch.Tensor]:
        """nvFuser's options name its own schedulers: shardfuse has no such switches and takes none of them up."""
        given = self.listed(inputs)
        found = self.native.execute(given, device=home_of(given, device))
        last_run[:] = [self]
        return cast("list[torch.Tensor]", found)

    def listed(self, inputs: object) -> list[Argument]:
        """What ``execute`` is given as a list; a refusal is reported to the other ranks."""
        if isinstance(inputs, list):
            return cast("list[Argument]", inputs)
        team = ranks_of(self._fusion.native)
        with RefusalsNoted(self.native, team), failures_told(team):
            return listed("execute", inputs)

    def is_compiled(self, inputs: Sequence[Argument]) -> bool:
        return self.native.is_compiled(listed("is_compiled", inputs))

    def get_cuda_kernel(self, inputs: Sequence[Argument]) -> str:
        """The generated Triton kernels that last ran."""
        program = self.native.last_program
        return "\n".join(program.kernels) if program is not None else ""

    @translated
    def get_scheduled_ir(self, inputs: Sequence[Argument]) -> str:
        return str(explain_plan(self.native.plan_for(listed("get_scheduled_ir", inputs), None)))

    @translated
    def get_most_recent_scheduled_ir(self) -> str:
        return str(explain_plan(self.native.plan_for(None, None)))

    def get_output_shardings(self) -> list[Sharding]:
        """Of every output of the last plan; an empty list where nothing is on a mesh."""
        plan = self.native.last_plan
        if plan is None:
            return []
        found: list[Sharding] = []
        for tv, tensor in zip(self._fusion.native.outputs, plan.fusion.outputs, strict=True):
            mesh = tensor.domain.mesh
            if mesh is not None:
                found.append(Sharding(tv, mesh, _sharded_axes(tensor.domain)))
        return found


def home_of(inputs: Sequence[Argument], device: int | torch.device | str | None) -> torch.device | None:
    """Where outputs come to be: nvFuser's tensors are on the GPU where no input says otherwise."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available() and not any(isinstance(v, torch.Tensor) for v in inputs):
        return torch.device("cuda", torch.cuda.current_device())
    return None


def _sharded_axes(domain: BoundDomain) -> dict[ParallelType, int]:
    """The logical axis that each mesh dimension cuts."""
    found: dict[ParallelType, int] = {}
    for parallel_type, digits in domain.sharding:
        places = [k for k, axis in enumerate(domain.logical) if any(cut_out(axis, d) is not None for d in digits)]
        found[parallel_type] = places[0]
    return found


class KernelExecutor:
    """Runs a fusion that was compiled for given inputs; schedules are shardfuse's own."""

    def __init__(self) -> None:
        self._fec: FusionExecutorCache | None = None

    def compile(self, fusion: Fusion, args: Sequence[Argument] = (), *parameters: object) -> None:
        """``parameters`` (nvFuser's launch and compile parameters and scheduler type) are not used."""
        self._fec = FusionExecutorCache(fusion)

    def is_compiled(self) -> bool:
        return self._fec is not None

    def run(self, args: Sequence[Argument], *parameters: object) -> list[torch.Tensor]:
        assert self._fec is not None, "compile() comes before run()"
        return self._fec.execute(args)


@dataclass
class _Entry:
    fec: FusionExecutorCache
    hits: int = 0


class LRUCache:
    """Executors of at most ``max_fusions`` fusions, found by structure; the one used longest ago goes first."""

    def __init__(self, max_fusions: int) -> None:
        self._max = max_fusions
        self._entries: dict[str, _Entry] = {}
        self._lookups = 0
        self._hits = 0

    def cache_compile(self, fusion: Fusion) -> FusionExecutorCache:
        key = fusion.print_math()
        self._lookups += 1
        entry = self._entries.pop(key, None)
        if entry is None:
            if len(self._entries) >= self._max:
                self._entries.pop(next(iter(self._entries)))
            entry = _Entry(FusionExecutorCache(fusion))
        else:
            self._hits += 1
            entry.hits += 1
        self._entries[key] = entry
        return entry.fec

    def num_fusions(self) -> int:
        return len(self._entries)

    def stats(self) -> str:
        lines = [f"Max Fusions Allowed: {self._max}"]
        if not self._entries:
            return "\n".join([*lines, "The fusion cache is empty.", ""])
        lines += [
            f"Total Fusions in Cache: {len(self._entries)}",
            f"Total Unique Fusions Compiled: {self._lookups - self._hits}",
        ]
        lines.append("Cache Hits by LRU ordering:")
        lines += [f"\t{k} -> {e.hits} hits" for k, e in enumerate(reversed(list(self._entries.values())))]
        rate = f"{100 * self._hits / self._lookups:g}"
        lines += [f"Cache Lookups: {self._lookups}", f"Cache Hits: {self._hits}", f"Hit Rate: {rate}%", ""]
        return "\n".join(lines)
