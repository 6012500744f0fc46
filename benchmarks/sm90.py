"""Generated kernels compiled without a GPU: registers, spills, shared memory, widths of loads and stores.

``compile_all`` does it in a process of its own, where Triton's interpreter is off and every core compiles; for
``sm_90`` where no other compute capability is named.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import cast

import torch

from shardfuse.allocation.layouts import layout_of
from shardfuse.codegen import KernelSource, generate
from shardfuse.compiler import Plan, compile_fusion
from shardfuse.device import H200, Device
from shardfuse.executor.kernel import load_function
from shardfuse.executor.options import CompileOptions
from shardfuse.executor.program import ProgramBuilder
from shardfuse.ir.dtype import DataType
from shardfuse.ir.expr import BoundTensor
from shardfuse.schedulers.plan import KernelPlan

from .workload import Case, Draw, Workload

ROOT = Path(__file__).parents[1]
_TYPES = {
    DataType.Double: "fp64", DataType.Float: "fp32", DataType.Half: "fp16", DataType.BFloat16: "bf16",
    DataType.Float8_e4m3fn: "fp8e4nv", DataType.Float8_e5m2: "fp8e5", DataType.Bool: "i1",
    DataType.Int: "i64", DataType.Int32: "i32", DataType.Int16: "i16", DataType.Int8: "i8", DataType.UInt8: "u8",
    DataType.UInt16: "u16", DataType.UInt32: "u32", DataType.UInt64: "u64",
}  # fmt: skip
_ACCESS = re.compile(r"\b(ld|st)\.(?:volatile\.)?global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\], *(0x[0-9a-f]+|\d+)")
_RELAXED = re.compile(r"\b(?:ld|st)\.relaxed\.[\w.]+")
_DROPS_NAN = re.compile(r"\b(?:min|max)(?:\.ftz)?\.(?:f32|f16|f16x2|bf16|bf16x2)\b")
_CONTRACTED = re.compile(r"\bfma\.rn(?:\.ftz)?\.f(?:32|64)\b")
_LAYOUT = re.compile(r"^(#\w+) = (#ttg\.\S+<.*)$", re.MULTILINE)
_REDUCTION = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32\}> \(\{.*?\}\) : \(tensor<([\dx]+)x\w+, (#\w+|#ttg\.slice<[^>]*>)>',
    re.DOTALL,
)
_SIDES = re.compile(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[([\d, ]+)\]")
_USED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Resources:
    """Of one kernel.  stack, spills (stores and loads), shared: bytes; loads, stores: of global memory, by bits.

    relaxed: the kinds of relaxed loads and stores that programs poll each other's words with.
    drops_nan: minima and maxima of float32 and 16-bit floats that give the other operand where one is NaN.
    contracted: products and sums that are one operation.
    along_rows: of each reduction along the last axis of a block, its elements, and how many a thread, the threads of a
    warp and the warps of a program have side by side: the order of its additions.
    """

    kernel: str
    warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    barriers: int
    loads: dict[int, int]
    stores: dict[int, int]
    relaxed: tuple[str, ...]
    drops_nan: int
    contracted: int
    along_rows: tuple[str, ...]
    binary: bytes = field(default=b"", repr=False)
    """For the GPU, of which ``global_accesses`` reads the instructions."""

    @property
    def widest_load(self) -> int:
        return max(self.loads, default=0)

    def __str__(self) -> str:
        text = f"{self.kernel}: {self.warps} warps, {self.registers} registers, {self.shared} B shared, "
        text += f"{self.loads.get(128, 0)} loads and {self.stores.get(128, 0)} stores of 128 bits"
        return text + (f", SPILLS {self.spills} B ({self.stack} B of stack)" if self.stack or self.spills else "")


def sources_of(plan: Plan, inputs: Sequence[torch.Tensor]) -> list[KernelSource]:
    """The kernels of a plan for one device.  ``inputs``: meta tensors, taken to be aligned."""
    bound = [v for v in plan.fusion.inputs if isinstance(v, BoundTensor)]
    samples = dict(zip(bound, inputs, strict=True))
    # With torch for a backend the builder only works out strides: nothing is imported, nothing runs.
    options = CompileOptions(backend="torch")
    builder = ProgramBuilder(plan.fusion, 0, torch.device("meta"), options, samples)
    builder.begin([None for _ in plan.fusion.inputs])
    found: list[KernelSource] = []
    for k, planned in enumerate(plan.segments):
        builder.add(k, planned.segment, planned.scheduler, planned.kernels)
        for kernel in planned.kernels:
            for t in kernel.segment.outputs:
                builder.contiguous(t)
            walked = (*kernel.segment.inputs, *kernel.segment.outputs)
            found.append(generate(kernel, {t: layout_of(t.domain, 0, builder.meta[t].stride()) for t in walked}, 0))
    return found


def planned(workload: Workload, case: Case, device: Device = H200) -> list[tuple[KernelPlan, KernelSource]]:
    """The kernels of a case of the benchmarks, as they are planned for ``device`` and as they are written."""
    inputs = workload.bind(workload.arguments(case, Draw(torch.device("meta"))))
    fd = workload.fusion(case)
    sizes = dict(zip(fd.fec.tensors(), (tuple(t.shape) for t in inputs), strict=True))
    plan = compile_fusion(fd.fusion, sizes, device=device)
    kernels = [kernel for segment in plan.segments for kernel in segment.kernels]
    return list(zip(kernels, sources_of(plan, inputs), strict=True))


def compile_one(source: KernelSource, directory: Path, capability: int) -> Resources:
    """All pointers aligned.  Needs TRITON_DUMP_PTXAS_LOG and TRITON_ALWAYS_COMPILE, and the assembler of the wheel.

    ``directory``: for the text.  ``capability``: of the GPU, 90 for ``sm_90``.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = load_function(source.text, source.name, directory)
    mailbox = bool(source.mailbox)
    pointers = [p.name for p in function.params[: len(source.tensors) + mailbox]]
    kinds = ["*i64"] * mailbox + [f"*{_TYPES[t.dtype]}" for t in source.tensors]
    types = dict(zip(pointers, kinds, strict=True))
    types |= {p.name: p.annotation_type for p in function.params[len(pointers) :]}
    aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(pointers))}
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": True}
    if source.max_registers is not None:
        options["maxnreg"] = source.max_registers
    options["launch_cooperative_grid"] = source.is_cooperative
    options["enable_reflect_ftz"] = not source.keeps_denormals
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        made = triton.compile(
            ASTSource(function, types, {}, aligned), target=GPUTarget("cuda", capability, 32), options=options
        )
    return _resources(source, made.asm, log.getvalue(), made.metadata.shared)


