"""A training step of whole models, ``torch.compile(backend="shardfuse")`` against Inductor in its default mode.

Forward, loss and backward on one GPU, with random weights, in bfloat16 or under autocast to it, as each is trained
(``model_cases.py``).  Times are of steps behind a step, medians of rounds in which both backends take their turns.

First each model is compiled under each backend in a process and with caches of its own, all side by side: *cold*.  The
same processes are then started again from these caches, both backends of a few models side by side: *warm*, the median
of three starts.  Both have torch.compile itself in them, and so the backend's imports, from bytecode that Python has
written at the cold start, as it does for a user.  At last one process a model compares losses and memory, and measures
once it has the GPU alone.  *Kernels of a training step* is the sum of their times in one profiled step: a step takes
longer where the host is slower than the GPU, which depends on the machine and on what else it does.

A step is right where its losses over 20 steps of gradient descent are no farther from Inductor's than twice what
eager torch's are, or one rounding of bfloat16.  Without random numbers all three see the same; dropout's masks are the
same under both backends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model_gradients import GradientError, why_gradients_wrong
from .model_steps import EAGER, OWN, PEER
from .report import ROOT, Row

CACHES = ("SHARDFUSE_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
LIMIT = 400.0
"""Seconds of a process."""
ROUNDING = 2.0**-8
"""Of bfloat16, relatively."""
FARTHER = 2.0
WARM_AT_ONCE = 4
"""Models whose processes start from warm caches side by side: they read and import, and compile nothing."""
WARM_STARTS = 3
"""Of each process from warm caches, of which the median counts: single ones differ by more than the backends do."""


@dataclass(frozen=True)
class _Process:
    """``printed``: files, which never fill up as pipes do while nobody reads them."""

    running: subprocess.Popen[bytes]
    printed: tuple[Path, Path]

    def result(self) -> dict[str, Any] | str:
        """What it printed last; why there is nothing."""
        try:
            code = self.running.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.running.kill()
            return f"failed: not done in {LIMIT:.0f} s"
        out, error = (path.read_text(errors="replace").strip().splitlines() for path in self.printed)
        return json.loads(out[-1]) if code == 0 and out else f"failed: {[str(code), *error][-1]}"[:200]


def run_models(
    names: Sequence[str], gpus: int, layers: int | None = None, profiles: Path | None = None
) -> Iterator[list[Row]]:
    """Rows model by model, of the cases of ``names``.  ``profiles``: of each step's kernels."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        cold = _first_steps(names, gpus, layers, root, at_once=len(names))
        warm = [_first_steps(names, gpus, layers, root, at_once=WARM_AT_ONCE) for _ in range(WARM_STARTS)]
        for name, found in _all_steps(names, gpus, layers, root, profiles):
            starts = {backend: _middle([once[name][backend] for once in warm]) for backend in (OWN, PEER)}
            yield _rows(name, cold[name], starts, found)


def _first_steps(
    names: Sequence[str], gpus: int, layers: int | None, root: Path, at_once: int
) -> dict[str, dict[str, Any]]:
    """Each in a process of its own and with caches of its own, in which it leaves what it compiled.  Both backends of a
    model run at the same time, and so share what else goes on.  ``at_once``: models."""

    def both(k: int) -> dict[str, Any]:
        name = names[k]
        started = {b: _start("first", name, k % gpus, layers, root / f"{k}-{b}", b) for b in (PEER, OWN)}
        return {backend: process.result() for backend, process in started.items()}

    with ThreadPoolExecutor(at_once) as threads:
        return dict(zip(names, threads.map(both, range(len(names))), strict=True))


