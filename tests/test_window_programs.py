"""Slices, pads, flips and cats behind one another, with norms and sums between, against torch in float64.

By torch's operations on a CPU: what is tried is the rewriting into windows (``passes/windows.py``), not a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from shardfuse import DataType, FusionDefinition
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops

Tensor = torch.Tensor


@dataclass(frozen=True)
class Step:
    """The same in a definition and in torch."""

    name: str
    define: Callable[[Ops, TensorView], TensorView]
    reference: Callable[[Tensor], Tensor]

    def __repr__(self) -> str:
        return self.name


def centred(dim: int) -> Step:
    return Step(
        f"centred({dim})",
        lambda o, x: o.sub(x, o.mean(x, [dim], keepdim=True)),
        lambda x: x - x.mean(dim, keepdim=True),
    )


def softmax(dim: int) -> Step:
    def define(o: Ops, x: TensorView) -> TensorView:
        weights = o.exp(o.sub(x, o.max(x, [dim], keepdim=True)))
        return o.div(weights, o.sum(weights, [dim], keepdim=True))

    return Step(f"softmax({dim})", define, lambda x: x.softmax(dim))


def padded(widths: list[int], value: float = 0.0) -> Step:
    return Step(
        f"padded({widths}, {value})",
        lambda o, x: o.pad(x, widths, value),
        lambda x: functional.pad(x, widths, value=value),
    )


def cut(dim: int, start: int, stop: int, step: int = 1) -> Step:
    """``stop``: so many from the end."""

    def define(o: Ops, x: TensorView) -> TensorView:
        starts, stops, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
        starts[dim], stops[dim], steps[dim] = start, x.shape[dim] - stop, step
        return o.slice(x, starts, stops, steps)

    def reference(x: Tensor) -> Tensor:
        where = [slice(None)] * x.ndim
        where[dim] = slice(start, x.shape[dim] - stop, step)
        return x[tuple(where)]

    return Step(f"cut({dim}, {start}, {stop}, {step})", define, reference)


def flipped(dim: int) -> Step:
    return Step(f"flipped({dim})", lambda o, x: o.flip(x, [dim]), lambda x: x.flip(dim))


def doubled(dim: int) -> Step:
    return Step(
        f"doubled({dim})",
        lambda o, x: o.cat([x, o.mul(x, 3.0)], dim),
        lambda x: torch.cat([x, x * 3], dim),
    )


SHIFTED = Step("shifted", lambda o, x: o.add(x, 1.0), lambda x: x + 1)


def check(steps: list[Step], shape: tuple[int, int] = (4, 5)) -> None:
    """Of each step: result and column sums, so that kernels read what is cut both ways."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with FusionDefinition() as fd:
        made = fd.define_tensor(list(shape), dtype=DataType.Double)
        for step in steps:
            made = step.define(fd.ops, made)
        fd.add_output(fd.ops.mul(made, 2.0))
        fd.add_output(fd.ops.sum(made, [0]))
    right = x
    for step in steps:
        right = step.reference(right)
    for found, expected in zip(fd.execute([x]), (right * 2, right.sum(0)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


LATER = (
    cut(0, 1, 0), cut(1, 1, 0), padded([0, 0, -1, 0]), padded([0, 0, 1, 0], 7.0), padded([1, 1], 2.0), flipped(0),
    flipped(1), doubled(0), doubled(1), SHIFTED, centred(0),
)  # fmt: skip


PADS = padded([2, 0]), padded([0, 3], 5.0), padded([0, 0, 2, 0]), padded([1, 1, 1, 1])


@pytest.mark.parametrize("later", LATER, ids=str)
@pytest.mark.parametrize("before", [centred(1), centred(0), softmax(1), SHIFTED], ids=str)
@pytest.mark.parametrize(
    "pad", [padded([2, 0]), padded([0, 3], 5.0), padded([0, 0, 2, 0]), padded([1, 1, 1, 1])], ids=str
)
def test_what_follows_a_pad_keeps_it(before: Step, pad: Step, later: Step) -> None:
    """What is made of a reduction along the padded axis is stored: its padding is no part of it."""
    check([before, pad, later])
    check([before, pad, SHIFTED, later])


STEPS = st.one_of(
    st.builds(centred, st.integers(0, 1)),
    st.builds(softmax, st.integers(0, 1)),
    st.builds(
        padded,
        st.lists(st.integers(-1, 3), min_size=1, max_size=2).map(lambda w: [*w, *w][:4]),
        st.sampled_from([0.0, 1.5]),
    ),
    st.builds(cut, st.integers(0, 1), st.integers(0, 1), st.integers(0, 1), st.integers(1, 2)),
    st.builds(flipped, st.integers(0, 1)),
    st.builds(doubled, st.integers(0, 1)),
    st.just(SHIFTED),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, min_size=2, max_size=5))
def test_any_program(steps: list[Step]) -> None:
    x = torch.zeros(9, 11)
    for k, step in enumerate(steps):
        x = step.reference(x)
        if min(x.shape) < 3 or max(x.shape) > 64:
            steps = steps[:k]
            break
    check(steps, (9, 11))
