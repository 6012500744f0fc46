"""The backend and its pass where torch compiles ahead of time, or hands compiled graphs to another machine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compile_graphs import assert_near
from torch import Tensor
from torch.distributed.tensor import Shard

from shardfuse import DeviceMesh
from shardfuse import nn as fused
from shardfuse.compile import post_grad_pass, report

ALL = {"shardfuse.take": "all", "force_disable_caches": True}
ROWS, FEATURES = 8, 16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    report(clear=True)
    yield
    report(clear=True)


class Model(torch.nn.Module):
    """A norm of torch's, one of shardfuse's, which is torch's own ops in a graph, and maybe one on a mesh, an op."""

    def __init__(self, *, has_op: bool = False) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(FEATURES), fused.RMSNorm(FEATURES)
        self.layer = torch.nn.Linear(FEATURES, FEATURES)
        where = {"mesh": DeviceMesh([0]), "input": Shard(0), "parameters": "local"}
        self.third = fused.RMSNorm(FEATURES, **where) if has_op else torch.nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.layer(self.first(x)))).softmax(-1)


def made(*, has_op: bool = False) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(has_op=has_op), torch.randn(ROWS, FEATURES)


def exported(model: Model, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))


def check(found: Tensor, model: Model, x: Tensor) -> None:
    with torch.no_grad():
        eager = model(x)
        model.double()
        wide = model(x.double())
        model.float()
    assert_near(found.detach(), wide, eager, relative=True)


def test_a_package_of_aotinductor_is_torchs_own_and_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is C++, in which no region is called; an op of a module on a mesh it calls in Python."""
    model, x = made(has_op=True)
    options = {
        "post_grad_custom_post_pass": post_grad_pass(take="all"),
        "aot_inductor.compile_wrapper_opt_level": "O0",  # which takes g++ half as long
    }
    with caplog.at_level(logging.INFO, "shardfuse.compile"):
        path = torch._inductor.aoti_compile_and_package(
            exported(model, x), package_path=str(tmp_path / "model.pt2"), inductor_configs=options
        )
    assert not report().regions
    assert [r.getMessage() for r in caplog.records] == [
        "no region is handed over: Inductor writes C++ here, which does not call them"
    ]
    package = torch._inductor.aoti_load_package(path)
    for rows in (ROWS, 3):
        given = torch.randn(rows, FEATURES)
        check(package(given), model, given)


def test_an_exported_model_is_compiled_and_trained() -> None:
    model, x = made()
    compiled = torch.compile(exported(model, x).module(), backend="shardfuse", options=ALL, fullgraph=True)
    for rows in (ROWS, 3):
        given = torch.randn(rows, FEATURES)
        check(compiled(given), model, given)
    (x := torch.randn(ROWS, FEATURES)).requires_grad_()
    (of_x,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (eager,) = torch.autograd.grad(model(x).square().sum(), x)
    (wide,) = torch.autograd.grad(model.double()(x.double()).square().sum(), x)
    assert_near(of_x, wide.double(), eager, terms=wide.abs().amax())
    assert {r.graph for r in report().taken} == {"forward", "backward"}


CACHED = """
import sys
import torch, shardfuse.compile
from benchmarks.roundings import assert_near
from torch._dynamo.utils import counters
F = torch.nn.functional
torch.manual_seed(0)
x, w = torch.randn(6, 24, requires_grad=True), torch.randn(24, requires_grad=True)
f = lambda x, w: F.rms_norm(F.gelu(x), (24,), w)
if sys.argv[1] == "load":
    with open("artifacts", "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())
y = torch.compile(f, backend="shardfuse", fullgraph=True, options={"shardfuse.take": "all"})(x, w)
found = torch.autograd.grad(y.square().sum(), (x, w))
eager = torch.autograd.grad(f(x, w).square().sum(), (x, w))
wide = torch.autograd.grad(f(x.double(), w.double()).square().sum(), (x, w))
for a, b, c in zip(found, wide, eager):
    assert_near(a, b.double(), c, terms=b.double().abs().amax())
if sys.argv[1] == "save":
    with open("artifacts", "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
taken = shardfuse.compile.report().taken
print(counters["aot_autograd"]["autograd_cache_hit"], sorted({r.graph for r in taken}))
"""

AHEAD = """
import sys
import torch
F = torch.nn.functional
torch.manual_seed(0)
x, w = torch.randn(6, 24), torch.randn(24)
def f(x, w):
    return F.rms_norm(F.gelu(x), (24,), w)
if sys.argv[1] == "save":
    import shardfuse.compile
    compiled = torch.compile(f, backend="shardfuse", fullgraph=True, options={"shardfuse.take": "all"})
    compiled.aot_compile(((x, w), {})).save_compiled_function("function")
else:
    with open("function", "rb") as file:
        loaded = torch.compiler.load_compiled_function(file, f_globals=globals())
    found = loaded(x, w)
    import shardfuse.compile
    from benchmarks.roundings import assert_near
    assert_near(found, f(x.double(), w.double()), f(x, w), relative=True)
    print([r.graph for r in shardfuse.compile.report().taken])
"""


def ran(script: str, *arguments: str, folder: Path, caches: str) -> str:
    """What ``script`` prints in a process of its own."""
    root = Path(__file__).parents[1]
    environ = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / caches),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # longer than two kernels take without
        "SHARDFUSE_CACHE_DIR": str(folder / caches / "shardfuse"),
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environ, cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_cache_artifacts_hold_the_regions(tmp_path: Path) -> None:
    """On another machine, whose caches are empty."""
    assert ran(CACHED, "save", folder=tmp_path, caches="one") == "0 ['backward', 'forward']"
    assert ran(CACHED, "load", folder=tmp_path, caches="two") == "1 ['cached']"


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="aot_compile() of older torches takes its own backends alone")
def test_a_function_that_is_compiled_ahead_is_loaded_with_its_regions(tmp_path: Path) -> None:
    ran(AHEAD, "save", folder=tmp_path, caches="one")
    assert ran(AHEAD, "load", folder=tmp_path, caches="two") == "['cached']"
