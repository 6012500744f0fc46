"""What planning leaves out: questions whose answer is known, and texts that have not changed."""

from __future__ import annotations

import pytest
from random_fusions import random_case

from shardfuse import DataType, FusionDefinition
from shardfuse.compiler import compile_fusion
from shardfuse.device import H200, Device
from shardfuse.ir.printer import fusion_text
from shardfuse.passes import PASSES, bind
from shardfuse.schedulers.choice import choose_scheduler, is_one_kernel, is_taken, lone_scheduler
from shardfuse.schedulers.features import features_or_refusal
from shardfuse.segments.online_reductions import takes_one_walk
from shardfuse.segments.segment import Segment

ROWS, COLUMNS = 4096, 16384
"""Of rows that are longer than those that are held without a look at what is needed of them."""


def norms_and_losses() -> FusionDefinition:
    """Norm, softmax, quantised blocks, cross entropy, sums of columns and chains behind them, of long rows."""
    with FusionDefinition() as fd:
        x, r = fd.define_tensor([ROWS, COLUMNS], dtype=DataType.BFloat16), fd.define_tensor([ROWS, COLUMNS])
        w, target = fd.define_tensor([COLUMNS]), fd.define_tensor([ROWS, 1], dtype=DataType.Int)
        o = fd.ops
        h = o.add(o.cast(x, DataType.Float), r)
        var, mean = o.var_mean(h, [1], 0, True)
        y = o.mul(o.mul(o.sub(h, mean), o.rsqrt(o.add(var, 1e-5))), w)
        blocks = o.reshape(o.abs(y), [ROWS, COLUMNS // 128, 128])
        scale = o.max(blocks, [2])
        e = o.exp(o.sub(y, o.max(y, [1], keepdim=True)))
        total = o.sum(e, [1], keepdim=True)
        index = o.iota(COLUMNS)
        picked = o.sum(o.where(o.eq(index, target), y, 0.0), [1])
        for out in (h, scale, o.div(e, total), o.sub(o.log(o.squeeze(total, [1])), picked), o.sum(o.mul(y, r), [0])):
            fd.add_output(out)
        fd.add_output(o.permute(o.mul(o.exp(r), 2.0), [1, 0]))
    return fd


def picked_rows() -> FusionDefinition:
    """Rows less the element that an index picks, which are stored in the one walk that their statistics take."""
    with FusionDefinition() as fd:
        x, target = fd.define_tensor([ROWS, COLUMNS]), fd.define_tensor([ROWS, 1], dtype=DataType.Int)
        o = fd.ops
        largest = o.max(x, [1], keepdim=True)
        total = o.sum(o.exp(o.sub(x, largest)), [1], keepdim=True)
        index = o.iota(COLUMNS)
        picked = o.sum(o.where(o.eq(index, target), x, 0.0), [1], keepdim=True)
        fd.add_output(o.add(o.log(total), largest))
        fd.add_output(o.sub(x, picked))
    return fd


def fusions() -> list[tuple[FusionDefinition, dict]]:
    found = [(norms_and_losses(), {}), (picked_rows(), {})]
    for seed in range(900_000, 900_120):
        _, case = random_case(seed)
        found.append((case.fd, case.sizes or {}))
    for fd, sizes in found:
        fd.fec  # noqa: B018 shardings of inputs are settled
        sizes.update({tv: tv.shape for tv in fd.fec.tensors() if tv not in sizes})
    return found


def test_what_is_joined_unasked_is_what_schedulers_would_have_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    alone: list[str | None] = []

    def joins(segment: Segment, device: Device) -> bool:
        found = is_one_kernel(segment, device)
        assert found == is_taken(segment, device), segment
        space = features_or_refusal(segment, device)
        if not isinstance(space, str) and space.r:
            assert space.takes_one_walk == takes_one_walk(segment), segment
        asked.append(found)
        return found

    def stands(segment: Segment, device: Device) -> str | None:
        found, name = lone_scheduler(segment, device), choose_scheduler(segment, device)[0]
        assert name is not None, segment
        assert found == (name if name in ("communication", "no_op", "torch_call") else None), segment
        alone.append(found)
        return found

    monkeypatch.setattr("shardfuse.segmenter.is_one_kernel", joins)
    monkeypatch.setattr("shardfuse.segmenter.lone_scheduler", stands)
    for fd, sizes in fusions():
        compile_fusion(fd.fusion, sizes, device=H200)
    assert {True, False} == set(asked)
    assert {None, "communication", "no_op"} <= set(alone)


def test_a_stage_has_the_text_that_is_printed_behind_it() -> None:
    skipped = 0
    for fd, sizes in fusions():
        plan = compile_fusion(fd.fusion, sizes, device=H200)
        bound = bind(fd.fusion, sizes)
        bound.is_settled = True
        texts = [("bind", fusion_text(bound))]
        for run in PASSES:
            run(bound)
            texts.append((run.__name__, fusion_text(bound)))
        assert list(plan.trace[:-1]) == texts
        skipped += sum(a[1] is b[1] for a, b in zip(plan.trace, plan.trace[1:], strict=False))
    assert skipped, "no stage left a fusion as it was"
