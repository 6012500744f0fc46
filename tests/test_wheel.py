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

import shardfuse

ROOT = Path(__file__).parents[1]
BUILT_WITH = 77  # the least setuptools that pyproject.toml's build-system asks for

README_LINES = """
import sys
from importlib.metadata import entry_points

import torch
import shardfuse
from shardfuse import DataType, FusionDefinition

assert shardfuse.__version__ == "{version}"
assert shardfuse.__file__.startswith(sys.prefix), shardfuse.__file__
with FusionDefinition() as fd:
    x = fd.define_tensor([-1, 1024], contiguity=True, dtype=DataType.Float)
    weight = fd.define_tensor([1024], contiguity=True, dtype=DataType.Float)
    mean_square = fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)
    rstd = fd.ops.rsqrt(fd.ops.add(mean_square, 1e-6))
    fd.add_output(fd.ops.mul(fd.ops.mul(x, rstd), weight))
torch.manual_seed(0)
full, w = torch.randn(8, 1024), torch.randn(1024)
(y,) = fd.execute([full, w])
torch.testing.assert_close(y, torch.nn.functional.rms_norm(full, (1024,), w, 1e-6))
print(fd.explain().kernels)
(command,) = entry_points(group="console_scripts", name="shardfuse")
command.load()(["--version"])
"""


def run(*command: str, cwd: Path) -> str:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
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
    """torch and the like come from this environment; shardfuse, and what it is called by, from the wheel."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parents[1])}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin/python")]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=tmp_path)
    (site / "others.pth").write_text("".join(f"{path}\n" for path in sorted(others)))
    python = str(home / "bin/python")
    assert (
        run(python, "-c", README_LINES.format(version=shardfuse.__version__), cwd=tmp_path)
        == f"1\n{shardfuse.__version__}\n"
    )
    assert (home / "bin/shardfuse").stat().st_mode & 0o100
    checked = subprocess.run([*pip, "check"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert [line for line in checked.stdout.splitlines() if line.startswith("shardfuse ")] == []
    assert checked.stdout
