"""Binding sizes: what axes become, where they meet, and where a tensor has to be read under fresh roots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest
from test_passes import docstring_texts
from thread_check import X, shard, world_mesh

from shardfuse import FusionDefinition
from shardfuse.errors import ShapeError, ShardingError
from shardfuse.ir.op import Pointwise
from shardfuse.ir.printer import fusion_text
from shardfuse.ir.scalar import Scalar
from shardfuse.ir.verify import verify
from shardfuse.passes.bind import bind


def text(define: Callable[[FusionDefinition], None], *sizes: Sequence[int]) -> str:
    with FusionDefinition() as fd:
        define(fd)
    inputs = fd.fusion.tensors()[: len(sizes)]
    fusion = bind(fd.fusion, dict(zip(inputs, sizes, strict=True)))
    verify(fusion, "bind")
    return fusion_text(fusion)


def test_the_docstring() -> None:
    before, after = docstring_texts(sys.modules[bind.__module__])
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.add(fd.define_tensor([-1, 4]), fd.define_tensor([4])))
    assert [line.strip() for line in repr(fd).splitlines()[1:] if line.strip()] == before.splitlines()
    x, w = fd.fusion.tensors()[:2]
    assert fusion_text(bind(fd.fusion, {x: (8, 4), w: (4,)})) == after


def test_a_reshape_regroups_the_same_digits() -> None:
    """Group norm as people write it: back in [N, C, H, W] the channel axis is the one that the weight has."""

    def define(fd: FusionDefinition) -> None:
        x, w = fd.define_tensor([2, 8, 5]), fd.define_tensor([8])
        groups = fd.ops.reshape(x, [2, 2, 4, 5])
        back = fd.ops.reshape(fd.ops.sub(groups, fd.ops.mean(groups, [2, 3], keepdim=True)), [2, 8, 5])
        fd.add_output(fd.ops.mul(back, fd.ops.broadcast(w, [True, False, True])))

    assert text(define, (2, 8, 5), (8,)).splitlines() == [
        "inputs: T0[i0, i1, i2]:Float, T1[i1]:Float",
        "T2[i0, i1/4, i1%4, i2]:Float = reshape(T0, shape=(2, 2, 4, 5))",
        "T3[i0, i1/4]:Float = sum(T2, axes=(2, 3))",
        "T4[i0, i1/4, 1, 1]:Float = broadcast(T3, new=(False, False, True, True))",
        "T5[i0, i1/4, 1, 1]:Float = div(T4, 20)",
        "T6[i0, i1/4, i1%4, i2]:Float = sub(T2, T5)",
        "T7[i0, i1, i2]:Float = reshape(T6, shape=(2, 8, 5))",
        "T8[1, i1, 1]:Float = broadcast(T1, new=(True, False, True))",
        "T9[i0, i1, i2]:Float = mul(T7, T8)",
        "outputs: T9",
    ]


def test_two_free_axes_are_one() -> None:
    def define(fd: FusionDefinition) -> None:
        x, y = fd.define_tensor([-1, -1]), fd.define_tensor([-1])
        fd.add_output(fd.ops.add(fd.ops.reshape(x, [-1]), y))

    assert text(define, (2, 6), (12,)).splitlines()[0] == "inputs: T0[i0, i1]:Float, T1[i0 i1]:Float"


@pytest.mark.parametrize(
    ("name", "relabels"), [("x + x.T", 1), ("x[:, None] + x", 1), ("x * x", 0), ("x.sum(0) + x.sum(1)", 1)]
)
def test_a_second_reading_of_one_index(name: str, relabels: int) -> None:
    def define(fd: FusionDefinition) -> None:
        if name == "x[:, None] + x":
            x = fd.define_tensor([-1])
            fd.add_output(fd.ops.add(fd.ops.unsqueeze(x, 1), x))
            return
        x = fd.define_tensor([-1, -1])
        a, b = {
            "x + x.T": (x, fd.ops.permute(x, [1, 0])),
            "x * x": (x, x),
            "x.sum(0) + x.sum(1)": (fd.ops.sum(x, [0]), fd.ops.sum(x, [1])),
        }[name]
        fd.add_output(fd.ops.add(a, b))

    size = (4,) if name == "x[:, None] + x" else (4, 4)
    assert text(define, size).count("relabel(") == relabels


def test_all_axes_of_a_relabelled_operand_meet() -> None:
    """T1r1 is T0 transposed under fresh roots, and each of them comes to be one of T0's."""

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([2, 3, 3])
        fd.add_output(fd.ops.add(x, fd.ops.permute(x, [0, 2, 1])))

    assert text(define, (2, 3, 3)).splitlines()[2:4] == [
        "T1r1[i0, i1, i2]:Float = relabel(T1)",
        "T2[i0, i1, i2]:Float = add(T0, T1r1)",
    ]


def test_a_split_that_the_digits_do_not_allow() -> None:
    """[3, 4] flattened has no digit for halves of 6: the flat tensor gets roots of its own."""

    def define(fd: FusionDefinition) -> None:
        y = fd.ops.reshape(fd.define_tensor([3, 4]), [12])
        fd.add_output(y)
        shard(y, world_mesh(2), (X, (0, "outer")))

    assert text(define, (3, 4)).splitlines()[1:3] == [
        "T1u[i0 i1]:Float = reshape(T0, shape=(12,))",
        "T1[i2/6@mesh_x i2%6]:Float = relabel(T1u)",
    ]


def test_an_axis_is_not_rewritten_where_its_recorded_split_would_not_fit() -> None:
    """T1 [12] in halves meets [3, 4] flattened: it is the other axis that is said in digits of T1's."""

    def define(fd: FusionDefinition) -> None:
        x, y = fd.define_tensor([3, 4]), fd.define_tensor([12])
        fd.add_output(fd.ops.add(fd.ops.reshape(x, [12]), y))
        shard(y, world_mesh(2), (X, (0, "outer")))

    assert text(define, (3, 4), (12,)).splitlines()[0] == "inputs: T0[i2/4, i2%4]:Float, T1[i2/6@mesh_x i2%6]:Float"


def test_host_scalars_are_numbers() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.var(x, [1]))

    with FusionDefinition() as fd:
        define(fd)
    fusion = bind(fd.fusion, {fd.fusion.tensors()[0]: (3, 5)})
    divisors = [e.inputs[1] for e in fusion.exprs if e.op == Pointwise("div")]
    assert [s.value for s in divisors if isinstance(s, Scalar)] == [5, 4]
    assert fusion.host == []


def test_refusals() -> None:
    def sums(fd: FusionDefinition) -> None:
        fd.add_output(fd.ops.add(fd.define_tensor([-1, 4]), fd.define_tensor([-1, 4])))

    with pytest.raises(ShapeError, match="add: found extent 3 in axis 0 of T0 and 5 in axis 0 of T1"):
        text(sums, (3, 4), (5, 4))

    def halves(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1])
        fd.add_output(fd.ops.exp(x))
        x.set_device_mesh(world_mesh(2))
        x.outer_split(0, 2)
        x.axis(0).parallelize(X)

    with pytest.raises(ShardingError, match=r"cannot shard T0 of \[7\]: 2 does not divide 7"):
        text(halves, (7,))
