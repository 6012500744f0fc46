"""The first calls of a fresh process, as JSON: ``python -m benchmarks.startup WORKLOAD CASE IMPLEMENTATION``.

With ``measure`` the same in processes of their own, with empty caches and then with those that the first one left.
Both sides import torch before; what each imports beside it is timed by itself: shardfuse, or Dynamo and Inductor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

_began = perf_counter()
import shardfuse  # noqa: E402, F401 - before all else that imports it, to time it

_IMPORT_SECONDS = perf_counter() - _began
"""Of shardfuse, in a process that has not imported it."""

from . import peers  # noqa: E402
from .workload import Case, Draw, Workload  # noqa: E402
from .workloads import WORKLOADS  # noqa: E402

ROOT = Path(__file__).parents[1]
NEW_SIZES = 21
CACHES = ("SHARDFUSE_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def measure(workload: str, case: str, impl: str, limit: float = 180.0) -> dict[str, dict[str, float]]:
    """``{"cold": ..., "warm": ...}``, seconds each as ``first_calls`` names them."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        env = {**os.environ, **{name: str(Path(directory) / name) for name in CACHES}}
        for start in ("cold", "warm"):
            command = [sys.executable, "-m", "benchmarks.startup", workload, case, impl]
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
            found[start] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_calls(workload: str, case: Case, impl: str) -> dict[str, float]:
    """import: of shardfuse, or of Dynamo and Inductor; first: from the definition to the first result, with what is
    only imported then; both: their sum; second: the next call; new_size: the first call at another batch size; plan:
    the part of it that plans (medians over ``NEW_SIZES`` sizes, shardfuse only)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = WORKLOADS[workload]
    inputs = work.arguments(case, Draw(device))
    _wait(device)
    found = {"import": _IMPORT_SECONDS if impl == "shardfuse" else _inductor_import()}
    began = perf_counter()
    run = _own(work, case, inputs) if impl == "shardfuse" else peers.prepare(impl, work, case, inputs)
    assert run is not None, f"{impl} does not do {workload}"
    for name in ("first", "second"):
        run()
        _wait(device)
        found[name] = perf_counter() - began
        began = perf_counter()
        if name == "first":
            found["both"] = found["import"] + found["first"]
    if impl == "shardfuse":
        found |= _new_sizes(workload, case, device)
    return found


def _inductor_import() -> float:
    """Seconds; what the measured process had loaded of them with torch and shardfuse is not in it."""
    began = perf_counter()
    for name in ("torch._dynamo", "torch._inductor.compile_fx"):
        import_module(name)
    return perf_counter() - began


def _own(work: Workload, case: Case, inputs: list[torch.Tensor]) -> Callable[[], object]:
    fd, bound = work.fusion(case), work.bind(inputs)
    return lambda: fd.execute(bound)


def _new_sizes(workload: str, case: Case, device: torch.device) -> dict[str, float]:
    """The rows of the case and one more each time, with one definition."""
    work = WORKLOADS[workload]
    fd = work.fusion(case)
    plans: list[float] = []
    calls: list[float] = []
    for k in range(1, NEW_SIZES + 1):
        other = replace(case, shape=(case.shape[0] + k, *case.shape[1:]))
        bound = work.bind(work.arguments(other, Draw(device)))
        _wait(device)
        began = perf_counter()
        fd.explain(bound)
        plans.append(perf_counter() - began)
        fd.execute(bound)
        _wait(device)
        calls.append(perf_counter() - began)
    return {"plan": median(plans), "new_size": median(calls)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(first_calls(sys.argv[1], Case.parse(sys.argv[2]), sys.argv[3])))
