"""Kernels that an earlier process kept: loaded where whole and safe, else compiled again to the same result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys
import torch
from shardfuse import FusionDefinition

with FusionDefinition() as fd:
    x = fd.define_tensor([-1, 512], contiguity=True)
    fd.add_output(fd.ops.div(x, fd.ops.sum(fd.ops.exp(x), [-1], keepdim=True)))
given = torch.randn(32, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
(out,) = fd.execute([given])
wide = given.double()
error = (out.double() - wide / wide.exp().sum(-1, keepdim=True)).abs().max().item()
assert error < 1e-8, error
print("triton" if "triton" in sys.modules else "no triton", out.view(torch.int32).sum().item())
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.triton = folder / "triton"
        self.environment = {
            **os.environ,
            "XDG_CONFIG_HOME": str(folder / "configuration"),
            "SHARDFUSE_CACHE_DIR": str(self.cache),
            "TRITON_CACHE_DIR": str(self.triton),
        }

    def run(self) -> tuple[str, str]:
        """What a process prints, and what it is warned of."""
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    def loaded(self) -> list[Path]:
        return sorted(path for path in self.cache.iterdir() if path.suffix in (".bin", ".so", ".key"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("kept"))


def test_what_is_kept_is_loaded(place: Place) -> None:
    first, said = place.run()
    assert "triton's own entry" not in said.lower()
    assert {path.suffix for path in place.loaded()} == {".bin", ".so", ".key"}
    before = {path: path.stat().st_mtime_ns for path in place.loaded()}
    second, _ = place.run()
    assert (first.split()[-1], second) == (second.split()[-1], f"no triton {second.split()[-1]}\n")
    assert {path: path.stat().st_mtime_ns for path in place.loaded()} == before


def test_what_is_damaged_is_made_again(place: Place) -> None:
    result, _ = place.run()
    wholes = {path: path.read_bytes() for path in place.loaded()}
    for path, whole in wholes.items():
        path.write_bytes(whole[: len(whole) // 2])
    assert place.run()[0].split()[-1] == result.split()[-1]
    assert all(path.stat().st_size == len(whole) for path, whole in wholes.items())
    assert place.run()[0].startswith("no triton")


def test_folders_that_others_can_write_are_not_used(place: Place) -> None:
    result, _ = place.run()
    for path in (place.cache, place.triton):
        path.chmod(0o777)
    before = sorted(place.triton.rglob("*"))
    try:
        again, said = place.run()
    finally:
        for path in (place.cache, place.triton):
            path.chmod(0o700)
    assert again.split()[-1] == result.split()[-1]
    assert all(said.count(f"{path} is refused: ") == 1 for path in (place.cache, place.triton)), said
    assert sorted(place.triton.rglob("*")) == before
