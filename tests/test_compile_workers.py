"""Kernels that workers compile: what they leave is found, and what they do not leave is compiled here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse import DataType, FusionDefinition
from shardfuse.compile import ahead
from shardfuse.compile.region_op import Program
from shardfuse.executor import binaries, compile_workers, kernel
from shardfuse.executor.binaries import Asked
from shardfuse.executor.cache import LRUCache
from shardfuse.frontend.script import definition_script

GPU = torch.device("cuda", 0)
ASKED = Asked("the text", "kernel", (torch.float32,), "w", "", (("num_warps", 4),), (9, 0))
APART = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))()"
"""What a worker does, which has no GPU and has imported nothing."""


class Workers:
    """Take jobs, and do none before they are told."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.futures: list[Future[Any]] = []

    def submit(self, job: Callable[[], None]) -> Future[Any]:
        self.jobs.append(job)
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture(autouse=True)
def none_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_workers, "_begun", LRUCache(compile_workers.BEGUN))
    monkeypatch.setenv("SHARDFUSE_CACHE_DIR", str(tmp_path))


def normed() -> Program:
    """A row norm, and a sum of columns: one kernel."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], dtype=DataType.BFloat16)
        wide = fd.ops.cast(x, dtype=DataType.Float)
        scale = fd.ops.rsqrt(fd.ops.sum(fd.ops.mul(wide, wide), [1], keepdim=True))
        fd.add_output(fd.ops.cast(fd.ops.mul(wide, scale), dtype=DataType.BFloat16))
        fd.add_output(fd.ops.sum(wide, [0]))
    return Program(definition_script(fd.fusion))


def begun(monkeypatch: pytest.MonkeyPatch, program: Program) -> Workers:
    workers = Workers()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(ahead, "_pool", lambda: workers.submit)
    ahead.compile_ahead(program, [((64, 512), (512, 1), torch.bfloat16, GPU)], [])
    return workers


def test_a_worker_leaves_what_the_program_looks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pickle

    workers = begun(monkeypatch, normed())
    assert len(workers.jobs) == 1
    for job in workers.jobs:
        (asked, directory) = job.args  # pyright: ignore[reportFunctionMemberAccess, reportUnknownMemberType, reportUnknownVariableType]
        assert directory == tmp_path
        assert not binaries.is_kept(asked, directory)  # pyright: ignore[reportUnknownArgumentType]
        subprocess.run([sys.executable, "-c", APART, pickle.dumps(job).hex()], check=True)
        binary = binaries.binary_of(asked, directory, never)  # pyright: ignore[reportUnknownArgumentType]
        assert binary is not None
        assert binary.image.startswith(b"\x7fELF")


def never() -> Any:
    raise AssertionError("it is compiled here")


def test_what_is_there_or_begun_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = normed()
    workers = begun(monkeypatch, program)
    assert not begun(monkeypatch, program).jobs
    monkeypatch.setattr(compile_workers, "_begun", LRUCache(compile_workers.BEGUN))
    monkeypatch.setattr(compile_workers, "is_kept", lambda asked, directory: True)
    assert not begun(monkeypatch, program).jobs
    assert workers.jobs


def test_a_program_waits_for_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that fails has said nothing of why: the kernel is compiled here, which does."""
    workers, waited = Workers(), list[float | None]()

    def wait(futures: Any, timeout: float | None) -> Any:
        waited.append(timeout)
        (future,) = futures
        future.set_exception(RuntimeError("no room"))
        return wait_of_python(futures, timeout)

    wait_of_python = compile_workers.wait
    compile_workers.begin(ASKED, tmp_path, kernel.compile_apart, workers.submit)
    monkeypatch.setattr(compile_workers, "wait", wait)
    compile_workers.wait_for(ASKED, tmp_path)
    assert waited == [compile_workers.PATIENCE]
    assert not binaries.is_kept(ASKED, tmp_path)


def test_workers_that_do_nothing_are_waited_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    workers, waited = Workers(), list[object]()

    def wait(futures: Any, timeout: float) -> Any:
        waited.append(futures)
        return wait_of_python(futures, 0.01)

    wait_of_python = compile_workers.wait
    others = [Asked(f"{k}", "kernel", (), "", "", (), (9, 0)) for k in range(3)]
    for asked in others:
        compile_workers.begin(asked, tmp_path, kernel.compile_apart, workers.submit)
    monkeypatch.setattr(compile_workers, "wait", wait)
    for asked in others:
        compile_workers.wait_for(asked, tmp_path)
    assert len(waited) == 1


def test_a_forked_process_waits_for_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_workers.begin(ASKED, tmp_path, kernel.compile_apart, Workers().submit)
    monkeypatch.setattr(compile_workers, "wait", lambda futures, timeout: never())
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    compile_workers.wait_for(ASKED, tmp_path)


def test_a_kernel_waits_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    monkeypatch.setattr(kernel, "wait_for", lambda asked, directory: order.append("wait"))
    monkeypatch.setattr(kernel, "binary_of", lambda asked, directory, compile_kernel: order.append("compile"))
    assert kernel._ready.__wrapped__(ASKED, tmp_path, torch.device("cpu")) is None  # pyright: ignore[reportPrivateUsage]
    assert order == ["wait", "compile"]


def test_triton_has_its_driver_back(tmp_path: Path) -> None:
    from triton.runtime.driver import driver

    before: Any = object()
    driver.set_active(before)
    try:
        with compile_workers.compiling_for((9, 0)):
            target: Any = driver.active.get_current_target()
            assert (target.backend, target.arch) == ("cuda", 90)
        assert driver.active is before
    finally:
        driver._active = None  # pyright: ignore[reportPrivateUsage]
