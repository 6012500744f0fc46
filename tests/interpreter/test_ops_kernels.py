"""Every op that a kernel can hold, on random shapes, types and values, alone and sharded over two ranks."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from op_calls import CALLS, call
from op_cases import DETERMINISTIC, OpCase, pointwise, run_case

from shardfuse.ops.shape_calls import SHAPE_CALLS
from shardfuse.ops.table import POINTWISE, Rule
from shardfuse.ops.torch_calls import TORCH_CALLS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of overflows that are meant

KERNELS = [name for name, op in POINTWISE.items() if op.triton is not None]


@pytest.mark.parametrize("name", KERNELS)
def test_pointwise(name: str) -> None:
    @settings(DETERMINISTIC, max_examples=6)
    @given(pointwise(name, roundings=4), st.integers(0, 15))  # tanh, gelu and the like are composed of several
    def run(case: OpCase, placement: int) -> None:
        # the interpreter broadcasts the comparison of a scalar in the operands' type, which & does not take
        assume(POINTWISE[name].rule is not Rule.LOGICAL or len({v.shape for v in case.values}) == 1)
        run_case(case, "triton", placement)

    run()


@pytest.mark.parametrize("name", [name for name in CALLS if name not in TORCH_CALLS or name in SHAPE_CALLS])
def test_others(name: str) -> None:
    @settings(DETERMINISTIC, max_examples=6)
    @given(call(name), st.integers(0, 15))
    def run(case: OpCase, placement: int) -> None:
        run_case(case, "triton", placement)

    run()
