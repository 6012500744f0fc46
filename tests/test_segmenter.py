"""Which Exprs make one segment, which scheduler takes it, and what stands in memory between two."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from fusion_check import check
from random_fusions import random_case
from thread_check import X, shard, world_mesh

from shardfuse import DataType, FusionDefinition
from shardfuse.compiler import compile_fusion
from shardfuse.device import H200, Device
from shardfuse.passes import PASSES, bind
from shardfuse.schedulers import SCHEDULERS
from shardfuse.schedulers.choice import choose_scheduler, is_one_kernel, lone_scheduler
from shardfuse.segmenter import ScheduledSegment, segment_fusion
from shardfuse.segments.segment import Segment

Define = Callable[[FusionDefinition], None]


def segments(define: Define) -> list[ScheduledSegment]:
    with FusionDefinition() as fd:
        define(fd)
    inputs = fd.fusion.tensors()[: len(fd.fusion.inputs)]
    fusion = bind(fd.fusion, {tv: tv.shape for tv in inputs})
    for run in PASSES:
        run(fusion)
    return segment_fusion(fusion, H200)


def described(define: Define) -> list[str]:
    """``scheduler: inputs -> outputs`` of each segment."""
    return [
        f"{s.scheduler}: {' '.join(map(str, s.segment.inputs))} -> {' '.join(map(str, s.segment.outputs))}"
        for s in segments(define)
    ]


def test_a_chain_is_one_segment() -> None:
    def define(fd: FusionDefinition) -> None:
        x, y = fd.define_tensor([64, 32]), fd.define_tensor([32])
        fd.add_output(fd.ops.exp(fd.ops.mul(fd.ops.add(x, y), 2.0)))

    assert described(define) == ["pointwise: T0 T1 -> T4"]


def test_a_residual_and_its_norm_are_one_segment_with_two_outputs() -> None:
    def define(fd: FusionDefinition) -> None:
        x, r, w = fd.define_tensor([64, 512]), fd.define_tensor([64, 512]), fd.define_tensor([512])
        h = fd.ops.add(x, r)
        mean = fd.ops.mean(fd.ops.mul(h, h), [-1], keepdim=True)
        fd.add_output(h)
        fd.add_output(fd.ops.mul(fd.ops.mul(h, fd.ops.rsqrt(fd.ops.add(mean, 1e-6))), w))

    (segment,) = segments(define)
    assert segment.scheduler == "persistent"
    assert [t.name for t in segment.segment.outputs] == ["T3", "T11"]


def test_what_stands_between_two_segments_is_the_narrow_tensor() -> None:
    """A cast up is made anew by each that reads it; the matmul reads the bfloat16 tensor."""

    def define(fd: FusionDefinition) -> None:
        half = DataType.BFloat16
        x, w = fd.define_tensor([8, 16], dtype=half), fd.define_tensor([16, 16], dtype=half)
        y = fd.ops.cast(fd.ops.exp(x), half)
        fd.add_output(fd.ops.matmul(y, w))
        wide = fd.ops.cast(y, DataType.Float)
        fd.add_output(fd.ops.add(wide, 1.0))
        fd.add_output(fd.ops.sum(wide, [1]))

    found = segments(define)
    assert [s.scheduler for s in found if s.scheduler == "torch_call"] == ["torch_call"]
    between = {t for s in found for t in s.segment.inputs} & {t for s in found for t in s.segment.outputs}
    assert {t.dtype for t in between} == {DataType.BFloat16}


def test_a_collective_stands_alone() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([8, 4])
        y = fd.ops.set(fd.ops.exp(x))
        fd.add_output(fd.ops.mul(y, 2.0))
        shard(x, world_mesh(2), (X, (0, "outer")))
        y.set_device_mesh(world_mesh(2))

    assert described(define) == ["pointwise: T0 -> T1", "communication: T1 -> T2", "pointwise: T2 -> T3"]


def test_nothing_is_joined_across_what_stands_between() -> None:
    """x feeds a reduction over ranks and is needed again after it: two kernels and a collective, in this order."""

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([8, 6])
        e = fd.ops.exp(x)
        fd.add_output(fd.ops.div(e, fd.ops.sum(e, [1], keepdim=True)))
        shard(x, world_mesh(2), (X, (1, "outer")))

    assert [line.split(":")[0] for line in described(define)] == ["reduction", "communication", "pointwise"]


def test_views_run_nothing() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([8, 6])
        fd.add_output(fd.ops.reshape(fd.ops.permute(x, [1, 0]), [2, 3, 8]))

    assert described(define) == ["no_op: T0 -> T2"]


def test_a_view_that_is_an_output_stands_between_no_two_segments() -> None:
    """Whoever reads the view makes its own copy of it: the maximum, kept as [rows, 1], is of the one kernel."""

    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([64, 512])
        top = fd.ops.max(x, [1], keepdim=True)
        fd.add_output(fd.ops.sum(fd.ops.exp(fd.ops.sub(x, top)), [1]))
        fd.add_output(top)

    assert described(define) == ["persistent: T0 -> T1 T5", "no_op: T1 -> T2"]


def test_a_call_of_torch_comes_behind_the_view_that_it_reads() -> None:
    """It makes no copy of its own."""

    def define(fd: FusionDefinition) -> None:
        turned = fd.ops.permute(fd.ops.exp(fd.define_tensor([8, 16])), [1, 0])
        fd.add_output(turned)
        fd.add_output(fd.ops.matmul(turned, fd.define_tensor([8, 4])))

    assert described(define) == ["pointwise: T0 -> T1", "no_op: T1 -> T2", "torch_call: T2 T3 -> T4"]


def test_readers_of_one_tensor_are_siblings() -> None:
    """Two outputs that read the same tensor share a kernel; two that read the same weight beside wider ones do not."""

    def matrix(fd: FusionDefinition) -> None:
        x = fd.define_tensor([64, 32])
        fd.add_output(fd.ops.exp(x))
        fd.add_output(fd.ops.neg(x))

    def vector(fd: FusionDefinition) -> None:
        x = fd.define_tensor([64])
        fd.add_output(fd.ops.exp(x))
        fd.add_output(fd.ops.sum(x))
        fd.add_output(fd.ops.max(x))

    def weight(fd: FusionDefinition) -> None:
        w = fd.define_tensor([32])
        for rows in (64, 48):
            fd.add_output(fd.ops.mul(fd.define_tensor([rows, 32]), w))

    assert described(matrix) == ["pointwise: T0 -> T1 T2"]
    assert described(vector) == ["reduction: T0 -> T1 T2 T3"]
    assert len(described(weight)) == 2


def test_every_refusal_is_kept() -> None:
    def define(fd: FusionDefinition) -> None:
        fd.add_output(fd.ops.exp(fd.define_tensor([64, 32])))

    (segment,) = segments(define)
    order = [name for name, _ in SCHEDULERS]
    assert [name for name, _ in segment.refusals] == order[: order.index("pointwise")]
    assert all(segment.refusals)


@pytest.mark.parametrize("first", [0, 200])
def test_segments_of_random_fusions(first: int) -> None:
    """A segment reads what inputs are or earlier segments store, and its scheduler takes it as it stands."""
    for seed in range(first, first + 200):
        _, case = random_case(seed + 500_000)
        case.fd.fec  # noqa: B018 shardings of inputs are settled
        plan = compile_fusion(case.fd.fusion, case.sizes or {}, device=H200)
        there = dict.fromkeys(t for t in plan.fusion.inputs)
        for planned in plan.segments:
            assert all(t in there for t in planned.segment.inputs), f"{case}\n{planned.segment}"
            there.update(dict.fromkeys(planned.segment.outputs))
            assert choose_scheduler(planned.segment, H200)[0] == planned.scheduler, f"{case}\n{planned.segment}"
        assert all(t in there for t in plan.fusion.outputs)
        made = [t for s in plan.segments for t in s.segment.outputs]
        assert len(made) == len(dict.fromkeys(made)), f"{case}: a tensor is stored twice"


def test_segments_come_in_an_order_in_which_they_can_run() -> None:
    def define(fd: FusionDefinition) -> None:
        y = fd.define_tensor([8, 16])
        for _ in range(3):
            y = fd.ops.exp(fd.ops.matmul(y, fd.define_tensor([16, 16])))
        fd.add_output(y)

    found = described(define)
    assert [line.split(":")[0] for line in found] == ["torch_call", "pointwise"] * 3
    for before, after in pairwise(found):
        assert before.split("-> ")[1] in after


@pytest.mark.parametrize("through", [[3, 2], [2, 3]])
def test_reshapes_that_share_no_cut(through: list[int]) -> None:
    """[6] as [3, 2] and as [2, 3]: no kernel walks both, also where a cast and [6] stand between."""
    x = torch.arange(6.0) - 2
    with FusionDefinition() as fd:
        first = fd.ops.reshape(fd.define_tensor([-1]), [3, 2])
        second = fd.ops.reshape(first, [2, 3])
        flat = fd.ops.cast(fd.ops.reshape(second, [6]), DataType.Double)
        fd.add_output(fd.ops.neg(second))
        fd.add_output(fd.ops.mul(fd.ops.sum(second, [0], keepdim=True), second))
        fd.add_output(fd.ops.exp(fd.ops.reshape(flat, through)))
        fd.add_output(fd.ops.add(fd.ops.reshape(fd.ops.exp(first), [2, 3]), second))
    check(fd, [x])


def test_tensors_that_are_reshaped_alike_are_one_kernel() -> None:
    """Gradients of a bias and of what follows it, as graphs of torch have them: flat, whole, flat again."""

    def define(fd: FusionDefinition) -> None:
        dy, x = (fd.ops.reshape(fd.define_tensor([64, 32]), [4, 16, 32]) for _ in range(2))
        dx = fd.ops.mul(dy, fd.ops.exp(fd.ops.mul(x, x)))
        fd.add_output(dx)
        fd.add_output(fd.ops.sum(fd.ops.reshape(dx, [64, 32]), [0]))

    (line,) = described(define)
    assert line.startswith("reduction:")


def test_empty_tensors_that_are_reshaped_to_meet() -> None:
    with FusionDefinition() as fd:
        a, b = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.add(fd.ops.reshape(a, [-1]), fd.ops.reshape(b, [-1])))
    (found,) = fd.execute([torch.zeros(0, 3), torch.zeros(0, 2)])
    assert found.shape == (0,)


def test_a_norm_whose_scale_is_made_apart_is_one_kernel() -> None:
    """Group norm as Inductor decomposes it: scale and shift of each channel first, which only the last op reads."""

    def define(fd: FusionDefinition) -> None:
        x, w = fd.define_tensor([4, 8, 64]), fd.define_tensor([8])
        var, mean = fd.ops.var_mean(fd.ops.reshape(x, [4, 2, 4, 64]), [2, 3], correction=0, keepdim=True)
        scale = fd.ops.mul(fd.ops.rsqrt(fd.ops.add(var, 1e-5)), fd.ops.reshape(w, [1, 2, 4, 1]))
        shift = fd.ops.mul(fd.ops.neg(mean), scale)
        scale, shift = (fd.ops.unsqueeze(fd.ops.reshape(t, [4, 8]), 2) for t in (scale, shift))
        fd.add_output(fd.ops.add(fd.ops.mul(x, scale), shift))

    assert [line.split(":")[0] for line in described(define)] == ["persistent"]


def test_what_has_no_elements_is_left_to_torch_alone() -> None:
    """A slice of nothing, its sum, and a cat with it; the norm beside them is one kernel as ever."""
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([6, 8]), fd.define_tensor([8])
        mean = fd.ops.mean(fd.ops.mul(x, x), [1], keepdim=True)
        fd.add_output(fd.ops.mul(fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(mean, 1e-6))), w))
        none = fd.ops.exp(fd.ops.slice(x, [0, 0], [0, 8]))
        fd.add_output(fd.ops.sum(none, [0]))
        fd.add_output(fd.ops.cat([none, fd.ops.neg(x)], 0))
    found = [
        s.scheduler for s in segment_fusion(compile_fusion(fd.fusion, {x: (6, 8), w: (8,)}, device=H200).fusion, H200)
    ]
    assert found == ["no_op", "torch_call", "torch_call", "persistent", "torch_call"]
    check(fd, [torch.randn(6, 8), torch.randn(8)])


@pytest.mark.parametrize("has_casts", [False, True])
def test_a_long_chain_is_asked_about_once_for_each_operation(has_casts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers look at each Expr of a segment that they are asked about: in all at a few for each operation."""
    seen: list[int] = []

    def counted(ask: Callable[[Segment, Device], object]) -> Callable[[Segment, Device], object]:
        def asked(segment: Segment, device: Device) -> object:
            seen.append(len(segment.exprs))
            return ask(segment, device)

        return asked

    def define(fd: FusionDefinition) -> None:
        x, y = fd.define_tensor([64]), fd.define_tensor([64])
        for k in range(300):
            x = fd.ops.add(x, y) if k % 3 else fd.ops.mul(x, 0.5)
            x = fd.ops.cast(fd.ops.cast(x, DataType.Half), DataType.Float) if has_casts else x
        fd.add_output(x)

    for ask in (choose_scheduler, is_one_kernel, lone_scheduler):
        monkeypatch.setattr(f"shardfuse.segmenter.{ask.__name__}", counted(ask))
    (segment,) = segments(define)
    assert (segment.scheduler, segment.refusals) == (
        "pointwise", choose_scheduler(segment.segment, H200)[1]
    )  # fmt: skip
    assert sum(seen) < 10 * len(segment.segment.exprs)


