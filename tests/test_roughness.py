"""Which kernels take exponentials and quotients that are right to 1e-6, or contract, and that ranks decide it alike."""

from __future__ import annotations

import pytest
import torch
from test_promised_shapes import on_ranks

from benchmarks.sm90 import sources_of
from shardfuse import DataType, FusionDefinition
from shardfuse.frontend.exchanges import collectives
from shardfuse.frontend.promise_arguments import Invariant
from shardfuse.in_kernel import with_exchanges
from shardfuse.ir.op import Pointwise, is_pointwise
from shardfuse.ir.tensor_view import TensorView
from shardfuse.segments.rounding import may_be_rough

ROUGH, EXACT = "power_of_two(T", "libdevice.exp("


def softmax(fd: FusionDefinition, x: TensorView, dtype: DataType) -> None:
    wide = fd.ops.cast(x, dtype=DataType.Float)
    e = fd.ops.exp(fd.ops.sub(wide, fd.ops.max(wide, [1], keepdim=True)))
    fd.add_output(fd.ops.cast(fd.ops.div(e, fd.ops.sum(e, [1], keepdim=True)), dtype=dtype))


def log_sum(fd: FusionDefinition, x: TensorView, dtype: DataType) -> None:
    wide = fd.ops.cast(x, dtype=DataType.Float)
    top = fd.ops.max(wide, [1], keepdim=True)
    total = fd.ops.sum(fd.ops.exp(fd.ops.sub(wide, top)), [1], keepdim=True)
    fd.add_output(fd.ops.cast(fd.ops.sub(fd.ops.sub(wide, top), fd.ops.log(total)), dtype=dtype))


def other_centre(fd: FusionDefinition, x: TensorView, dtype: DataType) -> None:
    """Exponentials that are no statistic: they may be large, and what is summed is no softmax."""
    wide = fd.ops.cast(x, dtype=DataType.Float)
    e = fd.ops.exp(fd.ops.sub(wide, fd.ops.min(wide, [1], keepdim=True)))
    fd.add_output(fd.ops.cast(fd.ops.sum(e, [1]), dtype=dtype))


BUILDS = {"softmax": softmax, "log_sum": log_sum, "other_centre": other_centre}


def text_of(name: str, dtype: DataType, invariant: Invariant | None, n: int = 1000) -> str:
    with FusionDefinition(invariant=invariant) as fd:
        x = fd.define_tensor([-1, n], contiguity=True, dtype=DataType.BFloat16)
        BUILDS[name](fd, x, dtype)
    (x,) = fd.fec.tensors()
    sample = torch.empty((600, n), dtype=torch.bfloat16, device="meta")
    return "".join(s.text for s in sources_of(fd.fec.plan({x: (600, n)}), [sample]))


@pytest.mark.parametrize("invariant", [None, "ranks"])
@pytest.mark.parametrize(
    ("name", "dtype", "is_rough", "is_exact"),
    [
        ("softmax", DataType.BFloat16, True, False),
        ("softmax", DataType.Float, False, True),  # the result is the exponential, divided
        ("log_sum", DataType.BFloat16, True, False),
        ("log_sum", DataType.Float, True, False),  # of a sum, as softmaxes' statistics are everywhere
        ("other_centre", DataType.Float, False, True),
        ("other_centre", DataType.BFloat16, False, True),
    ],
)
def test_exponentials_are_rough_where_no_result_shows_it(
    name: str, dtype: DataType, is_rough: bool, is_exact: bool, invariant: Invariant | None
) -> None:
    text = text_of(name, dtype, invariant)
    assert (ROUGH in text, EXACT in text) == (is_rough, is_exact), text


@pytest.mark.parametrize("dtype", [DataType.BFloat16, DataType.Float])
@pytest.mark.parametrize("name", BUILDS)
def test_ranks_decide_it_alike(name: str, dtype: DataType) -> None:
    """Of the same ops, whichever kernels they are in, with a collective between them or an exchange inside of one."""
    n, found = 4096, set[frozenset[str]]()
    for ranks in (1, 2, 4):
        fd = on_ranks(lambda fd, x: BUILDS[name](fd, x, dtype), n, ranks, 1)
        (x,) = fd.fec.tensors()
        plan = fd.fec.plan({x: (512, n)})
        for made in (plan, *([with_exchanges(plan)] if collectives(plan) else [])):
            kernels = [k.segment for s in made.segments for k in s.kernels]
            ops = [(s, e) for s in kernels for e in s.exprs if is_pointwise(e.op, "exp", "div")]
            found.add(frozenset(f"{e.op.name} {may_be_rough(s, e)}" for s, e in ops))
    is_rough = name == "log_sum" or (name, dtype) == ("softmax", DataType.BFloat16)
    wanted = {"exp", "div"} if name == "softmax" else {"exp"}
    assert found == {frozenset(f"{op} {is_rough}" for op in wanted)}


def test_a_promised_exponential_is_as_dear_as_any() -> None:
    """So that a row of 16 bits is not held as bits, of which each phase would compute it anew."""
    with FusionDefinition(invariant="ranks") as fd:
        x, y = (fd.define_tensor([-1, 8192], contiguity=True, dtype=DataType.BFloat16) for _ in range(2))
        e = fd.ops.mul(fd.ops.exp(fd.ops.cast(x, dtype=DataType.Float)), fd.ops.cast(y, dtype=DataType.Float))
        fd.add_output(fd.ops.cast(fd.ops.mul(e, fd.ops.max(e, [1], keepdim=True)), dtype=DataType.BFloat16))
    (kernel,) = [k for s in fd.fec.plan(dict.fromkeys(fd.fec.tensors(), (4096, 8192))).segments for k in s.kernels]
    assert [e.op for e in kernel.segment.exprs if is_pointwise(e.op, "exp")] == [Pointwise("exp", is_rough=True)]
    assert not kernel.schedule.is_packed, kernel.schedule


@pytest.mark.parametrize("shape", [(), (5,)], ids=["a number", "a vector"])
def test_a_kernel_of_numbers_contracts_no_product_with_a_sum(shape: tuple[int, ...]) -> None:
    """Numbers have no axis that says whether they are promised; on one rank they are made in a kernel of rows."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([*shape], dtype=DataType.Float)
        fd.add_output(fd.ops.add(fd.ops.mul(x, 0.3), 1.7))
    (source,) = sources_of(fd.fec.plan({x: shape}), [torch.empty(shape, device="meta")])
    assert source.contracts == bool(shape)
