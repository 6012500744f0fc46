"""Results quantised to float8: each value within half a step of the exact one, each scale within its roundings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from quantized_check import check, step
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.roundings import assert_near
from shardfuse.errors import ModuleArgumentError, ModuleInputError
from shardfuse.nn import quantized
from shardfuse.nn.functional import rms_norm as plain_rms_norm
from shardfuse.nn.quantized import Quantized
from shardfuse.nn.quantizing_fusions import Quantization, quantizing_fusion

COLUMNS = 384
Function = Callable[..., Quantized | tuple[Quantized, Tensor]]
FUNCTIONS: dict[str, tuple[Function, Function, int, int]] = {
    # ours, torch's, rows tensors, vectors
    "quantize": (quantized.quantize, lambda x: x, 1, 0),
    "rms_norm": (
        lambda x, w, **o: quantized.rms_norm(x, w.shape, w, 1e-6, **o),
        lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6), 1, 1,
    ),
    "layer_norm": (
        lambda x, w, b, **o: quantized.layer_norm(x, w.shape, w, b, **o),
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b), 1, 2,
    ),
    "add_rms_norm": (
        lambda x, r, w, **o: quantized.add_rms_norm(x, r, w.shape, w, 1e-6, **o),
        lambda x, r, w: functional.rms_norm(x + r, w.shape, w, 1e-6), 2, 1,
    ),
    "add_layer_norm": (
        lambda x, r, w, b, **o: quantized.add_layer_norm(x, r, w.shape, w, b, **o),
        lambda x, r, w, b: functional.layer_norm(x + r, w.shape, w, b), 2, 2,
    ),
    "gelu": (quantized.gelu, functional.gelu, 1, 0),
    "gelu, tanh": (
        lambda x, **o: quantized.gelu(x, "tanh", **o), lambda x: functional.gelu(x, approximate="tanh"), 1, 0,
    ),
    "swiglu": (quantized.swiglu, lambda g, u: functional.silu(g) * u, 2, 0),
    "geglu": (quantized.geglu, lambda g, u: functional.gelu(g) * u, 2, 0),
}  # fmt: skip


def drawn(name: str, dtype: torch.dtype, shape: tuple[int, ...] = (6, COLUMNS)) -> list[Tensor]:
    _, _, rows, vectors = FUNCTIONS[name]
    return [
        *(torch.randn(shape, dtype=torch.float64).mul(3).to(dtype) for _ in range(rows)),
        *(torch.randn(shape[-1], dtype=torch.float64).to(dtype) for _ in range(vectors)),
    ]


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scales", ["row", "block", "given"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_scales(name: str, scales: str, target: torch.dtype) -> None:
    own, other, rows, _ = FUNCTIONS[name]
    for dtype in (torch.bfloat16, torch.float32) if scales == "row" else (torch.bfloat16,):
        tensors = drawn(name, dtype)
        asked = torch.tensor([0.013]) if scales == "given" else scales
        found = own(*tensors, scales=asked, dtype=target)
        made, total = (found, None) if isinstance(found, Quantized) else found
        check(made, other(*[t.double() for t in tensors]), target, asked)
        assert (total is not None) == (rows == 2 and "norm" in name)
        if total is not None:
            assert_near(total, tensors[0].double() + tensors[1].double(), n=1, rows=None)


@pytest.mark.parametrize("scales", ["row", "block"])
def test_compiled_by_torch_s_own_ops(scales: str) -> None:
    for name in ("add_rms_norm", "layer_norm", "swiglu", "quantize"):
        own, other, *_ = FUNCTIONS[name]
        tensors = drawn(name, torch.bfloat16)

        def run(*given: Tensor, own: Function = own) -> Quantized:
            made = own(*given, scales=scales)
            return made if isinstance(made, Quantized) else made[0]

        found = torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors)
        check(found, other(*[t.double() for t in tensors]), torch.float8_e4m3fn, scales)
        assert found.scales.stride() == run(*tensors).scales.stride()


class Quantizing(torch.nn.Module):
    """One of the functions, as a module that torch exports."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *tensors: Tensor) -> Quantized:
        made = FUNCTIONS[self.name][0](*tensors, scales="row")
        return made if isinstance(made, Quantized) else made[0]


