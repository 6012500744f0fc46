"""Outputs in the memory of inputs that nobody reads again, under Triton's interpreter: values, and whose memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from compile_graphs import assert_near
from interpreted import values
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import shardfuse.compile  # noqa: F401 registers the backend
from shardfuse import DataType, FusionDefinition
from shardfuse.compile.region_call import RegionCall
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops

F = torch.nn.functional
Define = Callable[[FusionDefinition, list[TensorView]], list[TensorView]]


def fused(shapes: Sequence[Sequence[int]], define: Define, given_up: Sequence[int], dtype: DataType = DataType.Float):
    with FusionDefinition(backend="triton") as fd:
        inputs = [fd.define_tensor(list(shape), dtype=dtype) for shape in shapes]
        for out in define(fd, inputs):
            fd.add_output(out)
    fd.fusion.given_up = tuple(inputs[k] for k in given_up)
    return fd


def softmax(o: Ops, x: TensorView, dim: int) -> TensorView:
    weights = o.exp(o.sub(x, o.max(x, [dim], keepdim=True)))
    return o.div(weights, o.sum(weights, [dim], keepdim=True))


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def check(fd: FusionDefinition, inputs: list[torch.Tensor], right: list[torch.Tensor], over: list[int | None]) -> None:
    """Twice: as it is bound, and as it then runs.  ``over``: of each output the input whose memory it has."""
    for _ in range(2):
        given = [torch.empty_strided(t.shape, t.stride()).copy_(t) for t in inputs]
        found = fd.execute(given)
        for out, expected, k in zip(found, right, over, strict=True):
            torch.testing.assert_close(out, expected)
            assert [same_memory(out, t) for t in given] == [k == n for n in range(len(given))]
        taken = {k for k in over if k is not None}
        for n, (t, before) in enumerate(zip(given, inputs, strict=True)):
            assert n in taken or torch.equal(t, before), "an input that no output has is as it was"


@pytest.mark.parametrize("shape", [(6, 40), (3, 3000), (2, 100)])
def test_rows_are_written_over_the_input(shape: tuple[int, int]) -> None:
    x = values(*shape)
    fd = fused([(-1, shape[1])], lambda fd, v: [softmax(fd.ops, v[0], 1)], [0])
    check(fd, [x], [x.softmax(1)], [0])


def test_only_what_is_given_up_is_written_over() -> None:
    x, y = values(6, 40), values(6, 40, seed=1)

    def define(fd: FusionDefinition, v: list[TensorView]) -> list[TensorView]:
        total = fd.ops.add(v[0], v[1])
        return [total, softmax(fd.ops, total, 1)]

    right = [x + y, (x + y).softmax(1)]
    for given_up, over in (([], [None, None]), ([1], [1, None]), ([0, 1], [0, 1])):
        check(fused([(-1, 40)] * 2, define, given_up), [x, y], right, over)


def test_another_shape_of_the_same_elements() -> None:
    x = values(6, 400)
    fd = fused([(6, 400)], lambda fd, v: [softmax(fd.ops, fd.ops.reshape(v[0], [2, 3, 400]), 2)], [0])
    check(fd, [x], [x.softmax(1).view(2, 3, 400)], [0])


def test_columns_are_added_up_beside() -> None:
    x, dy = values(300, 40), values(300, 40, seed=1)

    def define(fd: FusionDefinition, v: list[TensorView]) -> list[TensorView]:
        made = fd.ops.mul(v[0], v[1])
        return [made, fd.ops.sum(made, [0])]

    fd = fused([(300, 40)] * 2, define, [1])
    check(fd, [x, dy], [x * dy, (x * dy).sum(0)], [1, None])


@pytest.mark.parametrize("columns", [40, 3000])
def test_an_output_takes_the_memory_of_what_it_is_made_of(columns: int) -> None:
    """Of other inputs of its kernel, another thread might load an element after it is stored."""
    x, y = values(6, columns), values(6, columns, seed=1)

    def define(fd: FusionDefinition, v: list[TensorView]) -> list[TensorView]:
        weights = softmax(fd.ops, v[0], 1)
        return [fd.ops.neg(weights), fd.ops.mul(weights, v[1])]

    fd = fused([(-1, columns)] * 2, define, [1])
    check(fd, [x, y], [-x.softmax(1), x.softmax(1) * y], [None, 1])


OTHER_PLACES: dict[str, tuple[Define, Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (lambda fd, v: [fd.ops.set(fd.ops.permute(fd.ops.neg(v[0]), [1, 0]))], lambda x: -x.t()),
    "flipped": (lambda fd, v: [fd.ops.add(fd.ops.flip(v[0], [1]), 1.0)], lambda x: x.flip(1) + 1),
    "beside its neighbour": (
        lambda fd, v: [fd.ops.add(v[0], fd.ops.flip(v[0], [0]))],
        lambda x: x + x.flip(0),
    ),
    "its own transpose": (lambda fd, v: [fd.ops.add(v[0], fd.ops.permute(v[0], [1, 0]))], lambda x: x + x.t()),
    "narrower": (lambda fd, v: [fd.ops.cast(v[0], dtype=DataType.BFloat16)], lambda x: x.bfloat16()),
    "the norm of columns": (lambda fd, v: [softmax(fd.ops, v[0], 0)], lambda x: x.softmax(0)),
}


@pytest.mark.parametrize("name", OTHER_PLACES)
def test_what_is_read_elsewhere_stays(name: str) -> None:
    define, right = OTHER_PLACES[name]
    x = values(64, 64)
    given = x.clone()
    fd = fused([(64, 64)], define, [0])
    (found,) = fd.execute([given])
    torch.testing.assert_close(found, right(x))
    if name != "the norm of columns":
        assert not same_memory(found, given)
        assert torch.equal(given, x)


def test_gaps_are_nobodys() -> None:
    x = values(6, 48)[:, :40]
    fd = fused([(6, 40)], lambda fd, v: [softmax(fd.ops, v[0], 1)], [0])
    check(fd, [x], [x.softmax(1)], [None])


def padded(fd: FusionDefinition, x: TensorView, behind: int) -> TensorView:
    """Zeros behind the ends of rows, and what stands before them negated."""
    return fd.ops.pad(fd.ops.neg(x), [0, behind, 0, 0])


def test_rows_with_gaps_are_written_over_with_their_padding() -> None:
    """As the gradient of logits that Inductor pads for a matrix product."""
    x = values(6, 48)[:, :40]
    for behind, over in ((8, 0), (16, None), (4, None)):
        fd = fused([(6, 40)], lambda fd, v: [padded(fd, v[0], behind)], [0])  # noqa: B023 - called at once
        given = torch.full((6, 48), torch.nan)
        given[:, :40] = x
        right = F.pad(-x, (0, behind))
        for _ in range(2):
            (found,) = fd.execute([(copy := given.clone())[:, :40]])
            assert torch.equal(found, right)
            assert same_memory(found, copy) == (over == 0)


def test_long_rows_with_gaps_and_the_sums_of_their_columns() -> None:
    """Blocks at the end of a row have a branch of their own."""
    x = values(40, 1048)[:, :1042]

    def define(fd: FusionDefinition, v: list[TensorView]) -> list[TensorView]:
        made = fd.ops.pad(fd.ops.neg(v[0]), [0, 6, 0, 0])
        return [made, fd.ops.sum(made, [0])]

    given = torch.full((40, 1048), torch.nan)
    given[:, :1042] = x
    found, total = fused([(40, 1042)], define, [0]).execute([given[:, :1042]])
    assert torch.equal(found, F.pad(-x, (0, 6)))
    torch.testing.assert_close(total, F.pad(-x.sum(0), (0, 6)))
    assert same_memory(found, given)


@pytest.mark.parametrize("name", ["before", "of columns", "rows cut short", "beside what stands there"])
def test_padding_that_moves_elements_takes_no_memory(name: str) -> None:
    x = values(6, 48)[:, :40]
    defines: dict[str, tuple[Define, torch.Tensor]] = {
        "before": (lambda fd, v: [fd.ops.pad(fd.ops.neg(v[0]), [8, 0, 0, 0])], F.pad(-x, (8, 0))),
        "of columns": (lambda fd, v: [fd.ops.pad(fd.ops.neg(v[0]), [0, 8, 0, 1])], F.pad(-x, (0, 8, 0, 1))),
        "rows cut short": (lambda fd, v: [padded(fd, fd.ops.slice(v[0], [1, 0], [6, 40]), 8)], F.pad(-x[1:], (0, 8))),
        "beside what stands there": (
            lambda fd, v: [fd.ops.add(padded(fd, v[0], 8), fd.ops.pad(fd.ops.flip(v[0], [0]), [0, 8, 0, 0]))],
            F.pad(x.flip(0) - x, (0, 8)),
        ),
    }
    define, right = defines[name]
    given = torch.full((6, 48), torch.nan)
    given[:, :40] = x
    before = given.clone()
    (found,) = fused([(6, 40)], define, [0]).execute([given[:, :40]])
    torch.testing.assert_close(found, right)
    assert not same_memory(found, given)
    torch.testing.assert_close(given, before, equal_nan=True)


def test_a_second_kernel_still_reads_it() -> None:
    x = values(64, 64)

    def define(fd: FusionDefinition, v: list[TensorView]) -> list[TensorView]:
        return [softmax(fd.ops, v[0], 1), softmax(fd.ops, v[0], 0)]

    given = x.clone()
    first, second = fused([(64, 64)], define, [0]).execute([given])
    torch.testing.assert_close(first, x.softmax(1))
    torch.testing.assert_close(second, x.softmax(0))
    assert not (same_memory(first, given) and same_memory(second, given))


# --- in graphs of Inductor ---------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor]]]]:
    """Each run of a region: what it was given and what it gave."""
    found: list[Any] = []
    checked = RegionCall._checked

    def seen(self: RegionCall, arguments: Any) -> Any:
        outputs, run = checked(self, arguments)
        found.append((arguments, outputs))
        return outputs, run

    monkeypatch.setattr(RegionCall, "_checked", seen)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield found


def taken(calls: list[Any]) -> list[tuple[int, int]]:
    """Of all runs, which output has which input's memory."""
    return [
        (k, n)
        for arguments, outputs in calls
        for k, out in enumerate(outputs)
        for n, t in enumerate(arguments)
        if isinstance(t, torch.Tensor) and same_memory(out, t)
    ]


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(f, backend="shardfuse", options={"shardfuse.take": "all"}, **options)