def _along_rows(ttgir: str) -> Iterator[str]:
    """Of what is a slice of a larger layout, that layout."""
    layouts = dict(_LAYOUT.findall(ttgir))
    for axis, shape, name in _REDUCTION.findall(ttgir):
        sizes, layout = shape.split("x"), re.sub(r"#\w+\b(?!\.)", lambda m: layouts.get(m[0], m[0]), name)
        if int(axis) == len(sizes) - 1:
            sides = [side.split(", ") for side in _SIDES.findall(layout)]
            is_own = bool(sides) and all(len(side) == len(sizes) for side in sides)
            yield ", ".join([sizes[-1], *(side[-1] for side in sides)]) if is_own else f"{shape} of {layout}"


def _resources(source: KernelSource, asm: Mapping[str, str | bytes], log: str, shared: int) -> Resources:
    """``asm``: by the name of a stage of the compiler.  ``log``: what the assembler says of registers and stack."""
    ptx = cast("str", asm["ptx"])
    registers, used = re.search(r"Used (\d+) registers", log), _USED.search(log)
    assert registers is not None, log
    assert used is not None, log
    found: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for kind, count, bits in _ACCESS.findall(ptx):
        found[kind][int(count or 1) * int(bits)] += 1
    found["ld"].update(8 * int(size, 0) for size in _COPY.findall(ptx))
    return Resources(
        kernel=source.name,
        warps=source.num_warps,
        registers=int(registers[1]),
        stack=int(used[1]),
        spills=int(used[2]) + int(used[3]),
        shared=shared,
        barriers=ptx.count("bar.sync"),
        loads=dict(found["ld"]),
        stores=dict(found["st"]),
        relaxed=tuple(sorted(set(_RELAXED.findall(ptx)))),
        drops_nan=len(_DROPS_NAN.findall(ptx)),
        contracted=len(_CONTRACTED.findall(ptx)),
        along_rows=tuple(_along_rows(cast("str", asm["ttgir"]))),
        binary=cast("bytes", asm["cubin"]),
    )


