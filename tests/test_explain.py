"""``explain()``: segments with refusals, kernels, collectives with kind, mesh dimension and bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from thread_check import Placement, X, Y, shard, world_mesh

import shardfuse
from shardfuse import DataType, DeviceMesh, FusionDefinition
from shardfuse.errors import NoPlanError
from shardfuse.executor.steps import Call, Start
from shardfuse.executor.storage import freed
from shardfuse.ir.scalar import Scalar
from shardfuse.ir.tensor_view import TensorView
from shardfuse.mesh import ParallelType
from shardfuse.passes import PASSES


def rms_norm(shape: list[int], dtype: DataType = DataType.Float) -> FusionDefinition:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor(shape, dtype=dtype), fd.define_tensor(shape[-1:], dtype=dtype)
        wide = fd.ops.cast(x, DataType.Float)
        mean = fd.ops.mean(fd.ops.mul(wide, wide), [-1], keepdim=True)
        out = fd.ops.mul(fd.ops.mul(wide, fd.ops.rsqrt(fd.ops.add(mean, 1e-6))), w)
        fd.add_output(fd.ops.cast(out, dtype))
    return fd


def test_a_norm_is_one_kernel() -> None:
    plan = rms_norm([8, 512], DataType.BFloat16).explain()
    (segment,) = plan.segments
    assert (segment.scheduler, plan.kernels, plan.collectives) == ("persistent", 1, ())
    assert plan.bytes == segment.bytes == (8 * 512 * 2 + 512) * 2
    assert [name for name, _ in segment.refusals][:3] == ["communication", "no_op", "torch_call"]
    assert all(reason for _, reason in segment.refusals)
    assert len(segment.kernels) == 1
    assert str(plan).startswith("1 segments, 1 kernels, 0 collectives, 17408 bytes\nsegment 0: persistent -> ")


def test_each_kernel_has_its_schedule_and_each_stage_of_it() -> None:
    """As data, and in a line that leaves out what is as it mostly is."""
    plan = rms_norm([8192, 32768], DataType.BFloat16).explain()
    (segment,) = plan.segments
    ((schedule,),) = segment.schedules
    assert (schedule.is_packed, schedule.launch.warps) == (True, 16)
    line = "schedule: Tile(kept=1, reduced=4096), Registers(packed), 16 warps, at most 64 registers"
    assert f"    {segment.kernels[0]}: {line}\n" in str(plan)
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.sum(fd.define_tensor([65536, 512]), [0]))
    plan = fd.explain()
    (kernel,), (stages,) = plan.segments[0].kernels, plan.segments[0].schedules
    first, second = stages
    assert f"    {kernel}: schedule: {first}; then {second}\n" in str(plan)
    assert first.is_one_launch
    assert f"Split(parts={first.parts}, in_one_launch)" in str(first)


def test_walks_of_a_loop_are_counted() -> None:
    """A softmax of columns that no program holds: two reads and a write; a loss of long rows: one read."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4096, 256])
        shifted = fd.ops.sub(x, fd.ops.max(x, [0], keepdim=True))
        powers = fd.ops.exp(shifted)
        fd.add_output(fd.ops.div(powers, fd.ops.sum(powers, [0], keepdim=True)))
    plan = fd.explain()
    assert plan.segments[0].scheduler == "looped"
    assert plan.bytes == 3 * 4096 * 256 * 4
    with FusionDefinition() as fd:
        x, target = fd.define_tensor([64, 32000]), fd.define_tensor([64, 1], dtype=DataType.Int)
        shifted = fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True))
        total = fd.ops.sum(fd.ops.exp(shifted), [1], keepdim=True)
        hit = fd.ops.eq(fd.ops.iota(32000, 0, 1, DataType.Int), target)
        chosen = fd.ops.sum(fd.ops.where(hit, shifted, 0.0), [1], keepdim=True)
        fd.add_output(fd.ops.sub(fd.ops.log(total), chosen))
    assert fd.explain().bytes == 64 * (32000 * 4 + 8 + 4)