def test_a_gradient_is_written_over_the_logits(calls: list[Any]) -> None:
    x, w = values(24, 16).requires_grad_(), values(500, 16, seed=1).requires_grad_()
    target = torch.arange(24)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ w.t(), target)

    run = compiled(loss)
    for _ in range(2):
        found = torch.autograd.grad(run(x, w), [x, w])
        for got, eager, wide in zip(
            found,
            torch.autograd.grad(loss(x, w), [x, w]),
            torch.autograd.grad(loss(x.double(), w.double()), [x, w]),
            strict=True,
        ):
            assert_near(got, wide, eager, terms=torch.ones(()), signed=False)
    ((k, n),) = taken(calls)
    assert calls[-1][0][n].shape == calls[-1][1][k].shape == (24, 500)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor_lets_go_of_what_was_taken(dynamic: bool, calls: list[Any]) -> None:
    """Before anything else could have its memory."""
    x, w = values(24, 256), values(256, 256, seed=1)
    run = compiled(lambda x, w: ((x @ w).softmax(-1) @ w).softmax(-1), dynamic=dynamic)
    found, (code,) = run_and_get_code(run, x, w)
    for _ in range(2):
        torch.testing.assert_close(found, ((x @ w).softmax(-1) @ w).softmax(-1))
        found = run(x, w)
    assert taken(calls) == [(0, 0)], "one object stands for both places"
    lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]
    for at, line in enumerate(lines):
        if " = region_" in line:
            name = line.rstrip(")").rpartition("(")[2].rpartition(", ")[2]
            assert lines[at + 1] == f"del {name}", code
            assert not any(re.search(rf"\b{name}\b", other) for other in lines[at + 2 :])


