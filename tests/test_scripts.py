"""What scripts/ make of their arguments, with a Python that only says what it was given; and what tests need."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from equivalent_changes import EQUIVALENT
from file_claims import Claims
from planted_faults import FAULTS

ROOT = Path(__file__).parents[1]
MAIN_JOB = str(ROOT / "examples" / "train_lm.py")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH: a python3 that has all requirements and prints its arguments, and an mpirun that does."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("python3", "mpirun"):
        program = folder / name
        program.write_text(f'#!/bin/bash\nprintf "[%s]" {name}; for a; do printf "[%s]" "${{a#{ROOT}/}}"; done; echo\n')
        program.chmod(0o755)
    return folder


def run(stub: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / script), *arguments]
    env = {"PATH": f"{stub}:/usr/bin:/bin", "HOME": str(stub), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)


def launched(stub: Path, *arguments: str) -> tuple[str, list[str], str]:
    """The number of ranks, the script with its arguments, and what was said."""
    done = run(stub, "launch.sh", *arguments)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"\[([^]]*)\]", done.stdout.splitlines()[-1])
    if found[0] == "mpirun":
        at = found.index("-n") + 1
        return found[at], found[at + 2 :], done.stderr
    assert found[:3] == ["python3", "scripts/torchrun.py", "--nproc-per-node"]
    return found[3], found[4:], done.stderr


OWN = "examples/sharded_norm.py"
MAIN = "examples/train_lm.py"


@pytest.mark.parametrize(
    ("arguments", "ranks", "script"),
    [
        ([], "2", [MAIN]),
        (["--nproc", "4"], "4", [MAIN]),
        (["--nproc=3", "--launcher", "torchrun"], "3", [MAIN]),
        (["--nproc=3", "--launcher=mpirun"], "3", [MAIN]),
        (["--launcher", "mpirun", OWN, "-x"], "2", [OWN, "-x"]),
        (["--preset", "gpu", "--nproc", "4"], "4", [MAIN, "--preset", "gpu"]),
        (["--nproc", "4", "--preset", "gpu", "--no-check"], "4", [MAIN, "--preset", "gpu", "--no-check"]),
        (["--preset=gpu", "--help"], "2", [MAIN, "--preset=gpu", "--help"]),
        (["--", "--help"], "2", [MAIN, "--help"]),
        (["--steps", "5", "--", "--nproc", "4"], "2", [MAIN, "--steps", "5", "--nproc", "4"]),
        (["--nproc", "3", "--", OWN, "--nproc", "4"], "3", [OWN, "--nproc", "4"]),
        (["--nproc", "3", OWN, "a b", "--", "--preset", ""], "3", [OWN, "a b", "--", "--preset", ""]),
        (["--"], "2", [MAIN]),
    ],
    ids=" ".join,
)
def test_what_launch_starts(stub: Path, arguments: list[str], ranks: str, script: list[str]) -> None:
    assert launched(stub, *arguments) == (ranks, script, "")


@pytest.mark.parametrize("option", ["--nproc", "--nproc=4", "--launcher"])
def test_options_behind_the_script_are_its_own_which_is_said(stub: Path, option: str) -> None:
    ranks, script, said = launched(stub, OWN, "first", option, "--nproc", "4")
    assert (ranks, script) == ("2", [OWN, "first", option, "--nproc", "4"])
    assert said == f"launch.sh: {option} stands behind {OWN} and goes to it: launch.sh's own options stand before\n"


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        ("launch.sh", ["--nproc"], "--nproc wants a value"),
        ("launch.sh", ["--preset", "gpu", "--launcher"], "--launcher wants a value"),
        *(
            ("launch.sh", [f"--nproc={n}", OWN], f"--nproc wants a number of ranks, 1 or more, and not '{n}'")
            for n in ("0", "-1", "two", "1.5", "", "02", "4 ")
        ),
        *(
            ("launch.sh", ["--nproc", n], rf"--nproc wants at most \d+ ranks .* and not {n}")
            for n in ("9999", "9" * 30)
        ),
        ("launch.sh", ["--launcher", "srun"], "--launcher wants torchrun or mpirun, and not 'srun'"),
        ("launch.sh", ["missing.py", "--nproc", "3"], "no such script: missing.py"),
        ("launch.sh", ["examples"], "no such script: examples"),
        ("launch.sh", ["--", "missing.py"], "no such script: missing.py"),
        ("test.sh", ["-k"], "-k wants a value"),
        ("test.sh", ["tests/test_mesh.py", "-m"], "-m wants a value"),
        ("test.sh", ["-x", "--maxfail"], "--maxfail wants a value"),
        ("test.sh", ["tests/missing.py"], "no such file or folder: tests/missing.py"),
        ("test.sh", ["tests/missing.py::test_it"], "no such file or folder: tests/missing.py"),
        ("test.sh", ["--", "-k"], "no such file or folder: -k"),
        ("check.sh", ["--fix"], "takes no arguments, and not '--fix'"),
        ("docs.sh", ["site", "other"], "takes one folder at most, and not 'site other'"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_a_bad_call_is_one_line(stub: Path, script: str, arguments: list[str], line: str) -> None:
    """Before anything is set up."""
    done = run(stub, script, *arguments)
    said = [text for text in done.stderr.splitlines() if "stands behind" not in text]
    assert (done.returncode, done.stdout, len(said)) == (2, "", 1)
    assert re.fullmatch(rf"{script}: {line}", said[0]) or said[0] == f"{script}: {line}"


@pytest.mark.parametrize("script", ["launch.sh", "test.sh"])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_usage(stub: Path, script: str, option: str) -> None:
    done = run(stub, script, option)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: scripts/{script} ")


SINGLE = "not mpi and not multi_gpu and not gpu"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["tests/test_mesh.py"], ["-m", SINGLE, "tests/test_mesh.py"]),
        (
            ["-k", "a or b", "-x", "tests/test_mesh.py"],
            ["-m", SINGLE, "-k", "a or b", "-x", "tests/test_mesh.py"],
        ),
        (["-m", "slow", "tests/test_mesh.py"], ["-m", f"{SINGLE} and (slow)", "tests/test_mesh.py"]),
        (["-mslow", "--", "tests/test_mesh.py"], ["-m", f"{SINGLE} and (slow)", "tests/test_mesh.py"]),
        (
            ["--deselect", "tests/test_mesh.py::x", "tests/test_mesh.py::y"],
            ["-m", SINGLE, "--deselect", "tests/test_mesh.py::x", "tests/test_mesh.py::y"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_the_tests_are_given(stub: Path, arguments: list[str], wanted: list[str]) -> None:
    done = run(stub, "test.sh", *arguments)
    (line,) = (text for text in done.stdout.splitlines() if "[pytest]" in text)
    assert re.findall(r"\[([^]]*)\]", line) == ["python3", "-m", "pytest", *wanted]


@dataclass(frozen=True)
class Item:
    path: Path


def test_two_processes_share_the_files(tmp_path: Path) -> None:
    """Each file is run once, by whichever comes to it first, with its tests next to each other and in order."""
    items = [Item(Path(f"/tests/test_{k // 3}.py")) for k in range(18)]
    forward, backward = Claims(tmp_path, backward=False), Claims(tmp_path, backward=True)
    first, last = list(items), list(items)
    forward.order(first)
    backward.order(last)
    assert first == items
    assert [id(item) for item in last] == [id(items[3 * k + j]) for k in range(5, -1, -1) for j in range(3)]
    run: list[list[int]] = [[], []]
    for k in range(18):  # the second starts late, and is slower
        run[0] += [k] if forward.is_own(first[k].path) else []
        if k > 5 and k % 2:
            run[1] += [j for j in (k - 7, k - 6) if backward.is_own(last[j].path)]
    run[1] += [j for j in range(12, 18) if backward.is_own(last[j].path)]
    ran = [id(first[k]) for k in run[0]] + [id(last[k]) for k in run[1]]
    assert sorted(ran) == sorted(map(id, items))
    assert len(run[0]) >= 6
    assert len(run[1]) >= 6


def test_what_the_tests_start_shares_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_CLAIMS", str(tmp_path))
    monkeypatch.setenv("TEST_CLAIMS_ORDER", "backward")
    assert Claims.from_environment() is not None
    assert Claims.from_environment() is None


def test_all_tests_are_run_in_two_processes(stub: Path) -> None:
    done = run(stub, "test.sh")
    lines = [text for text in done.stdout.splitlines() if "[pytest]" in text and "--ignore=tests/multirank" in text]
    assert len(lines) == 2, done.stdout
    assert "no:cacheprovider" in lines[1]


# .ci/run

CLOSING = "all parts: 7 passed in 3s"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """.ci/run as it is, in a repository whose scripts print their environment and their names."""
    (tmp_path / "temporary").mkdir()
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    (project / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", project / ".ci" / "run")
    for name in ("launch", "test", "check"):
        script = project / "scripts" / f"{name}.sh"
        closing = f"echo {CLOSING}" if name == "test" else ""
        script.write_text(f'#!/usr/bin/env bash\necho "{name} $(env -0 | tr "\\0" ,) in $PWD"\n{closing}\n')
        script.chmod(0o755)
    commit(project)
    return project


def commit(project: Path) -> None:
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=project, check=True)


def run_ci(project: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TMPDIR": str(project.parent / "temporary"), "CI": "true"}
    done = subprocess.run(["bash", ".ci/run"], cwd=project, env=env, capture_output=True, text=True, timeout=60)
    assert not list((project.parent / "temporary").iterdir()), "the clone is removed"
    return done


def test_ci_runs_the_readmes_commands_first_and_in_a_clone(project: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    assert "./scripts/launch.sh " in readme
    assert "./scripts/test.sh " in readme
    (project / "scripts" / "test.sh").write_text("exit 1")  # not committed
    done = run_ci(project)
    assert (done.returncode, done.stderr) == (0, "run: what is not committed is left out\n")
    ran = [line.split() for line in done.stdout.splitlines() if " in /" in line]
    assert [line[0] for line in ran] == ["launch", "test", "check"]
    for _, environment, _, folder in ran:
        # what bash itself sets
        assert {text.split("=")[0] for text in environment.split(",") if text} <= {"PWD", "OLDPWD", "SHLVL", "_"}
        assert folder.startswith(str(project.parent / "temporary"))
    assert done.stdout.splitlines()[-1] == CLOSING


@pytest.mark.parametrize("name", ["launch", "test", "check"])
def test_ci_fails_where_a_part_fails(project: Path, name: str) -> None:
    script = project / "scripts" / f"{name}.sh"
    script.write_text(f"{script.read_text()}exit 3\n")
    commit(project)
    done = run_ci(project)
    assert (done.returncode, done.stderr) == (1, f"run: failed: ./scripts/{name}.sh\n")
    assert all(f"\n{other} " in done.stdout for other in ("launch", "test", "check"))
    assert done.stdout.splitlines()[-1] == CLOSING


# requirements


def test_the_extras_hold_what_the_tests_use() -> None:
    """All that tests import, and all modules that they run by -m, are installed by the extras that test.sh asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["mpi"]]
    named = {re.split(r"[^\w-]", requirement)[0].replace("_", "-").lower() for requirement in wanted}
    providers = metadata.packages_distributions()
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    ours = {"shardfuse", "benchmarks", "examples", *(path.stem for path in files)}
    lacking = {
        (module, str(path.relative_to(ROOT)))
        for path in (ROOT / "tests").rglob("*.py")
        for module in modules_of(ast.parse(path.read_text()))
        if module not in sys.stdlib_module_names and module not in ours
        if not named & {name.replace("_", "-").lower() for name in providers.get(module, [module])}
    }
    assert not lacking


