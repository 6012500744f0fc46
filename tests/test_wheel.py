"""The wheel: what is in it, and that it works in an environment that has nothing of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from page_blocks import blocks_of

import shardfuse

ROOT = Path(__file__).parents[1]
BUILT_WITH = 77  # the least setuptools that pyproject.toml's build-system asks for

README = (ROOT / "README.md").read_text()

RUNNER = """
import sys
from importlib.metadata import entry_points

import shardfuse

assert shardfuse.__version__ == {version!r}
assert shardfuse.__file__.startswith(sys.prefix), shardfuse.__file__
for before, code, ranks in {blocks!r}:

    def run(before=before, code=code):
        names = dict(__name__="readme")
        exec(before, names)
        exec(code, names)

    if ranks:
        shardfuse.simulate(run, ranks, timeout=120)
    else:
        run()
        shardfuse.finalize()
(command,) = entry_points(group="console_scripts", name="shardfuse")
command.load()(["--version"])
"""
"""Runs README.md's Python blocks, each in a namespace of its own, and then the command."""


def readme_commands() -> list[list[str]]:
    """The calls of ``python -m shardfuse`` in README.md's shell blocks, without the interpreter."""
    lines = [line for block in README.split("```sh\n")[1:] for line in block.split("```")[0].splitlines()]
    return [line.split("#")[0].split()[1:] for line in lines if line.startswith("python -m shardfuse")]


def run(*command: str, cwd: Path) -> str:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are other tests'
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files where it runs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "shardfuse", source / "shardfuse", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "-w", str(folder)]
    try:
        has_backend = int(metadata.version("setuptools").split(".")[0]) >= BUILT_WITH
    except metadata.PackageNotFoundError:
        has_backend = False
    run(*pip, *(["--no-build-isolation"] if has_backend else []), str(source), cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


def test_what_the_wheel_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        told = {name.split("/", 1)[1]: archive.read(name).decode() for name in names if ".dist-info/" in name}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "shardfuse").rglob("*")
        if path.suffix in (".py", ".c", ".h", ".typed")
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert {
        "shardfuse/py.typed",
        "shardfuse/executor/driver.c",
        "shardfuse/executor/driver.h",
        "shardfuse/executor/ordered.c",
        "shardfuse/executor/nccl.c",
        "shardfuse/executor/clock.c",
    } <= sources
    assert wheel.name == f"shardfuse-{shardfuse.__version__}-py3-none-any.whl"
    assert f"\nVersion: {shardfuse.__version__}\n" in told["METADATA"]
    assert "\nRequires-Python: <3.13,>=3.11\n" in told["METADATA"]
    assert "shardfuse = shardfuse.__main__:main" in told["entry_points.txt"].splitlines()
    assert "licenses/LICENSE" in told


def test_it_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """torch and the like come from this environment; shardfuse, and what it is called by, from the wheel.

    What is run there is what README.md shows.
    """
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parents[1])}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin/python")]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=tmp_path)
    (site / "others.pth").write_text("".join(f"{path}\n" for path in sorted(others)))
    python = str(home / "bin/python")
    blocks = [(b.before, b.code, b.ranks) for b in blocks_of(README)]
    assert len(blocks) >= 3
    (tmp_path / "blocks.py").write_text(RUNNER.format(version=shardfuse.__version__, blocks=blocks))
    printed = run(python, "blocks.py", cwd=tmp_path).splitlines()
    assert printed[0].startswith("local [8, 1024] of [8, 1024], largest difference from unsharded torch")
    assert printed[-1] == shardfuse.__version__
    commands = readme_commands()
    assert commands == [["-m", "shardfuse", "doctor"]]
    for command in commands:
        assert " 0 faults" in run(python, *command, cwd=tmp_path)
    assert (home / "bin/shardfuse").stat().st_mode & 0o100
    checked = subprocess.run([*pip, "check"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert [line for line in checked.stdout.splitlines() if line.startswith("shardfuse ")] == []
    assert checked.stdout