def collective(source: Placement, target: Placement, shape: list[int], world: int = 4) -> list[str]:
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape)
        y = fd.ops.set(x)
        fd.add_output(y)
    shard(x, world_mesh(world), (X, source))
    shard(y, world_mesh(world), (X, target))
    return [str(c) for c in fd.explain().collectives]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((0, "outer"), None, ["all_gather over mesh_x of 4 ranks, 512 bytes"]),
        ((0, "outer"), (1, "outer"), ["all_to_all over mesh_x of 4 ranks, 128 bytes"]),
        ((0, "outer"), (0, "outer"), []),
        (None, (1, "outer"), []),
        ((1, "inner"), None, ["all_gather over mesh_x of 4 ranks, 512 bytes"]),
    ],
)
def test_collectives(source: Placement, target: Placement, expected: list[str]) -> None:
    """8 x 16 floats: 512 bytes, a quarter of it 128."""
    assert collective(source, target, [8, 16]) == expected


def test_partial_sums() -> None:
    for target, expected in (
        (None, "all_reduce over mesh_x of 2 ranks, 512"),
        ((0, "outer"), "reduce_scatter over mesh_x of 2"),
    ):
        with FusionDefinition() as fd:
            x = fd.define_tensor([2, 8, 16])
            y = fd.ops.sum(x, [0])
            fd.add_output(y)
        x.set_device_mesh(world_mesh(2))
        x.axis(0).parallelize(X)
        shard(y, world_mesh(2), (X, target))
        plan = fd.explain()
        assert plan.kernels == 0
        assert [s.scheduler for s in plan.segments] == ["communication"]
        assert str(plan.collectives[0]).startswith(expected)
        assert f"collective: {expected}" in str(plan)


def test_each_mesh_dimension_is_named() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        for axis in (0, 1):
            fd.add_output(fd.ops.sum(x, [axis]))
    shard(x, DeviceMesh([[0, 1, 2, 3], [4, 5, 6, 7]]), (Y, (0, "outer")), (X, (1, "outer")))
    found = fd.explain().collectives
    assert [str(c) for c in found] == [
        "all_reduce over mesh_y of 2 ranks, 16 bytes",
        "all_reduce over mesh_x of 4 ranks, 16 bytes",
    ]


def test_sizes_are_needed() -> None:
    fd = rms_norm([-1, 16])
    with pytest.raises(NoPlanError, match=r"execute the fusion first, or pass inputs=\[...\] or sizes=\{...\}"):
        fd.explain()
    with pytest.raises(NoPlanError, match=r"^last_trace\(\) needs sizes: execute the fusion first$"):
        fd.last_trace()
    x, w = fd.fusion.tensors()[:2]
    by_sizes = fd.explain(sizes={x: (8, 16)})
    inputs = [torch.ones(8, 16), torch.ones(16)]
    assert fd.explain(inputs) == by_sizes
    fd.execute(inputs)
    assert fd.explain() == by_sizes
    assert fd.explain(sizes={x: (4, 16), w: (16,)}).bytes < by_sizes.bytes


BY_A_NUMBER: dict[str, Callable[[FusionDefinition, Scalar, TensorView], TensorView]] = {
    "pad": lambda fd, n, x: fd.ops.pad(x, [n, 0]),
    "slice": lambda fd, n, x: fd.ops.slice(x, [0, fd.ops.sub(n, 2)], [4, 3]),
    "topk": lambda fd, n, x: fd.ops.topk(x, n, 0)[0],
    "full": lambda fd, n, x: fd.ops.full([n, 3], 1.0, DataType.Float),
    "iota": lambda fd, n, x: fd.ops.iota(n, dtype=DataType.Float),
    "reshape": lambda fd, n, x: fd.ops.reshape(x, [n, -1]),
    "expand": lambda fd, n, x: fd.ops.expand(fd.ops.unsqueeze(x, 0), [n, -1, -1]),
}


