"""Regions of torch.compile in a second process: their programs come from the cache folder, and give the same bits."""

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
import torch.nn.functional as F
import shardfuse.compile
from shardfuse.frontend import executor_cache

def f(x, r, w, b, w2):
    h = F.layer_norm(F.gelu(x) + r, (256,), w, b)
    return (h.view(-1, 256) @ w2).view(x.shape).softmax(-1)

if sys.argv[1] == "second":
    def never(*of, **named):
        raise AssertionError("a plan was made")
    executor_cache.compile_fusion = never
torch.manual_seed(0)
shapes = (4, 64, 256), (4, 64, 256), (256,), (256,), (256, 256)
inputs = [torch.randn(s).cuda().requires_grad_() for s in shapes]
compiled = torch.compile(f, backend="shardfuse", options={"shardfuse.take": "all"})
seed = torch.randn(4, 64, 256).cuda()
found = [[y, *torch.autograd.grad(y, inputs, seed)] for y in (compiled(*inputs), compiled(*inputs))]
assert all(torch.equal(a, b) for a, b in zip(*found))
print({r.graph for r in shardfuse.compile.report().taken})
torch.save([x.detach().cpu() for x in found[0]], sys.argv[2])
"""


def test_a_second_process_plans_nothing(tmp_path: Path) -> None:
    import torch

    names = "SHARDFUSE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
    folders = {name: str(tmp_path / name) for name in names}
    for folder in folders.values():
        Path(folder).mkdir(mode=0o700)
    root = str(Path(__file__).parents[2])
    printed: list[str] = []
    for which in ("first", "second"):
        command = [sys.executable, "-c", SCRIPT, which, str(tmp_path / which)]
        env = {**os.environ, **folders, "PYTHONPATH": root}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        printed.append(done.stdout)
    assert "cached" not in printed[0]
    assert "cached" in printed[1]
    first, second = (torch.load(tmp_path / which) for which in ("first", "second"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
