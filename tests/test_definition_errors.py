"""What a definition refuses, in one clear sentence; and that it prints as Python that rebuilds it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_definition import CLASHES, Define, unary, values
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import (
    AxisError,
    DefinitionError,
    EmptyFusionError,
    NoPlanError,
    OperandError,
    ScheduleError,
    ShapeError,
    UnknownOpError,
)
from shardfuse.ir.scalar import Scalar
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops

# --- what they refuse --------------------------------------------------------------------------------------


def refusals() -> dict[str, tuple[Callable[[FusionDefinition], Any], type[Exception], str]]:
    x: Callable[[FusionDefinition], Any] = lambda fd: fd.define_tensor([-1, 4])  # noqa: E731
    return {
        "an op that is none": (lambda fd: fd.ops.ad(x(fd), 1), UnknownOpError, "no op 'ad': did you mean"),
        "too few operands": (lambda fd: fd.ops.add(x(fd)), OperandError, "ops.add: the argument list .* 2 operands"),
        "a text": (lambda fd: fd.ops.add(x(fd), "1"), OperandError, "ops.add: operand 1 is '1', expected a TensorView"),
        "a tensor of torch": (lambda fd: fd.ops.exp(values(2)), OperandError, "ops.exp: operand 0"),
        "a dtype of torch": (
            lambda fd: fd.ops.cast(x(fd), torch.bfloat16), OperandError,
            "ops.cast: dtype is torch.bfloat16, expected a DataType, as DataType.BFloat16",
        ),
        "a text for a dtype": (lambda fd: fd.ops.sum(x(fd), [0], dtype="Half"), OperandError, "as DataType.Half"),
        "an input's dtype of torch": (
            lambda fd: fd.define_tensor([4], dtype=torch.float16), DefinitionError,
            "define_tensor: found dtype torch.float16, expected a DataType, as DataType.Half",
        ),
        "a scalar's dtype of torch": (lambda fd: fd.define_scalar(dtype=torch.int64), DefinitionError, "DataType.Int"),
        "a number for a mask": (
            lambda fd: fd.ops.sdpfa_fwd(x(fd), x(fd), x(fd), 0.5), OperandError, "bias is 0.5, expected a TensorView",
        ),
        "an index that is longer": (
            lambda fd: fd.ops.gather(x(fd), fd.define_tensor([2, 5], dtype=DataType.Int), 0), ShapeError,
            "^gather: found extent 5 in axis 1 of T1 and 4 in axis 1 of T0, expected 4 at most in the former",
        ),
        "an index of another rank": (
            lambda fd: fd.ops.gather(x(fd), fd.define_tensor([2], dtype=DataType.Int), 0), OperandError,
            "ops.gather: index is a tensor of 1 dims, expected 2 dims, as the source",
        ),
        "an axis that is not 1": (
            lambda fd: fd.ops.squeeze(x(fd), 1), OperandError,
            "ops.squeeze: axis 1 of T0 is of extent 4, expected an axis of extent 1",
        ),
        "a size that is not an axis's": (
            lambda fd: fd.ops.broadcast_in_dim(x(fd), [2, 3, 5], [1, 2]), OperandError,
            r"ops.broadcast_in_dim: shape\[2\] is 5, expected 4, the size of that axis",
        ),
        "a size that is none": (
            lambda fd: fd.ops.broadcast_in_dim(x(fd), [2, 3, 0.5], [1, 2]), OperandError, "ops.broadcast_in_dim: shape",
        ),
        "a dim too far": (lambda fd: fd.ops.sum(x(fd), [2]), AxisError, "no logical axis 2: it has 2, pass one from"),
        "a dim twice": (lambda fd: fd.ops.sum(x(fd), [0, -2]), OperandError, "each axis once"),
        "no permutation": (lambda fd: fd.ops.permute(x(fd), [0, 0]), OperandError, "a permutation of 2 axes"),
        "a new dim too far": (
            lambda fd: fd.ops.unsqueeze(x(fd), 3), AxisError, "no new axis 3: it has 3, pass one from -3 to 2",
        ),
        "a new dim too far below": (lambda fd: fd.ops.unsqueeze(x(fd), -4), AxisError, "no new axis -4"),
        "a dim of a single number": (
            lambda fd: fd.ops.cumsum(fd.define_tensor([]), 1), AxisError, "no logical axis 1: it has 1",
        ),
        "an axis of a single number": (
            lambda fd: fd.ops.sum(fd.define_tensor([]), [0]), AxisError, "no logical axis 0: it is a single number",
        ),
        "places beyond a tensor's": (lambda fd: fd.ops.stride_order(x(fd), [2, 3]), OperandError, "a permutation of 2"),
        "a complex number for floats": (
            lambda fd: fd.ops.full_like(x(fd), 1j), OperandError, "fill_value is 1j, expected a number .* for Float",
        ),
        "a number beyond its type": (
            lambda fd: fd.ops.full_like(x(fd), 300, DataType.Int8), OperandError, "a number that Int8 holds",
        ),
        "an operand by name": (
            lambda fd: fd.ops.add(x(fd), other=1), OperandError, "ops.add: argument 'other' is 1, expected operands by",
        ),
        "a float for an Int": (
            lambda fd: fd.define_scalar(1.5, DataType.Int), DefinitionError, "value 1.5, expected an integer from -9",
        ),
        "NaN for an Int": (lambda fd: fd.define_scalar(float("nan"), DataType.Int), DefinitionError, "value nan"),
        "a scalar beyond its type": (
            lambda fd: fd.define_scalar(300, DataType.Int8), DefinitionError, "from -128 to 127, for DataType.Int8",
        ),
        "a negative scalar without a sign": (
            lambda fd: fd.define_scalar(-1, DataType.UInt8), DefinitionError, "from 0 to 255",
        ),
        "a number for a Bool": (lambda fd: fd.define_scalar(2, DataType.Bool), DefinitionError, "True or False"),
        "an imaginary scalar": (lambda fd: fd.define_scalar(1j, DataType.Float), DefinitionError, "a real number"),
        "a scalar of 70 bits": (
            lambda fd: fd.define_scalar(2**70, DataType.Float), DefinitionError, "an integer of 64 bits, or a float",
        ),
        "a fraction for a size": (
            lambda fd: fd.ops.reshape(x(fd), [fd.define_scalar(dtype=DataType.Double), -1]), OperandError,
            r"ops.reshape: new_shape\[0\] is S0, expected a number or an integer scalar",
        ),
        "a fraction for an extent": (
            lambda fd: fd.ops.expand(x(fd), [fd.define_scalar(), 4]), OperandError, r"ops.expand: shape\[0\] is S0",
        ),
        "a fraction for a start": (
            lambda fd: fd.ops.slice(x(fd), [0, fd.define_scalar()], [1, 1]), OperandError, r"start_indices\[1\] is S0",
        ),
        "a fraction for a width": (
            lambda fd: fd.ops.pad(x(fd), [fd.define_scalar(), 1]), OperandError, r"ops.pad: pad_widths\[0\] is S0",
        ),
        "a fraction for a count": (
            lambda fd: fd.ops.topk(x(fd), fd.define_scalar()), OperandError, r"ops.topk: k\[0\] is S0",
        ),
        "a norm that is a tensor": (
            lambda fd: fd.ops.embedding(fd.define_tensor([4], dtype=DataType.Int), x(fd), max_norm=x(fd)), OperandError,
            "max_norm is .*, expected a number or a scalar",
        ),
        "flags that do not fit": (lambda fd: fd.ops.broadcast(x(fd), [True, False]), OperandError, "2 entries that"),
        "a size below -1": (lambda fd: fd.define_tensor([-2]), DefinitionError, r"shape\[0\] = -2, expected a size"),
        "flags of another number": (
            lambda fd: fd.define_tensor([-1, 4], contiguity=[True]), DefinitionError, r"contiguity=\[True\]",
        ),
        "an order that is none": (
            lambda fd: fd.define_tensor([-1, 4], stride_order=[0, 0]), DefinitionError, "stride_order",
        ),
        "an output that is none": (lambda fd: fd.add_output(3), DefinitionError, "found tv 3, expected a TensorView"),
        "a factor of 0": (lambda fd: x(fd).split(0, 0), ScheduleError, "factor=0 cannot be done: it is below 1"),
        "a factor that does not divide": (
            lambda fd: x(fd).outer_split(1, 3), ScheduleError, "3 does not divide 4; pad the axis to 6, or allow short",
        ),
        "a loop axis too far": (lambda fd: x(fd).axis(2), AxisError, "T0 has no loop axis 2"),
        "two axes on one mesh dimension": (
            lambda fd: two_on_one(x(fd)), ScheduleError, "mesh_x is already taken by axis i0; one mesh dimension",
        ),
        "a mesh of torch's": (
            lambda fd: x(fd).set_device_mesh(torch_mesh()), ScheduleError,
            r"mesh=torch's DeviceMesh\(.* mesh is not a shardfuse.DeviceMesh \(shardfuse.DeviceMesh.from_torch\(mesh\)",
        ),
        "two axes to one place": (lambda fd: x(fd).reorder({0: 1, 1: 1}), ScheduleError, "give a permutation"),
    }  # fmt: skip


def torch_mesh() -> TorchDeviceMesh:
    return TorchDeviceMesh("cpu", [0], _init_backend=False, _rank=0)


def two_on_one(tv: Any) -> None:
    tv.axis(0).parallelize(ParallelType.mesh_x)
    tv.axis(1).parallelize(ParallelType.mesh_x)


@pytest.mark.parametrize("case", refusals())
def test_refusals_of_the_definition(case: str) -> None:
    define, error, message = refusals()[case]
    with FusionDefinition() as fd, pytest.raises(error, match=message):
        define(fd)


def sizes_that_do_not_fit() -> dict[str, tuple[Define, list[tuple[int, ...]], str]]:
    def add(fd: FusionDefinition) -> None:
        fd.add_output(fd.ops.add(fd.define_tensor([-1, -1]), fd.define_tensor([-1])))

    def flat(fd: FusionDefinition) -> None:
        fd.add_output(fd.ops.reshape(fd.define_tensor([-1, -1]), [5, -1]))

    def squeezed(fd: FusionDefinition) -> None:
        fd.add_output(fd.ops.squeeze(fd.define_tensor([-1, -1]), [1]))

    def expanded(fd: FusionDefinition) -> None:
        fd.add_output(fd.ops.expand(fd.define_tensor([-1, -1]), [3, 7]))

    def in_dim(fd: FusionDefinition) -> None:
        fd.add_output(fd.ops.broadcast_in_dim(fd.define_tensor([-1]), [3, 7], [1]))

    return {
        "add": (
            add,
            [(3, 4), (5,)],
            r"add: found extent 4 in axis 1 of T0 and 5 in axis 0 of T1, expected equal extents, or 1",
        ),
        "reshape": (flat, [(3, 4)], r"reshape: found T0 of \[3, 4\] to \[5, -1\], expected 12 elements"),
        "squeeze": (squeezed, [(3, 4)], "squeeze: found axis 1 of T0 of extent 4, expected extent 1"),
        "expand": (expanded, [(3, 4)], "expand: found 4 in axis 1 of T0 to 7, expected an axis of 1, or the same size"),
        "broadcast_in_dim": (in_dim, [(4,)], "^broadcast_in_dim: found 4 in axis 1 of T1 to 7, expected an axis of 1"),
    }


@pytest.mark.parametrize("case", sizes_that_do_not_fit())
def test_refusals_of_sizes(case: str) -> None:
    define, shapes, message = sizes_that_do_not_fit()[case]
    with FusionDefinition() as fd:
        define(fd)
    with pytest.raises(ShapeError, match=message):
        fd.execute([values(*shape) for shape in shapes])


SIZES: dict[str, tuple[Callable[[Ops, TensorView, Scalar], TensorView], int, str]] = {
    "reshape to what is below 0": (lambda o, x, n: o.reshape(x, [n, -1]), -2, r"to \[-2, -1\], expected 8 elements"),
    "reshape of nothing": (lambda o, x, n: o.reshape(o.slice(x, [0, 0], [0, 4]), [n, -1]), 0, "in place of -1"),
    "expand": (lambda o, x, n: o.expand(o.broadcast(x, [True, False, False]), [n, 2, 4]), -3, r"shape \[-3, 2, 4\]"),
    "broadcast_in_dim": (
        lambda o, x, n: o.broadcast_in_dim(x, [n, 2, 4], [1, 2]),
        -3,
        r"^broadcast_in_dim: found shape",
    ),
    "full": (lambda o, x, n: o.full([n, 2], 1.0, dtype=DataType.Float), -1, r"full: found shape \[-1, 2\]"),
    "iota": (lambda o, x, n: o.iota(n, dtype=DataType.Int), -1, r"iota: found shape \[-1\]"),
    "uniform": (lambda o, x, n: o.uniform(0.0, 1.0, [n], dtype=DataType.Float), -1, r"uniform: found shape \[-1\]"),
}
"""Sizes that a call says: an op, the number, and what is said of it."""


@pytest.mark.parametrize("case", SIZES)
def test_refusals_of_sizes_that_a_call_gives(case: str) -> None:
    make, number, message = SIZES[case]
    with FusionDefinition() as fd:
        x, n = fd.define_tensor([2, 4]), fd.define_scalar(dtype=DataType.Int)
        fd.add_output(make(fd.ops, x, n))
    with pytest.raises(ShapeError, match=message):
        fd.execute([values(2, 4), number])


def test_a_fusion_without_outputs() -> None:
    with FusionDefinition() as fd:
        fd.define_tensor([-1])
    with pytest.raises(EmptyFusionError, match="Fusion is empty!"):
        fd.execute([values(3)])


def test_a_definition_is_closed_by_its_first_run() -> None:
    fd = unary("exp", shape=(-1,))
    fd.execute([values(3)])
    with pytest.raises(DefinitionError, match="after the fusion was first run"):
        fd.define_tensor([-1])


# --- as text -----------------------------------------------------------------------------------------------


def sharded_and_stored(fd: FusionDefinition) -> None:
    mesh = DeviceMesh([[0]], dim_names=("dp", "tp"))
    x = fd.define_tensor([-1, 8, -1], contiguity=[True, None, False], dtype=DataType.BFloat16, stride_order=[2, 0, 1])
    s = fd.define_scalar(dtype=DataType.Int)
    y = fd.ops.add(fd.ops.cast(x, DataType.Float), fd.ops.mul(s, 2))
    z = fd.ops.sum(fd.ops.where(fd.ops.gt(y, 0), y, float("inf")), [0], keepdim=True)
    out = fd.ops.sub(fd.ops.set(z), fd.ops.full([1, 8, 1], 0.5, DataType.Double))
    fd.add_output(out, stride_order=[0, 2, 1])
    for tv in (x, out):
        tv.set_device_mesh(mesh)
        tv.outer_split(1, 1, uneven=True).inner_split(3, 1)
        tv.axis(1).parallelize(ParallelType.mesh_x)
        tv.merge(2, 3)
        tv.reorder({0: 1})
    whole = z.axis(1)
    z.outer_split(1, 2)
    z.set_allocation_domain([whole, z.axis(0), z.axis(3)], [True, None, True])


TEXTS: dict[str, tuple[Define, list[Any]]] = {
    **{name: (case[0], [values(*shape, seed=k) for k, shape in enumerate(case[1])]) for name, case in CLASHES.items()},
    "sharded and stored": (sharded_and_stored, [values(4, 8, 6, dtype=torch.bfloat16).permute(0, 1, 2), 3]),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_definition_prints_as_python_that_rebuilds_it(case: str) -> None:
    define, inputs = TEXTS[case]
    with FusionDefinition() as fd:
        define(fd)
    names = (FusionDefinition, DataType, DeviceMesh, ParallelType)
    space: dict[str, Any] = {name.__name__: name for name in names}
    exec(repr(fd), space)
    with FusionDefinition() as again:
        space["nvfuser_fusion"](again)
    assert repr(again) == repr(fd)
    if case == "sharded and stored":
        return
    for found, wanted in zip(again.execute(inputs), fd.execute(inputs), strict=True):
        assert torch.equal(found, wanted)
    assert repr(again) == repr(fd)


def test_what_is_no_list_of_arguments() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
    runs = (fd.execute, fd.tune, fd.validate, fd.explain, fd.timeline, fd.execute_with_dtensors)
    for run, found in itertools.product(runs, (torch.ones(3), 3.0, "ab", iter([torch.ones(3)]))):
        expected = r"expected a list with an argument for each input of the fusion, \[x\] for one"
        with pytest.raises(DefinitionError, match=f"^{run.__name__}: found inputs .*, {expected}"):
            run(cast(Any, found))
    with pytest.raises(NoPlanError):
        fd.explain(sizes={})


@pytest.mark.parametrize("number", [0, 1.5, True, 2j, np.float32(3), np.int64(4), np.float64(0)])
def test_pythons_comparisons_with_numbers_are_refused(number: complex) -> None:
    """They would be False, and a condition of it constant."""
    with FusionDefinition() as fd:
        x, n = fd.define_tensor([4]), fd.define_scalar(dtype=DataType.Int)
        for v in (x, n, fd.ops.neg(x), fd.ops.add(n, 1), fd.define_scalar(3)):
            for op, sign, compare in (("eq", "==", operator.eq), ("ne", "!=", operator.ne)):
                message = rf"^\w+ {sign} .*, expected fd.ops.{op}\(\w+, .*\), as fd.ops.where takes it for a condition"
                with pytest.raises(DefinitionError, match=message):
                    compare(v, number)
                if not isinstance(number, np.generic):  # which make an array of the other operand
                    with pytest.raises(DefinitionError, match=message):
                        compare(number, v)
        fd.add_output(fd.ops.where(fd.ops.eq(x, number), 1.0, x))


def test_a_tensor_or_scalar_is_no_condition() -> None:
    with FusionDefinition() as fd:
        x, n = fd.define_tensor([4]), fd.define_scalar(dtype=DataType.Int)
        for v in (x, n, fd.ops.gt(x, 0.0), fd.define_scalar(True)):
            message = (
                r"^bool\(\w+\): found a condition on what only a run knows, expected fd.ops.where\(condition, a, b\)"
            )
            for ask in (bool, operator.not_, lambda v: v or 1, lambda v: 1 if v else 2):
                with pytest.raises(DefinitionError, match=message):
                    ask(v)
        fd.add_output(x)


def test_tensors_and_scalars_are_equal_to_themselves_alone() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([4]), fd.define_tensor([4])
        n, m = (fd.define_scalar(dtype=DataType.Int) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))
    equal, unequal = operator.eq, operator.ne
    for a, b in ((x, y), (n, m), (x, n)):
        assert equal(a, a)
        assert not unequal(a, a)
        for other in (b, None, "T0", (), object()):
            assert unequal(a, other)
            assert not equal(a, other)
        assert {a: 1, b: 2}[a] == 1
        assert a in [b, a]
        assert a not in [b, None]
        assert [b, a].index(a) == 1