@pytest.mark.parametrize("rows", [4, -1])
@pytest.mark.parametrize("name", BY_A_NUMBER)
def test_a_number_that_sizes_depend_on_is_needed(name: str, rows: int) -> None:
    """What ran is explained; what has not, and sizes alone, which leave the number out, is one error that names it."""
    with FusionDefinition() as fd:
        n, x = fd.define_scalar(dtype=DataType.Int), fd.define_tensor([rows, 3])
        fd.add_output(BY_A_NUMBER[name](fd, n, x))
    sentence = r"^explain\(\) needs sizes: they depend on the value of S0: pass inputs=\[...\] in place of sizes"
    for sizes in (None, {}, {x: (4, 3)}):
        with pytest.raises(NoPlanError, match=sentence):
            fd.explain(sizes=sizes)
    inputs = [2, torch.ones(4, 3)]
    fd.execute(inputs)
    by_inputs, last = fd.explain(inputs), fd.explain()
    assert last == by_inputs
    assert str(last)
    longer = [3 if name != "reshape" else 4, torch.ones(4, 3)]
    (found,) = fd.execute(longer)
    assert fd.explain() == fd.explain(longer)
    for sizes in ({}, {x: (4, 3)}):
        with pytest.raises(NoPlanError, match=sentence):
            fd.explain(sizes=sizes)
    assert found.numel()


def explained_beside_the_mesh() -> str:
    rank = shardfuse.initialize().rank
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3])
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(0, 2, uneven=True)
        x.axis(0).parallelize(ParallelType.mesh_x)
        fd.add_output(fd.ops.add(x, 1.0))
    fd.execute([torch.ones(2, 3)])
    for ask in (fd.explain, fd.last_trace):
        if rank < 2:
            assert ask()
        else:
            with pytest.raises(NoPlanError, match=r"needs sizes: rank 2, which is on no mesh of the fusion"):
                ask()
    return str(fd.explain(sizes={x: (4, 3)}))


def test_a_rank_on_no_mesh_is_told_no_sizes() -> None:
    found = shardfuse.simulate(explained_beside_the_mesh, 3)
    assert found[2] == found[0]


def test_the_trace_holds_every_stage() -> None:
    fd = rms_norm([8, 16])
    fd.execute([torch.ones(8, 16), torch.ones(16)])
    stages = [line[2:] for line in fd.last_trace().splitlines() if line.startswith("# ")]
    assert stages == ["bind", *(run.__name__ for run in PASSES), "segments", "host program"]


def test_a_cut_says_what_it_costs() -> None:
    """Rows normed along either axis: one kernel cannot reduce both ways and read again, so x is read twice."""
    n = 64
    with FusionDefinition() as fd:
        x = fd.define_tensor([n, n], contiguity=True)
        for axis in (0, 1):
            fd.add_output(fd.ops.sub(x, fd.ops.max(x, [axis], keepdim=True)))
    plan = fd.explain()
    (cut,) = plan.cuts
    assert (plan.kernels, cut.first, cut.second) == (2, 0, 1)
    assert (cut.bytes, cut.joined) == (4 * n * n * 4, 3 * n * n * 4)
    assert cut.bytes == plan.bytes
    assert f"cut 0 | 1: {cut.bytes} bytes, as one {cut.joined}: " in str(plan)
    assert cut.reason.endswith("reduces i1, others i0")


def test_what_stands_between_two_kernels_is_named() -> None:
    with FusionDefinition() as fd:
        h = fd.ops.exp(fd.define_tensor([8, 16], contiguity=True))
        fd.add_output(fd.ops.add(fd.ops.cumsum(h, 0), h))
    (cut,) = fd.explain().cuts
    assert str(cut) == "cut 0 | 2: 2560 bytes, as one 2048: segment 1 stands between"


