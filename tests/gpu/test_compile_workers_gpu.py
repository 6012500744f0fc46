"""What processes without a GPU compile is what this one compiles, and a graph's first call compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config

from shardfuse.compile import ahead, report
from shardfuse.executor import binaries, kernel

pytestmark = pytest.mark.gpu
F = torch.nn.functional


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_first_call_finds_what_workers_compiled(
    dtype: torch.dtype, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[binaries.Asked] = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        def submit(job: Callable[[], None]) -> Future[Any]:
            begun.append(job.args[0])  # pyright: ignore[reportFunctionMemberAccess]
            return pool.submit(job)

        monkeypatch.setenv("SHARDFUSE_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(ahead, "_pool", lambda: submit)
        monkeypatch.setattr(kernel, "_compiled", lambda *of: pytest.fail("it is compiled at the first call"))
        torch._dynamo.reset()
        report(clear=True)
        x, w = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in ((96, 712), (712,)))
        with config.patch(force_disable_caches=True):
            made = torch.compile(lambda x, w: F.rms_norm(x, (712,), w).softmax(-1), backend=_taking_all)(x, w)
            made.backward(torch.randn_like(made))
    assert {r.graph for r in report().taken} == {"forward", "backward"}
    assert len(begun) >= 2


def _taking_all(gm: torch.fx.GraphModule, given: list[torch.Tensor]) -> Callable[..., object]:
    from shardfuse.compile.backend import backend

    return backend(gm, given, options={"shardfuse.take": "all"})


def test_images_are_those_of_this_process(device: torch.device, tmp_path: Path) -> None:
    text = (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        "def scaled(x_ptr, y_ptr, n: tl.int64, s: tl.float64):\n    k = tl.program_id(0) * 1024 + tl.arange(0, 1024)\n"
        "    tl.store(y_ptr + k, tl.load(x_ptr + k, mask=k < n) * s.to(tl.float32), mask=k < n)\n"
    )
    options = (("num_warps", 4), ("num_stages", 1), ("enable_fp_fusion", True))
    types = torch.bfloat16, torch.float32
    asked = binaries.Asked(text, "scaled", types, "ww", "qd", options, torch.cuda.get_device_capability(device))
    folders = tmp_path / "apart", tmp_path / "here"
    for folder in folders:
        folder.mkdir(mode=0o700)
    kernel.compile_apart(asked, folders[0])
    apart = binaries.binary_of(asked, folders[0], lambda: pytest.fail("nothing was left"))
    kernel.load_function.cache_clear()
    here = binaries.binary_of(asked, folders[1], lambda: kernel._compiled(asked, folders[1]))  # pyright: ignore[reportPrivateUsage]
    assert apart == here