def modules_of(tree: ast.Module) -> set[str]:
    """The first names of all that is imported, and of what `[sys.executable, "-m", ...` runs."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found |= {alias.name.split(".")[0] for alias in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.split(".")[0])
            case ast.List(
                elts=[ast.Attribute(attr="executable"), ast.Constant(value="-m"), ast.Constant(value=str(module)), *_]
            ):
                found.add(module.split(".")[0])
            case _:
                pass
    return found


def test_a_file_name_tells_one_module(tmp_path: Path) -> None:
    """Two folders may each have an `__init__.py`; of any other name, the second is a violation."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("shardfuse", "shardfuse/ir", "shardfuse/ops"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text('"""A package."""\n')
    command = [sys.executable, str(tmp_path / "scripts" / "budgets.py")]
    (tmp_path / "shardfuse" / "ir" / "table.py").write_text('"""A module."""\n')
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    (tmp_path / "shardfuse" / "ops" / "table.py").write_text('"""Another."""\n')
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "shardfuse/ops/table.py:1: shardfuse/ir/table.py has this file name too" in found.stdout


def test_planted_faults_can_be_planted() -> None:
    """What they change stands once in its file."""
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.before) == 1, fault.name


def test_equivalent_changes_are_of_lines_that_there_are() -> None:
    gone = [
        (file, line)
        for file, line, _ in EQUIVALENT
        if line not in (found.strip() for found in (ROOT / file).read_text().splitlines())
    ]
    assert gone == []


def test_the_kernels_of_each_kind_of_plan_are_frozen(tmp_path: Path) -> None:
    """By the script as it is run by hand, where pytest has put no folder of the tests on the path."""
    file = tmp_path / "kernels.gz"
    script = [sys.executable, str(ROOT / "scripts" / "kernel_snapshot.py"), "freeze", str(file), "--first-of-each"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(script, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "7 plans\n"), done.stderr
    frozen = json.loads(gzip.decompress(file.read_bytes()))
    assert len(frozen) == 7
    assert all("@triton.jit" in text for kernels in frozen.values() for text in kernels.values())
