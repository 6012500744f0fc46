"""What ``execute`` says of an argument that does not fit: which one, what was found, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thread_check import X, shard, world_mesh

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
from shardfuse.errors import (
    DefinitionError,
    InputCountError,
    InputError,
    NoPlanError,
    OperandError,
    ShapeError,
    ShardfuseError,
)
from shardfuse.executor.binding import bind_arguments


def doubled(**declared: Any) -> FusionDefinition:
    """2 * x, of an input declared so."""
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.mul(fd.define_tensor(**declared), 2))
    return fd


def scaled(dtype: DataType) -> FusionDefinition:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.mul(fd.define_tensor([-1]), fd.define_scalar(dtype=dtype)))
    return fd


ones = torch.ones
REFUSALS: dict[str, tuple[Callable[[], FusionDefinition], list[Any], str]] = {
    "too few": (
        lambda: doubled(shape=[-1]),
        [],
        "the fusion was given 0 inputs, it declares 1, T0: pass them in order",
    ),
    "too many": (lambda: doubled(shape=[-1]), [ones(2), ones(2)], "the fusion was given 2 inputs, it declares 1"),
    "a number for a tensor": (
        lambda: doubled(shape=[-1]),
        [3.0],
        "Expected input 0, T0, to be an at::Tensor but got scalar 3.0: pass a torch.Tensor, or declare it with",
    ),
    "a tensor for a number": (
        lambda: scaled(DataType.Double),
        [ones(2), ones(2)],
        "Expected input 1, S0, to be a Double scalar but got Tensor: pass a Python number",
    ),
    "a float for an integer": (
        lambda: scaled(DataType.Int),
        [ones(2), 1.5],
        "Expected input 1, S0, to be a Int scalar but got 1.5: pass an int",
    ),
    "a complex number for a real one": (
        lambda: scaled(DataType.Double),
        [ones(2), 1 + 2j],
        r"Expected input 1, S0, to be a Double scalar but got \(1\+2j\): pass its real part, or declare dtype=",
    ),
    "another dtype": (
        lambda: doubled(shape=[-1]),
        [ones(2, dtype=torch.float64)],
        r"to be of dtype torch.float32 but got dtype torch.float64: cast it, or declare dtype=DataType.Double",
    ),
    "another rank": (
        lambda: doubled(shape=[-1, -1]),
        [ones(2)],
        r"to be a tensor of 2 dims but got 1 dims, shape \[2\]: pass one for each logical axis",
    ),
    "another static size": (
        lambda: doubled(shape=[-1, 4]),
        [ones(2, 5)],
        r"to be of shape \[2, 4\] but got shape \[2, 5\]: pass this rank's piece, or correct the sizes in the",
    ),
    "a gap": (
        lambda: doubled(shape=[-1, -1], contiguity=True),
        [ones(4, 8)[:, ::2]],
        r"to be contiguous in dim 1 \(stride 1\) but got strides \[8, 2\] for shape \[4, 4\]: call .contiguous\(\)",
    ),
    "another order": (
        lambda: doubled(shape=[-1, -1], contiguity=True, stride_order=[0, 1]),
        [ones(4, 8)],
        r"to be contiguous in dim 0 \(stride 1\) but got strides \[8, 1\]",
    ),
    "a gap between rows": (
        lambda: doubled(shape=[-1, -1], contiguity=[True, True]),
        [ones(4, 8)[:, :4]],
        r"to be contiguous in dim 0 \(stride 4\) but got strides \[8, 1\] for shape \[4, 4\]",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    define, arguments, message = REFUSALS[case]
    with pytest.raises((InputError, InputCountError), match=message):
        define().execute(arguments)


def test_what_is_wrong_is_the_caller_s() -> None:
    """References that do not fit, a script for inputs that do not, what has not run: no report of a fault."""
    x, fd = ones(4, 8), FusionDefinition()
    with fd:
        fd.add_output(fd.ops.sum(fd.define_tensor([-1, 8]), [1]))
    with pytest.raises(NoPlanError, match=r"^last_trace\(\) needs sizes: execute the fusion first$"):
        fd.last_trace()
    for wrong, said in (([], "0 reference_outputs, expected 1,"), ([x], r"\[0\] of shape \[4, 8\], expected \[4\],")):
        with pytest.raises(DefinitionError, match=f"validate: found .*{said}") as found:
            fd.validate([x], wrong)
        assert "report" not in str(found.value)
    fd.validate([x], [x.sum(1)])
    with pytest.raises(InputError, match="Expected input 0, T0, to be an at::Tensor but got scalar 3"):
        fd.repro_script_for([3])
    for call in (fd.repro_script_for, fd.timeline, fd.execute, fd.explain):
        with pytest.raises(InputCountError, match=r"^the fusion was given 0 inputs, it declares 1, T0") as counted:
            call([])
        assert "test_binding_errors.py" in str(counted.value), "the line that declares T0"


def test_strides_below_0() -> None:
    with pytest.raises(DefinitionError, match=r"strides=\[-1\], expected strides of 0 or more"):
        doubled(sizes=[2], strides=[-1])


ACCEPTED: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
    "any strides where nothing is said": ({"shape": [-1, -1]}, ones(4, 8)[:, ::2]),
    "a gap where one is declared": ({"shape": [-1, -1], "contiguity": [False, True]}, ones(4, 8)[:, :4]),
    "channels last": ({"shape": [-1, -1], "contiguity": True, "stride_order": [0, 1]}, ones(8, 4).t()),
    "a size of 1 with any stride": ({"shape": [-1, -1], "contiguity": True}, ones(4, 8)[:1]),
    "no elements": ({"shape": [-1, -1], "contiguity": True}, ones(0, 8)),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case: str) -> None:
    declared, x = ACCEPTED[case]
    (found,) = doubled(**declared).execute([x])
    assert torch.equal(found, x * 2)


def test_a_cached_program_is_not_taken_for_other_arguments() -> None:
    fd = doubled(shape=[-1, -1], contiguity=True)
    fd.execute([ones(4, 8)])
    with pytest.raises(InputError, match="to be contiguous in dim 1"):
        fd.execute([ones(8, 4).t()])
    with pytest.raises(InputError, match=r"of dtype torch\.float32"):
        fd.execute([ones(4, 8).double()])
    with pytest.raises(InputError, match="an at::Tensor"):
        fd.execute([2.0])


SHARED_PLACES = {
    "expanded": lambda: ones(1, 3).expand(4, 3),
    "of one element": lambda: ones(1).as_strided((4, 3), (0, 0)),
    "rows that begin within the row before": lambda: ones(9).as_strided((4, 3), (2, 1)),
    "two ways to one place": lambda: ones(20).as_strided((4, 3), (2, 3)),
}


@pytest.mark.parametrize("case", SHARED_PLACES)
def test_an_output_is_written_to_an_input_with_a_place_for_each_element(case: str) -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1, -1]), fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.add(x, 1), alias_input=x)
        fd.add_output(fd.ops.add(y, 1), alias_input=y)
    good, shared = ones(4, 3), SHARED_PLACES[case]()
    fd.execute([good, ones(4, 3)])
    with pytest.raises(
        InputError, match=r"Expected input 1, T1, to be a tensor whose elements have a place each.*pass"
    ):
        fd.execute([good, shared])
    assert torch.equal(good, torch.full((4, 3), 2.0))
    assert torch.equal(shared, ones(4, 3)), "nothing is written"


def test_an_output_is_written_to_an_input_with_gaps() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.add(x, 1), alias_input=x)
    for strides in ((3, 1), (2, 9), (1, 4), (2, 7), (5, 3)):
        written = torch.zeros(40).as_strided((4, 3), strides)
        fd.execute([written])
        assert torch.equal(written, ones(4, 3)), strides
    (empty,) = (ones(1, 3).expand(4, 3)[:, :0],)
    fd.execute([empty])


@pytest.mark.parametrize("dtype", [DataType.Double, DataType.Int, DataType.ComplexDouble])
def test_a_cached_program_takes_integers_of_64_bits_only(dtype: DataType) -> None:
    fd = scaled(dtype)
    fd.execute([ones(2), 3])
    for number in (2**63, 2**70, -(2**63) - 1):
        with pytest.raises(InputError, match=f"S0, to be an integer of 64 bits but got {number}: pass one, or a float"):
            fd.execute([ones(2), number])
    with pytest.raises(InputError, match="got one of 20001 bits"):  # Python writes no number of as many digits
        fd.execute([ones(2), 2**20000])
    for number in (2**63 - 1, -(2**63)):
        assert torch.equal(fd.execute([ones(2), number])[0].real, torch.full((2,), float(number)))


def test_numbers_that_no_scalar_input_takes_on_a_mesh() -> None:
    """Every rank says so itself, and the world goes on."""

    def run(rank: int, _: int) -> None:
        with FusionDefinition() as fd:
            x, s = fd.define_tensor([8]), fd.define_scalar(dtype=DataType.Double)
            fd.add_output(fd.ops.sum(fd.ops.mul(x, s)))
        shard(x, world_mesh(2), (X, (0, "outer")))
        for number in (3, 2**70, 2**63, 1j, 4):
            if number in (3, 4):
                assert fd.execute([ones(4), number])[0].item() == 8 * number
            else:
                with pytest.raises(InputError, match="Expected input 1, S0, to be a"):
                    fd.execute([ones(4), number])

    run_ranks(2, run)


def messages(world: int, run: Callable[[int], object]) -> list[str]:
    """What each rank raises; none is left waiting."""

    def one(rank: int, _: int) -> str:
        with pytest.raises(ShardfuseError) as error:
            run(rank)
        return str(error.value)

    return run_ranks(world, one)


def test_a_whole_tensor_in_place_of_a_shard() -> None:
    def run(_: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([8, 4])
            fd.add_output(fd.ops.exp(x))
        shard(x, world_mesh(2), (X, (0, "outer")))
        fd.execute([ones(8, 4)])

    for rank, message in enumerate(messages(2, run)):
        expected = f"of shape [4, 4] on rank {rank} of DeviceMesh([0, 1]), unsharded [8, 4] but got shape [8, 4]"
        assert expected in message


def test_a_wrong_piece_on_one_rank_ends_all() -> None:
    def run(_: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([8, 4])
            fd.add_output(fd.ops.sum(x, [0]))
        shard(x, world_mesh(3), (X, (0, "outer")))
        fd.execute([ones(3, 4)])

    said = messages(3, run)
    assert "Expected input 0, T0, to be of shape [2, 4] on rank 2" in said[2]
    assert all("rank 2" in message for message in said)


def test_ranks_that_disagree_about_a_symbolic_size() -> None:
    """Even shards of symbolic size: each rank knows the whole from its own piece, and they do not agree."""

    def run(rank: int) -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 4])
            fd.add_output(fd.ops.sum(x, [0]))
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        fd.execute([ones(4 + rank, 4)])

    for message in messages(2, run):
        assert "the ranks do not run the same program" in message


def test_a_number_on_the_host_that_is_elsewhere() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.mul(fd.define_tensor([-1]), fd.define_tensor([], is_cpu=True)))
    with pytest.raises(InputError, match=r"input 1, T1, to be on cpu but got a tensor on meta: move it there, or decl"):
        fd.execute([ones(3), ones((), device="meta")])


def test_what_a_rank_outside_of_the_mesh_gives() -> None:
    """A size that is not said is that of the tensor it passes in place of a shard, also beside one that is."""

    def run(rank: int, size: int) -> list[list[int]]:
        with FusionDefinition() as fd:
            x, y = fd.define_tensor([-1, 4]), fd.define_tensor([2, 4])
            fd.add_output(fd.ops.sum(x, [0]))
            fd.add_output(fd.ops.sum(y, [0]))
            for tv in (x, y):
                tv.set_device_mesh(DeviceMesh([1, 2]))
        inputs = [ones(6, 4), ones(2, 4)] if rank else [ones(6, 4), ones(0)]
        return [[] if out is None else out.tolist() for out in fd.execute(inputs)]

    assert run_ranks(3, run) == [[[], []], *[[[6.0] * 4, [2.0] * 4]] * 2]


def test_two_rows_of_two_are_contiguous_or_not() -> None:
    """The smallest dim that has a stride."""
    fd = doubled(shape=[2, 2], contiguity=True)
    with pytest.raises(InputError, match=r"contiguous in dim 1 \(stride 1\)"):
        fd.execute([ones(2, 2).t()])
    assert torch.equal(fd.execute([ones(2, 2)])[0], 2 * ones(2, 2))


@pytest.mark.parametrize("at", [0, 1])
def test_tensors_of_two_devices(at: int) -> None:
    """Whichever comes second is named; without a GPU the other device is torch's meta."""
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.add(fd.define_tensor([-1]), fd.define_tensor([-1])))
    inputs = [ones(3), ones(3)]
    inputs[at] = inputs[at].to("cuda" if torch.cuda.is_available() else "meta")
    with pytest.raises(InputError, match=r"input 1, T1, to be on \w+ but got a tensor on \w+: move it there"):
        fd.execute(inputs)