def test_a_fusion_of_one_kernel_has_no_cuts() -> None:
    assert rms_norm([8, 512]).explain().cuts == ()


def test_copies_into_inputs_are_counted() -> None:
    """What is written over the input where it is read is no copy; what is read at another place is."""
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([16, 16], contiguity=True), fd.define_tensor([16, 16], contiguity=True)
        fd.add_output(fd.ops.add(x, 1.0), alias_input=x)
        fd.add_output(fd.ops.permute(fd.ops.exp(y), [1, 0]), alias_input=y)
    plan = fd.explain()
    assert plan.copies == 1
    assert plan.bytes == (4 + 2) * 16 * 16 * 4
    assert str(plan).splitlines()[0].endswith("1 copies into inputs, 6144 bytes")
    assert rms_norm([8, 512]).explain().copies == 0


PLAN = """
import sys
sys.path[:0] = {paths!r}
import thread_check
from test_explain import sharded_block
fd = sharded_block()
print(fd.explain())
for name, text in fd.fec.last_plan.trace:
    print(name, text, sep="\\n")
"""


def sharded_block() -> FusionDefinition:
    """Partial sums, residual, norm over a sequence shard, a linear by columns: several collectives and segments."""
    with FusionDefinition() as fd:
        parts, residual = fd.define_tensor([4, 6, 10, 16]), fd.define_tensor([6, 10, 16])
        w, weight = fd.define_tensor([16]), fd.define_tensor([32, 16])
        total = fd.ops.sum(parts, [0])
        hidden = fd.ops.add(total, residual)
        mean = fd.ops.mean(fd.ops.mul(hidden, hidden), [-1], keepdim=True)
        normed = fd.ops.mul(fd.ops.mul(hidden, fd.ops.rsqrt(fd.ops.add(mean, 1e-6))), w)
        out = fd.ops.linear(normed, weight)
        for tv in (hidden, out, fd.ops.sum(hidden, [0, 1])):
            fd.add_output(tv)
    mesh = world_mesh(4)
    parts.set_device_mesh(mesh)
    parts.axis(0).parallelize(ParallelType.mesh_x)
    for tv in (residual, total):
        shard(tv, mesh, (X, (1, "outer")))
    shard(weight, mesh, (X, (0, "outer")))
    shard(out, mesh, (X, (2, "outer")))
    return fd


def plan_text() -> str:
    fd = sharded_block()
    lines = [str(fd.explain())]
    plan = fd.fec.last_plan
    assert plan is not None
    return "\n".join([*lines, *(f"{name}\n{text}" for name, text in plan.trace)])


def test_a_plan_is_the_same_on_every_rank() -> None:
    texts = run_ranks(4, lambda rank, size: plan_text())
    assert texts == [plan_text()] * 4


@pytest.mark.parametrize("seed", ["0", "random"])  # beside this process, which has one of its own
def test_a_plan_is_the_same_for_every_hash_seed(seed: str) -> None:
    here = Path(__file__).parent
    code = PLAN.format(paths=[str(here.parent), str(here)])
    environment = {"PYTHONHASHSEED": seed, "PATH": "", "SHARDFUSE_STRICT": "1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == plan_text() + "\n"


def test_what_nobody_reads_is_freed_where_it_is_made() -> None:
    steps = [
        Start(Call(("T1", "T2"), "collective_0", len, ("T0",)), "done"),
        Call(("T3",), "torch_1", len, ("T1",)),
        Call((), "wait", None, ("done", "T1")),
        Call(("T4",), "view_2", len, ("T3",)),
    ]
    assert list(map(str, freed(steps, ["T4"]))) == [
        "T1, T2, done = start(collective_0, T0)",
        "del T2",
        "T3 = torch_1(T1)",
        "wait(done, T1)",
        "del T1, done",
        "T4 = view_2(T3)",
        "del T3",
    ]
