"""A kernel whose programs wait for each other has no more of them than run at once, whatever was planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_cases import layer_norm_backward

from shardfuse import DataType, FusionDefinition
from shardfuse.compiler import compile_fusion
from shardfuse.device import H200
from shardfuse.errors import KernelCompileError
from shardfuse.executor.fitting import fitted, launches_of
from shardfuse.executor.kernel import Kernel
from shardfuse.executor.options import CompileOptions
from shardfuse.ir.layout import Layout
from shardfuse.schedulers import kernels_of
from shardfuse.schedulers.plan import KernelPlan


def norm_of_wide_rows() -> KernelPlan:
    """By a team of programs."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([1024, 262144], dtype=DataType.BFloat16)
        wide = fd.ops.cast(x, DataType.Float)
        mean = fd.ops.mean(fd.ops.mul(wide, wide), [1], keepdim=True)
        fd.add_output(fd.ops.cast(fd.ops.mul(wide, fd.ops.rsqrt(mean)), DataType.BFloat16))
    (segment,) = compile_fusion(fd.fusion, {x: (1024, 262144)}, device=H200).segments
    (plan,) = segment.kernels
    assert plan.schedule.members > 1
    return plan


def gradients_of_a_norm() -> KernelPlan:
    """Sums of rows and of columns, and what adds up the columns' partial results in the same launch."""
    segment = layer_norm_backward([32768, 4096], DataType.BFloat16)
    (plan,) = kernels_of("mix_order", segment, H200)
    assert plan.schedule.is_one_launch
    assert len(plan.stages) == 2
    return plan


def fit(plan: KernelPlan, most: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kernel:
    monkeypatch.setattr(Kernel, "compile", lambda self, device: None)
    monkeypatch.setattr(Kernel, "resident", lambda self: most)
    layouts = {t: Layout.contiguous(t.domain.local_axes(), {}) for t in (*plan.segment.inputs, *plan.segment.outputs)}
    return fitted(plan, layouts, 0, CompileOptions(cache_directory=tmp_path), torch.device("cpu"))


def test_what_fits_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = norm_of_wide_rows()
    planned = fit(plan, None, monkeypatch, tmp_path).source.grid
    assert fit(plan, planned, monkeypatch, tmp_path).source.grid == planned


def test_fewer_teams_where_fewer_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = norm_of_wide_rows()
    planned = fit(plan, None, monkeypatch, tmp_path).source
    found = fit(plan, planned.grid - 1, monkeypatch, tmp_path).source
    assert found.grid == planned.grid - plan.schedule.members
    assert found.text == planned.text


def test_a_team_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = norm_of_wide_rows()
    most = plan.schedule.members - 1
    with pytest.raises(KernelCompileError, match=f"programs wait for each other, {most} run at once"):
        fit(plan, most, monkeypatch, tmp_path)


def test_stages_are_launches_where_their_programs_do_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = gradients_of_a_norm()
    with pytest.raises(KernelCompileError, match="programs wait for each other, 131 run at once"):
        fit(plan, 131, monkeypatch, tmp_path)
    sources = [fit(one, 131, monkeypatch, tmp_path).source for one in launches_of(plan)]
    assert [s.is_cooperative for s in sources] == [False, False]
    partial = [str(t) for t in sources[0].tensors if "partial" in str(t)]
    assert partial
    assert partial == [str(t) for t in sources[1].tensors if "partial" in str(t)]


def test_a_kernel_without_stages_stays_one() -> None:
    plan = norm_of_wide_rows()
    assert launches_of(plan) == (plan,)