def test_a_rank_outside_of_the_mesh_works_where_its_first_argument_lies() -> None:
    """It reads none of them: what it makes of its own lies there all the same."""
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([4]), fd.define_tensor([4])
        fd.add_output(fd.ops.add(x, y))
    for tv in (x, y):
        shard(tv, DeviceMesh([0, 1]), (X, (0, "outer")))
    home = bind_arguments(fd.fusion, [torch.empty(4, device="meta"), torch.empty(4)], 2, None).device
    assert home == torch.device("meta")
    assert bind_arguments(fd.fusion, [torch.empty(2), torch.empty(2)], 1, None).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "taken", "refused"),
    [
        (DataType.Bool, (0, 1, True), (2, -1)),
        (DataType.Int32, (-(2**31), 2**31 - 1, False), (2**31, -(2**31) - 1, 2**70)),
        (DataType.UInt8, (0, 255), (-1, 256)),
        (DataType.Int, (-(2**63), 2**63 - 1), (2**63,)),
    ],
)
def test_a_scalar_is_within_the_range_of_its_dtype(
    dtype: DataType, taken: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    """In a first call, and in one that finds a program."""
    for is_first in (True, False):
        with FusionDefinition() as fd:
            x, s = fd.define_tensor([-1], dtype=DataType.Int), fd.define_scalar(None, dtype=dtype)
            fd.add_output(fd.ops.add(x, s))
        zeros = torch.zeros(2, dtype=torch.int64)
        for number in () if is_first else taken:
            assert fd.execute([zeros, number])[0].tolist() == [int(number)] * 2
        for number in refused:
            with pytest.raises(InputError, match=f"S0, to be an? .* but got {number}: pass one, or "):
                fd.execute([zeros, number])


@pytest.mark.parametrize("dim", [0, None])
@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_the_largest_of_nothing_is_refused(op: str, dim: int | None) -> None:
    with FusionDefinition() as fd:
        fd.add_output(getattr(fd.ops, op)(fd.define_tensor([-1, 6]), dim))
    with pytest.raises(ShapeError, match=rf"{op}: found T0 of \[0, 6\].*, expected at least one element"):
        fd.execute([torch.empty(0, 6)])
    x = torch.eye(6)
    assert torch.equal(fd.execute([x])[0], getattr(torch, op)(x, dim))


def test_more_of_an_axis_than_there_are_is_refused() -> None:
    """Of a size, or a number of them, that is known in a call."""
    with FusionDefinition() as fd:
        for made in fd.ops.topk(fd.define_tensor([-1, -1]), fd.define_scalar(dtype=DataType.Int), 1):
            fd.add_output(made)
    x = torch.eye(4)[:, :3]
    for k in (4, -1):
        with pytest.raises(ShapeError, match=rf"topk: found T0 of \[4, 3\], and k={k}, expected a k of 0 to 3"):
            fd.execute([x, k])
    assert torch.equal(fd.execute([x, 2])[0], torch.topk(x, 2, 1).values)


@pytest.mark.parametrize("name", ["start", "step"])
def test_an_iota_counts_by_finite_numbers(name: str) -> None:
    """A constant is refused where it is defined, and the argument of a call where it comes."""
    with FusionDefinition() as fd:
        number = fd.define_scalar(dtype=DataType.Double)
        fd.add_output(fd.ops.iota(4, **{"start": 1.0, "step": 1.0, name: number}, dtype=DataType.Float))
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(OperandError, match=f"ops.iota: {name} is {value}, expected a finite number"):
            fd.execute([value])
    (found,) = fd.execute([2.0])
    assert found.tolist() == ([2.0, 3.0, 4.0, 5.0] if name == "start" else [1.0, 3.0, 5.0, 7.0])


@pytest.mark.parametrize("first", [-1, 5], ids=["symbolic", "static"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("extents", [(5, 1), (1, 5), (5, 4)])
def test_a_cat_repeats_no_part(extents: tuple[int, int], is_fused: bool, first: int) -> None:
    sizes = [[2, n] for n in extents]
    with FusionDefinition() as fd:
        parts = [fd.define_tensor([-1, first if n == first else -1], contiguity=True) for n in extents]
        joined = fd.ops.cat([fd.ops.neg(t) for t in parts] if is_fused else parts, 0)
        fd.add_output(fd.ops.sum(joined, [1]) if is_fused else joined)
    found = (
        f"cat: found extent {extents[0]} in axis 1 of T.* and {extents[1]} in axis 1 of T.*, expected equal extents;"
    )
    with pytest.raises(ShapeError, match=found):
        fd.execute([ones(*shape) for shape in sizes])


@pytest.mark.parametrize(("op", "left", "right"), [
    ("matmul", [3, 1], [5, 4]), ("matmul", [3, 5], [1, 4]), ("matmul", [1], [5]), ("matmul", [2, 3, 5], [2, 1, 4]),
    ("linear", [3, 5], [4, 1]), ("linear", [3, 1], [4, 5]), ("linear", [3, 2], [4, 5]),
])  # fmt: skip
@pytest.mark.parametrize("is_static", [True, False])
def test_a_product_repeats_nothing_that_it_adds_up(op: str, left: list[int], right: list[int], is_static: bool) -> None:
    shapes = (left, right) if is_static else ([-1] * len(left), [-1] * len(right))
    with FusionDefinition() as fd:
        fd.add_output(getattr(fd.ops, op)(*(fd.define_tensor(shape, contiguity=True) for shape in shapes)))
    with pytest.raises(ShapeError, match=f"^{op}: found extent .* expected equal extents; correct the sizes"):
        fd.execute([ones(left), ones(right)])


GROUPED = {
    "an offset for three matrices": ([4, 8], [3, 8, 8], [4]),
    "an offset for three, to the left": ([3, 4, 8], [8, 4], [4]),
    "a matrix for two offsets": ([4, 8], [1, 8, 8], [2, 4]),
    "a matrix for two offsets, to the left": ([1, 4, 8], [8, 4], [2, 4]),
    "a group for three": ([1, 2, 8], [3, 8, 8], [2]),
    "rows of one element": ([4, 1], [2, 8, 8], [2, 4]),
    "a row to add up": ([8, 1], [8, 8], [1]),
}


@pytest.mark.parametrize(("left", "right", "ends"), GROUPED.values(), ids=GROUPED)
def test_a_grouped_product_repeats_no_group(left: list[int], right: list[int], ends: list[int]) -> None:
    values = (ones(left).bfloat16(), ones(right).bfloat16(), torch.tensor(ends, dtype=torch.int32))
    dtypes = (DataType.BFloat16, DataType.BFloat16, DataType.Int32)
    with FusionDefinition() as fd:
        given = [fd.define_tensor([-1] * v.ndim, contiguity=True, dtype=d) for v, d in zip(values, dtypes, strict=True)]
        fd.add_output(fd.ops.grouped_mm(*given))
    with pytest.raises(ShapeError, match=r"^grouped_mm: found extent .* expected equal extents; correct the sizes"):
        fd.execute(values)