def global_accesses(binary: bytes) -> list[str]:
    """Loads (LDG) and stores (STG) of global memory in the order in which the GPU's instructions have them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        listing = subprocess.run(
            [triton.knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    return re.findall(r"\b(?:LDG|STG)\.[\w.]+", listing)


# many kernels


class _Compiler:
    """A process that compiles on all cores, kept for the next kernels: importing Triton and torch takes it seconds."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._errors = Path(self._directory.name) / "errors"
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": self._directory.name, "TRITON_DUMP_PTXAS_LOG": "1"}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from benchmarks.sm90 import serve; serve()", self._directory.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment | {"TRITON_ALWAYS_COMPILE": "1"},
            )

    def __call__(self, sources: Sequence[KernelSource], capability: int) -> list[Resources]:
        """Raises RuntimeError where one does not compile, which ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((sources, capability), self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (EOFError, OSError) as error:
            found = self.end()
            raise RuntimeError(f"kernels do not compile for sm_{capability}:\n{found[-4000:]}") from error

    def end(self) -> str:
        """Close its input, which ends the process. Returns what it wrote to stderr."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        found = self._errors.read_text(errors="replace")
        self._directory.cleanup()
        return found


_compiler: _Compiler | None = None
_compiled: dict[tuple[int, str, int, int, int | None], Resources] = {}


def compile_all(sources: Sequence[KernelSource], capability: int = 90) -> list[Resources]:
    """In a process of their own, on all cores; a kernel that comes twice, in one call or two, is compiled once."""
    global _compiler
    missing = {key: s for s in sources if (key := _key(s, capability)) not in _compiled}
    if missing:
        if _compiler is None:
            _compiler = _Compiler()
            atexit.register(_compiler.end)
        try:
            made = _compiler(list(missing.values()), capability)
        except RuntimeError:
            atexit.unregister(_compiler.end)
            _compiler = None
            raise
        _compiled.update(zip(missing, made, strict=True))
    return [_compiled[_key(s, capability)] for s in sources]


def _key(source: KernelSource, capability: int) -> tuple[object, ...]:
    """All that the compiler reads of a source; whether denormals are kept follows from the text."""
    options = source.num_warps, source.num_stages, source.max_registers, source.is_cooperative, bool(source.mailbox)
    return capability, source.text, tuple(t.dtype for t in source.tensors), *options


def serve() -> None:
    """Lists of kernels from stdin, pickled one after the other; the resources of each list to stdout likewise."""
    import triton  # noqa: F401 - once, before the workers are forked

    directory = Path(sys.argv[1])
    # An executor, since a pool of multiprocessing waits for ever for a worker that LLVM has ended. Its workers stay for
    # the next list: the first kernel of each takes half a second more than the others.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        while True:
            try:
                sources, capability = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(list(pool.map(compile_one, sources, repeat(directory), repeat(capability))), sys.stdout.buffer)
            sys.stdout.buffer.flush()