def test_padding_is_written_over_rows_with_gaps(calls: list[Any]) -> None:
    """Not where the memory ends with the last row's elements."""
    x, w = values(24, 16), values(16, 160, seed=1)
    row, wide = values(1, 16), values(16, 23 * 160 + 152, seed=1)

    def with_sums(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (made := F.pad(y.exp(), (0, 8))), made.sum(0)

    cases: list[tuple[Callable[..., Any], tuple[torch.Tensor, torch.Tensor], bool]] = [
        (lambda x, w: with_sums((x @ w)[:, :152]), (x, w), True),
        (lambda x, w: with_sums((x @ w).as_strided((24, 152), (160, 1))), (row, wide), False),
    ]
    for f, inputs, is_over in cases:
        calls.clear()
        run = compiled(f)
        for _ in range(2):
            torch.testing.assert_close(run(*inputs), f(*inputs))
        assert taken(calls) == [(0, 0)] * is_over


KEPT: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a caller's": lambda x, w: x.softmax(-1) @ w,
    "returned": lambda x, w: (y := x @ w, y.softmax(-1)),
    "returned as a view": lambda x, w: ((y := x @ w).view(-1), y.softmax(-1)),
    "read later": lambda x, w: ((y := x @ w).softmax(-1) @ w, y @ w),
    "given twice": lambda x, w: ((y := x @ w)[:8].softmax(-1) + y[8:16], (y[:8] * y[16:]).sum()),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_somebody_else_reads_is_kept(name: str, calls: list[Any]) -> None:
    f = KEPT[name]
    x, w = values(24, 16), values(16, 16, seed=1)
    before = x.clone(), w.clone()
    found, right = compiled(f)(x, w), f(x, w)
    for got, expected in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, right)), strict=True):
        torch.testing.assert_close(got, expected)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
    assert not taken(calls)