def _middle(starts: Sequence[dict[str, Any] | str]) -> dict[str, Any] | str:
    """The start of the median time; what a failed one says, where one failed."""
    failed = [s for s in starts if isinstance(s, str)]
    measured = [s for s in starts if not isinstance(s, str)]
    return failed[0] if failed else sorted(measured, key=lambda s: s["seconds"])[len(measured) // 2]


def _all_steps(
    names: Sequence[str], gpus: int, layers: int | None, root: Path, profiles: Path | None = None
) -> Iterator[tuple[str, Any]]:
    turns = root / "turns"
    turns.mkdir()
    running: dict[str, _Process] = {}
    for k, name in enumerate(names):
        for backend in (PEER, OWN):
            shutil.copytree(root / f"{k}-{backend}", root / f"{k}", dirs_exist_ok=True)
        given = ["--turns", str(turns), "--count", str(len(names))]
        given += ["--profile", str(profiles.absolute())] if profiles is not None else []
        running[name] = _start("steps", name, k % gpus, layers, root / f"{k}", *given)
    while running:
        time.sleep(0.1)
        for name in [n for n, p in running.items() if p.running.poll() is not None]:
            (turns / f"{name}.ready").touch()  # no process waits for one that failed
            yield name, running.pop(name).result()


def _start(what: str, name: str, gpu: int, layers: int | None, caches: Path, *rest: str) -> _Process:
    folders = {key: str(caches / key) for key in CACHES}
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "1", **os.environ, **folders}
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(caches.parent / "bytecode")}
    caches.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.model_steps", what, name, *rest, "--gpu", str(gpu)]
    command += ["--layers", str(layers)] if layers else []
    printed = caches / f"{what}.out", caches / f"{what}.err"
    with printed[0].open("wb") as out, printed[1].open("wb") as error:
        running = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=error)
    return _Process(running, printed)


def _rows(name: str, cold: dict[str, Any], warm: dict[str, Any], found: dict[str, Any] | str) -> list[Row]:
    if isinstance(found, str):
        return [Row("training step", name, OWN, 0, note=found)]
    errors = [GradientError(**e) for e in found["gradients"]]
    note = why_gradients_wrong(errors) or why_wrong(found["losses"])
    rows: list[Row] = []
    for backend in (OWN, PEER):
        us, low, high = found["us"][backend]
        c = found[backend]
        said = f"{c['graphs']} graphs, {c['breaks']} breaks, {found['bytes'][backend] / 2**30:.2f} GiB"
        said += f", host {found['host'][backend] / 1e3:.1f} ms"
        if backend == OWN:
            regions = f"{c['taken']} of {c['regions']} regions taken, {c['ops']} ops"
            said = f"{regions}, {said}, {_losses_said(found)}, {_gradients_said(errors)}"
        rows.append(
            Row("training step", name, backend, 0, us, low, high, note=note if backend == OWN else "", said=said)
        )
        if backend in found["kernels"]:
            us = found["kernels"][backend]
            rows.append(Row("kernels of a training step", name, backend, 0, us, note=note if backend == OWN else ""))
        for caches, firsts in (("warm", warm), ("cold", cold)):
            first = firsts[backend]
            us, why = (None, first) if isinstance(first, str) else (first["seconds"] * 1e6, "")
            rows.append(Row(f"first step, {caches} caches", name, backend, 0, us, note=why))
    return rows


def apart(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def why_wrong(losses: dict[str, list[float]]) -> str:
    """``losses``: of eager torch and both backends, step by step; "" where shardfuse's are right."""
    own, peer, eager = (losses[k] for k in (OWN, PEER, EAGER))
    if not min(first - last for first, *_, last in (own, peer, eager)) > 0:
        return f"WRONG: losses do not fall, from {eager[0]:.4f} to {eager[-1]:.4f} in eager torch"
    allowed = max(FARTHER * apart(eager, peer), ROUNDING * abs(eager[0]))
    if apart(own, peer) <= allowed:
        return ""
    return f"WRONG: losses {apart(own, peer):.4f} from Inductor's, {allowed:.4f} allowed"


def _gradients_said(errors: Sequence[GradientError]) -> str:
    worst = errors[0]
    three = f"{worst.name} {worst.own:.1e}, Inductor's {worst.peer:.1e}, eager's {worst.eager:.1e}"
    return f"gradients within {worst.over:.2f} of what is allowed ({three})"


def _losses_said(found: dict[str, Any]) -> str:
    own, peer, eager = (found["losses"][k] for k in (OWN, PEER, EAGER))
    return f"losses within {apart(own, peer):.1e} of Inductor's, eager within {apart(eager, peer):.1e}"
