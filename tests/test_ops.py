"""Every op against torch in float64 on random shapes, types and values: on one rank, and sharded over two."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_calls import CALLS, call
from op_cases import DETERMINISTIC, DTYPES, OpCase, dtypes_of, pointwise, run_case
from pointwise_references import REFERENCES

from shardfuse import FusionDefinition
from shardfuse.ops.build import Ops
from shardfuse.ops.table import POINTWISE
from shardfuse.ops.torch_calls import TORCH_CALLS

ELSEWHERE = ("size", "shape", "uniform", "normal", "rand_like", "randn_like", "dropout")
"""Numbers of the host (test_ops_shapes.py), and random numbers (test_ops_random.py)."""


def test_every_op_has_a_case() -> None:
    built = [name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")]
    assert {*CALLS, *POINTWISE, *ELSEWHERE} == {*built, *POINTWISE}
    assert set(TORCH_CALLS) <= set(CALLS)


def test_every_pointwise_op_has_a_reference() -> None:
    assert set(REFERENCES) == set(POINTWISE)


@pytest.mark.parametrize("name", POINTWISE)
def test_torch_has_the_types_that_are_said(name: str) -> None:
    """A reference that raises for a type leaves out no case of that type unnoticed."""
    assert dtypes_of(POINTWISE[name]) == [t for t in DTYPES if t in REFERENCES[name].types]


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    @settings(DETERMINISTIC, max_examples=10)
    @given(pointwise(name, roundings=4), st.integers(0, 15))
    def run(case: OpCase, placement: int) -> None:
        run_case(case, "torch", placement)

    run()


@pytest.mark.parametrize("name", CALLS)
def test_others(name: str) -> None:
    @settings(DETERMINISTIC, max_examples=16)
    @given(call(name), st.integers(0, 15))
    def run(case: OpCase, placement: int) -> None:
        run_case(case, "torch", placement)

    run()


@pytest.mark.parametrize("name", CALLS)
def test_the_printed_definition_runs(name: str) -> None:
    @settings(DETERMINISTIC, max_examples=3)
    @given(call(name))
    def run(case: OpCase) -> None:
        fd = case.define("torch")
        space: dict[str, object] = {}
        exec("from shardfuse import FusionDefinition, DataType\n" + repr(fd), space)
        with FusionDefinition(backend="torch") as again:
            space["nvfuser_fusion"](again)  # type: ignore[operator]
        assert repr(again) == repr(fd)
        for a, b in zip(again.execute(case.values), fd.execute(case.values), strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a[~a.isnan()], b[~b.isnan()])
            assert a.stride() == b.stride()

    run()
