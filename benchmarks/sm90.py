"""A plan's generated kernels, compiled for ``sm_90`` without a GPU: registers, spills, 128-bit loads and stores."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardfuse.allocation.layouts import layout_of
from shardfuse.codegen import KernelSource, generate
from shardfuse.compiler import Plan
from shardfuse.executor.options import CompileOptions
from shardfuse.executor.program import ProgramBuilder
from shardfuse.ir.expr import BoundTensor

_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.bool: "i1",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip
_ANNOTATIONS = {"tl.int32": "i32", "tl.int64": "i64", "tl.float64": "fp64", "tl.float32": "fp32"}


@dataclass(frozen=True)
class Resources:
    """Of one kernel.  stack: bytes; spills: loads and stores of local memory; shared: bytes."""

    kernel: str
    warps: int
    registers: int
    stack: int
    spills: int
    loads_128: int
    stores_128: int
    shared: int

    def __str__(self) -> str:
        text = f"{self.kernel}: {self.warps} warps, {self.registers} registers, {self.shared} B shared, "
        text += f"{self.loads_128} loads and {self.stores_128} stores of 128 bits"
        return text + (f", SPILLS {self.spills} ({self.stack} B of stack)" if self.stack or self.spills else "")


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


def compile_sm90(source: KernelSource) -> Resources:
    """Needs Triton, outside of its interpreter, and the assembler and ``cuobjdump`` of its wheel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{source.name}.py"
        path.write_text(source.text)
        function = _function(path, source.name)
        signature = _signature(function, source)
        aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(source.tensors))}
        options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": True}
        if source.max_registers is not None:
            options["maxnreg"] = source.max_registers
        text = ASTSource(function, signature, {}, aligned)
        made = triton.compile(text, target=GPUTarget("cuda", 90, 32), options=options)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        return _resources(source, made, tool, Path(directory) / "kernel.cubin")


def _function(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _signature(function: Any, source: KernelSource) -> dict[str, str]:
    """Types by name: pointers first, then what the text annotates."""
    names = list(function.arg_names)
    pointers = {name: f"*{_TYPES[t.dtype.torch]}" for name, t in zip(names, source.tensors, strict=False)}
    head = source.text[source.text.index(f"def {source.name}(") :]
    kinds = dict(re.findall(r"(\w+): (tl\.\w+)", head[: head.index("):")]))
    return pointers | {name: _ANNOTATIONS[kinds[name]] for name in names[len(source.tensors) :]}


def _resources(source: KernelSource, made: Any, tool: Path, path: Path) -> Resources:
    path.write_bytes(made.asm["cubin"])

    def shown(flag: str) -> str:
        return subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout

    usage, sass = shown("-res-usage"), shown("-sass")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Resources(
        kernel=source.name,
        warps=source.num_warps,
        registers=int(found[1]),
        stack=int(found[2]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        loads_128=len(re.findall(r"\b(?:LDG|LDGSTS)\.E[\w.]*\.128\b", sass)),
        stores_128=len(re.findall(r"\bSTG\.E[\w.]*\.128\b", sass)),
        shared=made.metadata.shared,
    )
