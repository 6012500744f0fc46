"""``invariant="batch"`` on a GPU: a row has the same bits among 1 and among 8192 rows, wherever it is."""

from __future__ import annotations

import pytest
import torch
from functional_promises import CALLS, listed, with_gradient
from promise_cases import CASES, assert_rows_alike, bits, define, inputs

import shardfuse.compile  # noqa: F401 registers the backend
from shardfuse import DataType, nn
from shardfuse.nn import functional
from shardfuse.segments.space import Space

pytestmark = pytest.mark.gpu

COUNTS = (1, 2, 3, 5, 8, 17, 64, 127, 133, 500, 1000, 4096, 8191)
ROWS = 8192
ELEMENTS = 1 << 26
LENGTHS = (96, 777, 1000, 1024, 4096, 5139, 8192, 16384, 32768, 50257, 65536, 131072)
DTYPES = (DataType.Float, DataType.BFloat16, DataType.Half)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_rows_have_the_bits_that_they_have_alone(name: str, n: int, dtype: DataType) -> None:
    fd = define(name, n, dtype)
    rows = min(ROWS, ELEMENTS // n)
    assert_rows_alike(fd, inputs(fd, rows, n, "cuda"), COUNTS)


def test_a_schedule_that_counts_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "is_invariant", False)
    fd = define("layer_norm", 4096, DataType.Float)
    with pytest.raises(AssertionError, match="bytes differ"):
        assert_rows_alike(fd, inputs(fd, ROWS, 4096, "cuda"), COUNTS)


def in_parts(module: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, rows: slice) -> tuple[torch.Tensor, ...]:
    """The results of some rows, and the gradient of them."""
    own = x[rows].clone().requires_grad_()
    y = module(own)
    y.backward(dy[rows])
    assert own.grad is not None
    return y.detach(), own.grad


@pytest.mark.parametrize("n", [1000, 4096])
def test_modules_and_their_gradients(n: int) -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    x, dy = (torch.randn(4096, n, device="cuda", generator=generator).bfloat16() for _ in range(2))
    for module in (nn.RMSNorm(n), nn.LayerNorm(n), nn.Softmax(-1)):
        nn.promise(module.to(device="cuda", dtype=torch.bfloat16), invariant="batch")
        whole = in_parts(module, x, dy, slice(None))
        for rows in (slice(0, 1), slice(7, 9), slice(100, 227), slice(1000, 3000)):
            for found, wanted in zip(in_parts(module, x, dy, rows), whole, strict=True):
                assert torch.equal(found.view(torch.int16), wanted[rows].view(torch.int16)), (module, rows)


@pytest.mark.parametrize("name", ["rms_norm", "add_layer_norm", "softmax", "cross_entropy"])
def test_functions(name: str) -> None:
    """A row of a call that promises has the same bits in any batch."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2048, 32, generator=generator).cuda()
    with torch.device("cuda"):
        whole = listed(CALLS[name](x, invariant="batch"))
        for count in (1, 7, 300):
            for found, wanted in zip(listed(CALLS[name](x[:count], invariant="batch")), whole, strict=True):
                assert torch.equal(bits(found), bits(wanted[:count]))


@pytest.mark.parametrize("backend", ["inductor", "shardfuse"])
def test_compiled_functions(backend: str) -> None:
    """One graph for any batch, forward and backward, in which each call promises."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        normed, total = functional.add_rms_norm(x, 2 * x, (1000,), weight, invariant="batch")
        weights = functional.softmax(normed + 1, scale=0.5, invariant="batch")
        return functional.layer_norm(weights * total, (1000,), weight, invariant="batch")

    torch._dynamo.reset()
    weight = torch.linspace(0.5, 1.5, 1000, device="cuda")
    x = torch.randn(3000, 1000, generator=torch.Generator().manual_seed(4)).cuda()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    whole = with_gradient(compiled, x)
    for rows in (slice(0, 1), slice(7, 9), slice(100, 227), slice(1000, 3000)):
        for found, wanted in zip(with_gradient(compiled, x[rows].clone()), whole, strict=True):
            assert torch.equal(bits(found), bits(wanted[rows]))