def dynamic(module: torch.nn.Module, tensors: list[Tensor], rows: int) -> Quantized:
    """With more rows first, for which the graph is compiled."""
    torch._dynamo.reset()
    call = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    call(*[torch.cat([t, t, t]) if k < rows else t for k, t in enumerate(tensors)])
    with torch._dynamo.config.patch(error_on_recompile=True):
        return call(*tensors)


def autocast(module: torch.nn.Module, tensors: list[Tensor], rows: int) -> Quantized:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(*tensors)


def exported(module: torch.nn.Module, tensors: list[Tensor], rows: int) -> Quantized:
    program = torch.export.export(module, tuple(tensors))
    assert not [n for n in program.graph.nodes if "shardfuse" in str(n.target)], "torch's own ops"
    return program.module()(*tensors)


def checkpointed(module: torch.nn.Module, tensors: list[Tensor], rows: int) -> Quantized:
    return checkpoint(module, *tensors, use_reentrant=False)


@pytest.mark.parametrize("name", ["rms_norm", "add_layer_norm", "geglu"])
@pytest.mark.parametrize("way", [dynamic, autocast, exported, checkpointed])
def test_under_what_torch_offers(way: Callable[..., Quantized], name: str) -> None:
    """Of what needs no gradient; float32 inputs stay float32 under autocast."""
    _, other, rows, _ = FUNCTIONS[name]
    tensors = drawn(name, torch.float32)
    check(way(Quantizing(name), tensors, rows), other(*[t.double() for t in tensors]), torch.float8_e4m3fn, "row")


def test_scales_of_blocks_lie_as_matmuls_read_them() -> None:
    found = quantized.quantize(torch.randn(6, COLUMNS), scales="block")
    assert found.scales.shape == (6, 3)
    assert found.scales.stride() == (1, 6)


@pytest.mark.parametrize("shape", [(COLUMNS,), (2, 3, COLUMNS), (0, COLUMNS)])
@pytest.mark.parametrize("scales", ["row", "block"])
def test_other_ranks(shape: tuple[int, ...], scales: str) -> None:
    x = torch.randn(shape)
    found = quantized.quantize(x, scales=scales)
    assert found.values.shape == x.shape
    assert found.scales.shape == (*shape[:-1], 1 if scales == "row" else 3)
    if x.numel():
        check(found, x.double(), torch.float8_e4m3fn, scales)


@pytest.mark.parametrize("scales", ["row", "given"])
def test_one_column(scales: str) -> None:
    x = torch.randn(5, 1)
    asked = torch.tensor(0.013) if scales == "given" else scales
    check(quantized.quantize(x, scales=asked), x.double(), torch.float8_e4m3fn, asked)
    found = quantized.rms_norm(x, (1,), torch.ones(1), 1e-6, scales=asked)
    check(found, functional.rms_norm(x.double(), (1,), None, 1e-6), torch.float8_e4m3fn, asked)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_given_scale_comes_back(shape: tuple[int, ...]) -> None:
    scale, x = torch.full(shape, 0.02), torch.randn(4, 8)
    for call in (quantized.quantize, torch.compile(quantized.quantize, backend="aot_eager")):
        found = call(x, scales=scale)
        assert torch.equal(found.scales, scale)
        check(found, x.double(), torch.float8_e4m3fn, scale)


def test_memory_in_any_order() -> None:
    x, weight = torch.randn(COLUMNS, 6).t(), torch.randn(2 * COLUMNS)[::2]
    expected = functional.rms_norm(x.double(), (COLUMNS,), weight.double(), 1e-6)
    check(quantized.rms_norm(x, (COLUMNS,), weight, 1e-6), expected, torch.float8_e4m3fn, "row")
    spread = torch.randn(6, 1).expand(6, COLUMNS)
    check(quantized.quantize(spread), spread.double(), torch.float8_e4m3fn, "row")


def test_float64_is_computed_in_float64() -> None:
    """Of one axis too, compiled or not."""
    x = torch.randn(COLUMNS, dtype=torch.float64) * 1e-3
    for call in (quantized.quantize, torch.compile(quantized.quantize, backend="aot_eager")):
        check(call(x), x, torch.float8_e4m3fn, "row")


def test_eps_that_is_left_out_is_torch_s() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = (torch.randn(6, COLUMNS, dtype=torch.float64) * 1e-3).to(dtype)
        own = plain_rms_norm(x, (COLUMNS,))
        eager = functional.rms_norm(x, (COLUMNS,))
        assert_near(own, eager.double(), eager, n=2)
        values, scales = quantized.rms_norm(x, (COLUMNS,))
        apart = (values.double() * scales - eager.double()).abs() / eager.double().abs().amax(-1, keepdim=True)
        assert apart.max() < 1 / 16, "half a step of float8 below the largest of a row"


