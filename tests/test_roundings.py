"""The rule of accuracy finds what is wrong: in every checker that tests use, and in bfloat16 as in float32."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from collective_cases import right
from nn_cases import S0, Here, Sample
from random_fusions import random_case
from torch_answers import Expected, assert_beside, assert_like, compare, evaluate, expected_of
from torch_gradients import with_gradients

from benchmarks.roundings import assert_near, mismatch, spacing
from shardfuse import DeviceMesh

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Check = Callable[[torch.Tensor], None]
CPU = torch.device("cpu")


def normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def planted(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Wrong results: a factor, one element of middling size, two rows, nothing at all."""
    one, rows = x.clone(), x.clone()
    flat = one.view(-1)
    flat[flat.double().abs().argsort()[len(flat) // 2]] = 0.0
    rows[[0, 1]] = x[[1, 0]]
    return {"0.7": 0.7 * x, "1.4": 1.4 * x, "a zero": one, "rows": rows, "zeros": torch.zeros_like(x)}


def checks(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, Check]]:
    """Each checker: what is right under it, and a call of it."""
    x = torch.randn(6, 64, dtype=torch.float64).to(dtype)
    out = normed(x)
    sample = Sample(x.double(), x, Here(DeviceMesh([0]), CPU), [S0], x.double())
    gradient = with_gradients(lambda t: (normed(t),), [x], [torch.ones_like(x)])[1]
    parts = torch.randn(4, 6, 64, dtype=torch.float64).to(dtype)
    return {
        "of torch's function": (out, lambda y: assert_like(y, normed, x)),
        "beside eager torch": (out, lambda y: assert_beside(y, out)),
        "of a module": (out, lambda y: sample.expect(y, expected_of(normed, x)[0], "y")),
        "of a gradient": (gradient.eager, lambda y: compare("dx", y, gradient)),
        "of a collective": (parts.double().sum(0).to(dtype), lambda y: right(y, parts, "sum")),
        "by roundings alone": (out, lambda y: assert_near(y, out.double())),
    }


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", checks(torch.float32))
def test_what_is_wrong_is_found(name: str, dtype: torch.dtype) -> None:
    value, check = checks(dtype)[name]
    check(value)
    for wrong in planted(value).values():
        with pytest.raises(AssertionError, match=r"element \["):
            check(wrong)


@pytest.mark.parametrize("dtype", FLOATS)
def test_probabilities_are_held_relatively(dtype: torch.dtype) -> None:
    """Small ones too, and their sums: a softmax of 1024 classes has elements of 1e-3 and less."""
    x = torch.randn(8, 1024, dtype=torch.float64).to(dtype)
    wide, eager = x.double().softmax(-1), x.softmax(-1)
    assert mismatch(eager, wide, eager, relative=True) is None
    for fault, wrong in planted(eager).items():
        assert mismatch(wrong, wide, eager, relative=True) is not None, fault
    least = eager.clone()
    least[3, eager[3].argmin()] *= 0.7
    assert mismatch(least, wide, eager, relative=True) is not None
    if dtype in (torch.float32, torch.float64):  # whose sums in eager torch are off by roundings of their own
        return
    step = spacing(wide, dtype)
    assert "sums" in str(mismatch((eager.double() + step).to(dtype), wide, eager, relative=True))


@pytest.mark.parametrize("seed", range(0, 120, 40))
def test_what_is_wrong_in_fusions_is_found(seed: int) -> None:
    """In every floating output of random fusions, whatever it is made of; one element: the largest."""
    found = 0
    for k in range(seed, seed + 40):
        _, case = random_case(k)
        for want in evaluate(case.fd.fusion, case.inputs):
            if not want.eager.is_floating_point() or not (want.wide.nan_to_num(0, 0, 0) != 0).any():
                continue
            compare("right", want.eager, want)
            one = want.eager.clone(memory_format=torch.contiguous_format)
            one.view(-1)[want.wide.nan_to_num(0, 0, 0).abs().argmax()] = 0
            for wrong in (0.7 * want.eager, 1.4 * want.eager, one, torch.zeros_like(want.eager)):
                found += 1
                with pytest.raises(AssertionError, match="wrong: "):
                    compare("wrong", wrong, want)
    assert found > 100


def test_spacing_is_torchs() -> None:
    for dtype in FLOATS:
        x = torch.tensor([1.0, 1.5, -3.0, 2.0**-10, 6.0], dtype=torch.float64).to(dtype)
        up = torch.nextafter(x.abs(), torch.tensor(float("inf"), dtype=dtype))
        assert torch.equal(spacing(x.double(), dtype), up.double() - x.double().abs())
        assert (
            spacing(torch.zeros((), dtype=torch.float64), dtype)
            == torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_bound_is_as_tight_as_it_says(dtype: torch.dtype) -> None:
    """n roundings of an element pass, and one more does not, be it large or small."""
    wide = torch.tensor([1.0, 1.25, 100.0, 2.0**-8], dtype=torch.float64)
    step = spacing(wide, dtype)
    for n in (1, 2, 3, 4):
        assert mismatch((wide + n * step).to(dtype), wide, n=n) is None
        assert mismatch((wide + (n + 1) * step).to(dtype), wide, n=n) is not None


def test_what_is_equal_or_wrong() -> None:
    """Integers, NaN, infinities, signs of zeros, dtype and shape."""
    x = torch.tensor([1.0, -0.0, float("nan"), float("inf")])
    assert mismatch(x, x.double(), x) is None
    for at, value in ((1, 0.0), (2, 0.0), (2, float("inf")), (3, float("nan")), (3, -float("inf")), (3, 3e38)):
        wrong = x.clone()
        wrong[at] = value
        assert mismatch(wrong, x.double(), x) is not None
        assert mismatch(wrong, x.double()) is not None
    assert "torch.float16" in str(mismatch(x.half(), x.double(), x))
    assert "shape" in str(mismatch(x[None], x.double(), x))
    numbers = torch.tensor([3, 1 << 60])
    assert mismatch(numbers, numbers) is None
    assert mismatch(numbers + 1, numbers) is not None
    assert mismatch(torch.tensor([65504.0]).half(), torch.tensor([7e4], dtype=torch.float64)) is not None


def test_a_sum_near_zero_is_held_by_its_terms() -> None:
    terms = torch.tensor([1.0, -1.0, 2.0**-20])
    sum_, size = terms.double().sum()[None], terms.double().abs().sum()[None]
    off = (sum_ + 2.0**-23).float()
    assert mismatch(off, sum_) is not None
    assert mismatch(off, sum_, terms=size) is None
    assert mismatch((sum_ + 2.0**-20).float(), sum_, terms=size) is not None


def test_what_moves_no_result_is_no_slack() -> None:
    """Of a product of 16-bit tensors, whose operands move by a rounding of float32: 1 in 2**8 is not allowed."""
    x = torch.tensor(random.choices(range(1, 255), k=64), dtype=torch.bfloat16)
    (want,) = expected_of(torch.mul, x, x)
    assert isinstance(want, Expected)
    assert (want.slack() <= 1.01 * spacing(want.wide.amax(), torch.bfloat16)).all()
