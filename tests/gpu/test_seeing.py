"""What doctor and the page of a plan say on a machine with GPUs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardfuse import DataType, FusionDefinition

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def test_doctor_finds_every_gpu_and_tries_it() -> None:
    command = [sys.executable, "-m", "shardfuse", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    found = {(f["area"], f["name"]): f for f in json.loads(done.stdout)["findings"]}
    for k in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_properties(k).name in found["GPUs", f"GPU {k}"]["found"]
    assert ("GPUs", "driver") in found
    assert found["versions", "CUDA"]["found"] == torch.version.cuda
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["versions", "NCCL"]["found"])
    assert found["self-tests", "GPU"]["status"] == "ok", found["self-tests", "GPU"]
    if torch.cuda.device_count() > 1:
        assert found["GPUs", "links"]["status"] == found["GPUs", "peer access"]["status"] == "ok"
    assert done.returncode == 0, [f for f in found.values() if f["status"] == "fault"]


def test_every_kernel_of_a_run_is_measured_on_the_page(tmp_path: Path) -> None:
    """Kernels of one launch and of several: a norm, and a sum whose parts a second kernel adds up."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4096], contiguity=True, dtype=DataType.Float)
        scaled = fd.ops.mul(x, fd.ops.rsqrt(fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)))
        fd.add_output(scaled)
        fd.add_output(fd.ops.sum(scaled, [0]))
    inputs = [torch.randn(8192, 4096, device="cuda")]
    fd.execute(inputs)
    timeline = fd.timeline(inputs)
    plan = fd.explain(html=tmp_path / "plan.html", timeline=timeline)
    text = (tmp_path / "plan.html").read_text()
    shares = [int(share) for share in re.findall(r"(\d+)% of the roof", text)]
    assert len(shares) == sum(bool(s.kernels) for s in plan.segments)
    assert all(share > 0 for share in shares)
    assert "Measured on the GPU of rank 0" in text
    kernels = {name for s in plan.segments for name in (*s.kernels, *(size.kernel for size in s.sizes))}
    assert {s.name for s in timeline.spans} <= kernels
