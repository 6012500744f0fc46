"""Plants faults in a copy of the tree and runs the tests that have to find them: `python scripts/mutate.py [--list]`.

Two modes. Without files: the faults of `tests/planted_faults.py`, each with its tests; `--only TEXT` takes those whose
name holds it, `--kind` those that need one way of running (single, interpreter, ranks, gpu; gpu is left out where there
is none). With files, or `--groups` for those of `tests/planted_faults.py`: small changes of their code found in the
syntax tree (operators, bounds, conditions, statements), of all files or of each group `--sample` by `--seed`; each
is run against quick tests that execute its line. Which those are is found by running them once, some minutes;
`--map FILE` keeps it for other runs on the same sources.

A fault is caught where pytest fails, and survives where it passes. Tests that fail without any fault say nothing: those
of a listed fault are run once before. A change of which `tests/equivalent_changes.py` says that it changes no behaviour
is not run. Prints a line for each fault, then the survivors. Exit status: 0 where all were caught, 1 where one survived
or could not be planted.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "scripts"))

from planted_faults import FAULTS, GROUPS, Fault  # noqa: E402
from sampled_faults import Sample, check_sample  # noqa: E402

COPIED = ("shardfuse", "tests", "benchmarks", "examples", "scripts", "docs", "pyproject.toml", "README.md")
SECONDS = 900
"""For the tests of one fault: one that hangs is caught."""
NO_GPU = "no GPU"


@dataclass(frozen=True)
class Run:
    """One way to run some tests."""

    kind: str
    tests: tuple[str, ...]


class Tree:
    """A copy of the working tree, in which one file at a time is changed."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(source, directory / name, ignore=ignore)
            elif source.exists():
                shutil.copy(source, directory / name)

    def status(self, run: Run, file: str = "", text: str | None = None) -> int:
        """pytest's exit status with ``file`` replaced by ``text``; 124 where it takes too long."""
        path, before = self.root / file, ""
        if text is not None:
            before = path.read_text()
            path.write_text(text)
        try:
            done = subprocess.run(
                self.command(run), cwd=self.root, env=self.environment(run), capture_output=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if text is not None:
                path.write_text(before)
        return done.returncode

    def command(self, run: Run) -> list[str]:
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *run.tests]
        if run.kind == "ranks":
            mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
            return [*mpirun, *pytest]
        return pytest

    def environment(self, run: Run) -> dict[str, str]:
        found = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        found |= {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        found["SHARDFUSE_CACHE_DIR"] = str(self.root / ".cache")
        if run.kind == "interpreter":
            found["TRITON_INTERPRET"] = "1"
        if run.kind == "ranks":
            found |= {"GLOO_SOCKET_IFNAME": "lo", "SHARDFUSE_TEST_DEVICE": "cpu"}
        return found


def planted(fault: Fault, tree: Tree) -> str | None:
    """The text of the file with the fault in it; None where what it replaces is not there exactly once."""
    text = (tree.root / fault.file).read_text()
    return text.replace(fault.before, fault.after) if text.count(fault.before) == 1 else None


def verdict(status: int) -> str:
    """pytest's 1 is a test that failed, 2 an interrupted collection (a fault that breaks an import is caught too)."""
    if status == 0:
        return "SURVIVED"
    if status == 5:
        return "NO TESTS"
    return "hung, caught" if status == 124 else "caught"


def check_faults(faults: Sequence[Fault], trees: Sequence[Tree]) -> Iterator[tuple[str, str]]:
    """As many at once as there are trees: first the tests without any fault, then those of each."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def status(run: Run, file: str = "", text: str | None = None) -> int:
        tree = free.get()
        try:
            return tree.status(run, file, text)
        finally:
            free.put(tree)

    texts = [planted(fault, trees[0]) for fault in faults]
    runs = [Run(fault.kind, fault.tests) for fault in faults]
    with ThreadPoolExecutor(len(trees)) as pool:
        needed = {run for run, text in zip(runs, texts, strict=True) if text is not None}
        alone = {run: pool.submit(status, run) for run in dict.fromkeys(runs) if run in needed}

        def checked(fault: Fault, run: Run, text: str | None) -> str:
            if text is None:
                return "NOT PLANTED: the text that it replaces is not there once"
            if alone[run].result() != 0:
                return "NO VERDICT: its tests fail without it"
            return verdict(status(run, fault.file, text))

        said = [pool.submit(checked, *each) for each in zip(faults, runs, texts, strict=True)]
        for fault, found in zip(faults, said, strict=True):
            yield fault.name, found.result()


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def chosen(options: argparse.Namespace) -> list[Fault]:
    found = [f for f in FAULTS if options.only in f.name and options.kind in ("", f.kind)]
    return found if has_gpu() or options.list else [f for f in found if f.kind != "gpu"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", help="files whose code is changed, as shardfuse/executor/binding.py, or :LINE of one"
    )
    parser.add_argument("--list", action="store_true", help="say which faults there are, and plant none")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name holds this")
    parser.add_argument("--kind", default="", choices=["", "single", "interpreter", "ranks", "gpu"])
    said = f"change the code of these groups ({', '.join(GROUPS)}), or of all, a sample of each"
    parser.add_argument("--groups", nargs="*", choices=list(GROUPS), metavar="NAME", default=None, help=said)
    parser.add_argument("--sample", type=int, default=12, help="how many changes, of the files or of each group (12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--map", type=Path, default=None, metavar="FILE", help="keeps which test executes which line")
    parser.add_argument("--seconds", type=float, default=40.0, help="of tests for one change, at most (40)")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at once (1)")
    options = parser.parse_args()
    if options.list:
        for fault in chosen(options):
            print(f"{fault.name} [{fault.kind}]: {fault.file}, {' '.join(fault.tests)}")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        trees = [Tree(Path(directory) / str(k)) for k in range(max(1, options.jobs))]
        if options.files or options.groups is not None:
            asked = [tuple(options.files)] if options.files else [GROUPS[g] for g in options.groups or GROUPS]
            found = options.map or Path(directory) / "map.json"
            results = check_sample(
                Sample(asked, options.sample, options.seed, found, options.seconds), [t.root for t in trees]
            )
        else:
            results = check_faults(chosen(options), trees)
        bad: list[str] = []
        count = 0
        for name, said in results:
            count += 1
            print(f"{said:12} {name}", flush=True)
            if "caught" not in said and "equivalent" not in said:
                bad.append(f"{name}: {said}")
    print(f"\n{count - len(bad)} of {count} caught")
    print("\n".join(bad))
    return int(bool(bad) or not count)


if __name__ == "__main__":
    sys.exit(main())