@pytest.mark.parametrize("seed", range(60))
def test_what_a_chain_grows_by_is_chosen_as_if_it_was_asked_about(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, schedulers and refusals are those that come where every join is asked about."""
    rng = random.Random(seed)

    def define(fd: FusionDefinition) -> None:
        made = [fd.define_tensor([8, 6]), fd.define_tensor([8, 6]), fd.define_tensor([6])]
        made += [fd.ops.permute(fd.define_tensor([6, 8]), [1, 0])]
        for _ in range(24):
            x, y = rng.choice(made[-4:]), rng.choice(made)
            kind = rng.randrange(10)
            if kind == 0:
                made.append(fd.ops.sub(x, fd.ops.sum(x, [rng.randrange(x.ndim)], keepdim=True)))
            elif kind == 1:
                made.append(fd.ops.cast(fd.ops.cast(x, DataType.BFloat16), DataType.Float))
            elif kind == 2:
                made.append(fd.ops.flip(x, [0]))
            else:
                made.append(fd.ops.add(x, y) if kind < 8 else fd.ops.exp(x))
            if rng.random() < 0.1:
                fd.add_output(made[-1])
        fd.add_output(made[-1])

    def texts() -> list[tuple[object, ...]]:
        return [(s.scheduler, s.refusals, str(s.segment), str(s.segment.outputs)) for s in segments(define)]

    found, state = texts(), rng.getstate()
    rng.seed(seed)
    monkeypatch.setattr("shardfuse.segmenter._Segmenter.lengthens", lambda *_: False)
    assert found == texts()
    assert rng.getstate() == state