def test_transforms_are_torch_s() -> None:
    x = torch.randn(3, 4, COLUMNS)
    values, scales = torch.func.vmap(quantized.quantize)(x)
    check(Quantized(values, scales), x.double(), torch.float8_e4m3fn, "row")
    on_meta = quantized.quantize(x.to("meta"))
    assert on_meta.values.shape == x.shape


def test_halves_of_one_tensor() -> None:
    both = torch.randn(6, 2 * COLUMNS)
    gate, up = both.chunk(2, -1)
    check(quantized.swiglu(both), functional.silu(gate.double()) * up.double(), torch.float8_e4m3fn, "row")


def test_special_values() -> None:
    """Zeros stay zeros; a NaN or an infinity is in its own row alone."""
    x = torch.randn(4, COLUMNS)
    x[0], x[1, 5], x[2, 7] = 0, torch.nan, torch.inf
    values, scales = quantized.quantize(x)
    assert (values[0].float() == 0).all()
    assert scales[0] == torch.tensor(1e-12) / 448
    assert values[1].float().isnan().all()
    assert values[2].float()[7].isnan()
    assert (values[2].float()[[0, 8]] == 0).all()
    check(Quantized(values[3], scales[3]), x[3].double(), torch.float8_e4m3fn, "row")


@pytest.mark.parametrize("scales", ["row", "given"])
def test_one_kernel(scales: str) -> None:
    types = (torch.bfloat16, torch.bfloat16, torch.bfloat16, None)
    spec = Quantization("rms_norm", 4096, types, 2, 1e-6, scales, torch.float8_e4m3fn)
    fd = quantizing_fusion(spec)
    given = [torch.ones(1)] if scales == "given" else []
    fd.execute([torch.randn(8, 4096).bfloat16(), torch.randn(8, 4096).bfloat16(), torch.randn(4096).bfloat16(), *given])
    assert "1 kernels" in str(fd.explain())


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (
            lambda x: quantized.quantize(x[:, :100], scales="block"),
            ModuleInputError,
            'of 128: pad them, or pass scales="row"$',
        ),
        (lambda x: quantized.quantize(x, scales="column"), ModuleArgumentError, "scales="),
        (lambda x: quantized.quantize(x, scales=torch.ones(2)), ModuleInputError, "scales"),
        (lambda x: quantized.quantize(x, dtype=torch.int8), ModuleArgumentError, "dtype="),
        (lambda x: quantized.quantize(x.int()), ModuleInputError, "int32"),
        (lambda x: quantized.quantize(x.requires_grad_()), ModuleInputError, r"no_grad\(\), or detach\(\) it$"),
        (lambda x: quantized.swiglu(x, x[:2]), ModuleInputError, "up has shape"),
        (lambda x: quantized.rms_norm(x.int(), (COLUMNS,)), ModuleInputError, "int32"),
        (lambda x: quantized.rms_norm(x, (COLUMNS,), x[0].requires_grad_()), ModuleInputError, "weight"),
        (
            lambda x: quantized.swiglu(x[:, :101]),
            ModuleInputError,
            "even number: it holds gate and up; or pass up too$",
        ),
        (lambda x: quantized.rms_norm(x, (6, COLUMNS)), ModuleInputError, "last one"),
        (lambda x: quantized.rms_norm(x, (COLUMNS,), x[0, :3]), ModuleInputError, "weight"),
        (lambda x: quantized.gelu(x, "sigmoid"), ModuleArgumentError, "approximate="),
    ],
)
def test_refused(call: Callable[[Tensor], object], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        call(torch.randn(6, COLUMNS))


def test_the_check_sees_wrong_values() -> None:
    """0.94 of each value, a scale of another row, a value one step off."""
    x = torch.randn(6, COLUMNS)
    values, scales = quantized.quantize(x)
    one = values.float()
    one[2, 9] += step(one[2, 9].double(), torch.float8_e4m3fn).float()
    for wrong in (
        Quantized((values.float() * 0.94).to(values.dtype), scales),
        Quantized(values, scales.roll(1, 0)),
        Quantized(one.to(values.dtype), scales),
    ):
        with pytest.raises(AssertionError):
            check(wrong, x.double(), torch.float8_e4m3fn, "row")
