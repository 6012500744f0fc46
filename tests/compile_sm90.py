"""Compile generated kernels for sm_90, which takes no GPU, and print what they use: one line of JSON a kernel.

    python tests/compile_sm90.py [NAME...]      names of kernel_cases.SM90; all of them without one

A process of its own: Triton must not have been imported for its interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from kernel_cases import SM90
from segments import kernels_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardfuse.codegen import KernelSource
from shardfuse.executor.kernel import load_function
from shardfuse.ir.dtype import DataType

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {
    DataType.BFloat16: "*bf16", DataType.Half: "*fp16", DataType.Float: "*fp32", DataType.Double: "*fp64",
    DataType.Int: "*i64", DataType.Int32: "*i32", DataType.Bool: "*i1",
}  # fmt: skip


def compile_for_sm90(source: KernelSource, directory: Path) -> dict[str, int | str]:
    """Registers, spills, shared memory and the widths of loads and stores; all pointers 16-byte aligned."""
    function = load_function(source.text, source.name, directory)
    mailbox = bool(source.mailbox)
    pointers = [p.name for p in function.params[: len(source.tensors) + mailbox]]
    kinds = ["*i64"] * mailbox + [POINTERS[t.dtype] for t in source.tensors]
    types = dict(zip(pointers, kinds, strict=True))
    types |= {p.name: p.annotation_type for p in function.params[len(pointers) :]}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    options = {"enable_fp_fusion": True, "num_warps": source.num_warps, "num_stages": source.num_stages}
    if source.max_registers:
        options["maxnreg"] = source.max_registers
    options["launch_cooperative_grid"] = mailbox
    compiled = triton.compile(
        ASTSource(function, types, {}, aligned), target=GPUTarget("cuda", 90, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("-res-usage", file.name)
        assembly = _run("-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {
        "kernel": source.name,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", assembly)),
        "shared": compiled.metadata.shared,
        "barriers": assembly.count("BAR.SYNC"),
        **{f"loads_{w}": n for w, n in _widths(assembly, r"LDG\.E|LDGSTS\.E").items()},
        **{f"stores_{w}": n for w, n in _widths(assembly, r"STG\.E").items()},
    }


def _widths(assembly: str, opcode: str) -> dict[int, int]:
    """How many accesses of global memory move 128, 64, and 32 or fewer bits a thread."""
    counts = {128: 0, 64: 0, 32: 0}
    for suffix in re.findall(rf"(?:{opcode})([.A-Z0-9]*)", assembly):
        counts[128 if ".128" in suffix else 64 if ".64" in suffix else 32] += 1
    return counts


def _run(flag: str, path: str) -> str:
    return subprocess.run([TOOLS / "cuobjdump", flag, path], capture_output=True, text=True, check=True).stdout


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name in names or SM90:
            for source in kernels_of(SM90[name]):
                print(json.dumps({"case": name, **compile_for_sm90(source, Path(directory))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
