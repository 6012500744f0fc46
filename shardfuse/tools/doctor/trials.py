"""Self-tests: what each does, in a process that is set up for it."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable

import torch

from ...config import read_c_compiler, read_cache_directory
from ...executor.driver import build_driver
from ...executor.options import Backend
from ...frontend.definition import FusionDefinition
from ...ir.dtype import DataType
from ...mesh import DeviceMesh, ParallelType
from ...mesh.process import finalize, initialize
from ...secure_files import keep_text, read_sealed, write_sealed
from .finding import Finding, ok

AREA = "self-tests"
_ROUNDINGS = 16 * torch.finfo(torch.float32).eps
_REPORT = "report it with this whole text: results are wrong here"


def norm(backend: Backend, device: torch.device) -> str:
    """An RMSNorm of 8 x 256 against torch in float64; "" or how it is wrong."""
    with FusionDefinition(backend=backend) as fd:
        x = fd.define_tensor([-1, 256], contiguity=True, dtype=DataType.Float)
        mean_square = fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)
        fd.add_output(fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(mean_square, 1e-6))))
    full = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).to(device)
    (found,) = fd.execute([full])
    return _difference(found, torch.nn.functional.rms_norm(full.double(), (256,), eps=1e-6))


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    errors = (found.double() - expected).abs() - _ROUNDINGS * expected.abs()
    return "" if bool((errors <= 0).all()) else f"{int((errors > 0).sum())} of {errors.numel()} elements differ"


def _judged(name: str, what: str, difference: str) -> Finding:
    if difference:
        return Finding(AREA, name, "fault", f"{what}: {difference} from torch", _REPORT)
    return ok(AREA, name, f"{what}: as torch's in float64")


def torch_trial() -> Finding:
    """A fusion that torch evaluates."""
    return _judged("torch", "a norm, evaluated by torch", norm("torch", torch.device("cpu")))


def interpreter_trial() -> Finding:
    """A generated kernel under Triton's interpreter: the process has to have TRITON_INTERPRET=1."""
    return _judged("interpreter", "a norm, its kernel interpreted on the CPU", norm("triton", torch.device("cpu")))


def gpu_trial() -> Finding:
    """A generated kernel on each GPU."""
    count = torch.cuda.device_count()
    wrong = [f"GPU {k}: {said}" for k in range(count) if (said := norm("triton", torch.device("cuda", k)))]
    return _judged("GPU", f"a norm on each of {count} GPUs", "; ".join(wrong))


def ranks_trial() -> Finding | None:
    """A sum over two ranks of gloo on the loopback interface; rank 0 tells of it."""
    world = initialize("gloo", timeout=60)
    mesh = DeviceMesh(range(world.world_size))
    with FusionDefinition(backend="torch") as fd:
        x = fd.define_tensor([4, 64], contiguity=True, dtype=DataType.Double)
        fd.add_output(fd.ops.sum(x, [1]))
        x.set_device_mesh(mesh)
        x.outer_split(1, mesh.size)
        x.axis(1).parallelize(ParallelType.mesh_x)
    full = torch.arange(256, dtype=torch.float64, device="cpu").reshape(4, 64)
    (found,) = fd.execute([mesh.shard_tensor(full, 1)])
    difference = _difference(found, full.sum(1))
    finalize()
    return _judged("ranks", "2 ranks of gloo on 127.0.0.1, a sum over both", difference) if world.rank == 0 else None


def cache_trial() -> Finding:
    """A file in the folder of kernels: written, read again, and refused once a byte of it is another."""
    directory, name = read_cache_directory(), f"doctor-{os.getpid()}"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        path = keep_text(directory, name, "")
        write_sealed(directory, name, b"kept")
        again = read_sealed(directory, name)
        if path.exists():
            path.write_bytes(b"K" + path.read_bytes()[1:])
        damaged = read_sealed(directory, name)
        path.unlink(missing_ok=True)
    where = f"a file in {path.parent}"
    if damaged is not None:
        return Finding(AREA, "cache", "fault", f"{where} was read although it had been changed", _REPORT)
    if again != b"kept" or path.parent != directory or said:
        reasons = "; ".join(str(w.message) for w in said) or f"{directory} cannot be written"
        remedy = "make it writable for this user, or name another by SHARDFUSE_CACHE_DIR"
        return Finding(AREA, "cache", "warning", f"kernels are kept for one process alone: {reasons}", remedy)
    return ok(AREA, "cache", f"{where} was written, read, and refused once it had been changed")


def compiler_trial() -> Finding:
    """The C module for launches, compiled; connecting it to a GPU's driver is for machines that have one."""
    name, remedy = "C module", "install gcc or clang and Python's headers (python3-dev), or name a compiler by CC"
    if read_c_compiler() is None:
        found = "no C compiler: kernels are launched through Triton's own entry"
        return Finding(AREA, name, "warning", found, remedy)
    try:
        size = len(build_driver("doctor.so"))
    except (OSError, subprocess.CalledProcessError) as error:
        text = str(error.stderr if isinstance(error, subprocess.CalledProcessError) else error).strip()
        lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or [str(error)]
        return Finding(AREA, name, "warning", f"it does not compile: {lines[0]}", remedy)
    return ok(AREA, name, f"compiled by {read_c_compiler()}, {size} bytes")


TRIALS: dict[str, Callable[[], Finding | None]] = {
    "torch": torch_trial,
    "cache": cache_trial,
    "C module": compiler_trial,
    "interpreter": interpreter_trial,
    "GPU": gpu_trial,
    "ranks": ranks_trial,
}
"""By name; the last three each want a process of its own."""
