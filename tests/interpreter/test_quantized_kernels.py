"""Kernels that quantise what they make, under Triton's interpreter, and what the text for a GPU leaves to it."""

from __future__ import annotations

import pytest
import torch
from quantized_check import check
from test_nn_quantized import FUNCTIONS, drawn

from benchmarks.sm90 import sources_of
from shardfuse import DataType, FusionDefinition
from shardfuse.nn import quantized
from shardfuse.nn.quantized import Quantized
from shardfuse.nn.quantizing_fusions import Quantization, Work, quantizing_fusion

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about lanes that are masked


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_scales(name: str, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFUSE_STRICT", "1")  # a kernel that fails is an error, not a call of torch
    own, other, *_ = FUNCTIONS[name]
    tensors = drawn(name, torch.bfloat16)
    found = own(*tensors, scales=scales)
    made = found if isinstance(found, Quantized) else found[0]
    check(made, other(*[t.double() for t in tensors]), torch.float8_e4m3fn, scales)


def test_gelu_of_a_block_far_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of -11 to -4, where the result is as small as 1e-27: within the steps of float8 of the block's own scale."""
    monkeypatch.setenv("SHARDFUSE_STRICT", "1")
    x = torch.linspace(-11, -4, 256).reshape(2, 128)
    found = quantized.gelu(x, scales="block")
    wide = 0.5 * x.double() * torch.special.erfc(-x.double() * 0.5**0.5)
    values = found.values.double() * found.scales.double()
    off = (values - wide).abs() / wide.abs().amax(-1, keepdim=True)
    assert off[1].max() < 0.04
    wanted = wide[1].abs().max() / 448
    assert abs(found.scales[1].item() / wanted.item() - 1) < 2e-6


def text_of(work: Work, scales: str, target: torch.dtype = torch.float8_e4m3fn) -> str:
    spec = Quantization(work, 512, (torch.bfloat16,), 1, 0.0, scales, target)  # pyright: ignore[reportArgumentType]
    fd = quantizing_fusion(spec)
    (x,) = fd.fec.tensors()
    plan = fd.fec.plan({x: (64, 512)})
    (source,) = sources_of(plan, [torch.empty(64, 512, dtype=torch.bfloat16, device="meta")])
    return source.text


@pytest.mark.parametrize("scales", ["row", "block"])
def test_the_conversion_cuts_off_and_a_scale_is_divided_by_once(scales: str) -> None:
    text = text_of("none", scales)
    assert "448.0, propagate" not in text
    assert " * (1.0 / " in text
    assert ".to(tl.float8e4nv)" in text
    assert "57344.0, propagate" in text_of("none", scales, torch.float8_e5m2)  # to infinity, without being cut off
    assert "rough_erfc(" in text_of("gelu", scales)
    assert "libdevice.erfc(" not in text_of("gelu", scales)


def cut_off_text(dtype: torch.dtype, *, is_read: bool) -> str:
    """The text for a GPU of ``x`` cut off and converted to float8_e4m3fn, and of twice that, where it ``is_read``."""
    with FusionDefinition(backend="triton") as fd:
        x = fd.define_tensor([64, 512], contiguity=True, dtype=DataType.from_torch(dtype))
        cut = fd.ops.minimum(fd.ops.maximum(x, -448.0), 448.0)
        y = fd.ops.cast(cut, dtype=DataType.Float8_e4m3fn)
        fd.add_output(y)
        if is_read:
            fd.add_output(fd.ops.mul(fd.ops.cast(y, dtype=DataType.Float), 2.0))
    (source,) = sources_of(fd.fec.plan({x: (64, 512)}), [torch.empty(64, 512, dtype=dtype, device="meta")])
    return source.text


def test_what_reads_the_cut_off_values_reads_them_rounded() -> None:
    text = cut_off_text(torch.float32, is_read=True)
    assert "448.0, propagate" not in text
    assert "T0.to(tl.float8e4nv).to(tl.float32)" in text
    assert "T0 * 2.0" not in text


def test_integers_are_cut_off_as_floats() -> None:
    text = cut_off_text(torch.int32, is_read=False)
    assert "T0.to(tl.float32), -448.0, propagate" in text
    assert "T0.to(tl.float8e4nv)" not in text


def test_a_divisor_that_is_a_result_is_precise_where_it_is_no_scale() -> None:
    """exp(80) as a power of two is off by 40 roundings of float32, and exp(-90) is 0 so."""
    with FusionDefinition(backend="triton") as fd:
        x = fd.define_tensor([64, 512], contiguity=True)
        divisor = fd.ops.exp(fd.ops.max(x, [-1], keepdim=True))
        fd.add_output(fd.ops.cast(fd.ops.div(x, divisor), dtype=DataType.Float8_e4m3fn))
        fd.add_output(divisor)
    (source,) = sources_of(fd.fec.plan({x: (64, 512)}), [torch.empty(64, 512, device="meta")])
    assert "power_of_two(" not in source.text
    assert "libdevice.exp(" in source.text
