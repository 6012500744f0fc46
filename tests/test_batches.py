"""Which launches of a program become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from shardfuse.executor.batches import batch_launches
from shardfuse.executor.kernel import Kernel
from shardfuse.executor.steps import (
    BEGIN,
    QUEUE_NOW,
    Address,
    Allocate,
    Call,
    Communicate,
    Cut,
    Guard,
    LaunchBatch,
    LaunchKernel,
    Step,
)
from shardfuse.executor.storage import LITTLE, freed
from shardfuse.executor.stream_chunks import address_chunks


class Batches:
    """Stands for the driver: a batch is the tuple of its launches."""

    def batch(self, launches: tuple[Callable[..., None], ...]) -> Any:
        return launches


def launch(name: str, function: Callable[..., object], arguments: tuple[str, ...]) -> LaunchKernel:
    """Of a kernel whose ranks exchange nothing."""
    return LaunchKernel(name, function, arguments, kernel=cast(Kernel, "a kernel"))


def with_mailbox(*_: object) -> None:
    """A launch that does more than launch."""


STEPS: list[Step] = [
    Guard(0, ("T0",)),
    BEGIN,
    Allocate("T1", (8,), (1,), torch.uint8),
    launch("kernel_0_0", len, ("T0", "T1")),
    Allocate("T2", (8,), (1,), torch.uint8, own="T0"),
    launch("kernel_1_0", min, ("T1", "T2", "S0", "3")),
]
BATCH = "batch_of_kernel_0_0(stream, T0, T1, T1, T2, S0, 3)"


def batched(steps: Sequence[Step], size: int = 8) -> list[Step]:
    made = {name: torch.empty(size, dtype=torch.uint8, device="meta") for name in ("T1", "T3", "T4")}
    return batch_launches(steps, made, Batches())


def texts(steps: Sequence[Step]) -> list[str]:
    return list(map(str, steps))


def batches_in(steps: Sequence[Step]) -> dict[str, object]:
    return {step.name: step.function for step in steps if isinstance(step, LaunchBatch)}


def test_launches_between_allocations_are_one() -> None:
    found = batched([*STEPS, Call(("T3",), "torch_3", len, ("T2",))])
    assert texts(found) == [
        "if current_device() != 0: return on_device(program, T0)",
        "stream = begin()",
        "T1 = empty((8,), (1,), uint8)",
        "T2 = T0 if own_T0 else empty((8,), (1,), uint8)",
        BATCH,
        "T3 = torch_3(T2)",
    ]
    assert batches_in(found) == {"batch_of_kernel_0_0": (len, min)}


@pytest.mark.parametrize(
    "other",
    [
        Call(("T3",), "collective_2", len, ("T2",)),
        Communicate("collective_2", len, ("T2", "T3")),
        QUEUE_NOW,
        Call((), "wait", None, ("done_0", "T2")),
        LaunchKernel("kernel_3_0", with_mailbox, ("T2",), kernel=cast(Kernel, "a kernel")),
        LaunchKernel("kernel_3_0", sum, ("T2",)),  # by a function of C's, of a kernel whose ranks exchange
        Call(("S1",), "host_0", len, ("S0",)),
    ],
    ids=str,
)
def test_whatever_else_runs_stands_between(other: Step) -> None:
    after = [other, Address("T4", "base", 512), launch("kernel_2_0", max, ("T2", "T4"))]
    found = batched([*STEPS, *after])
    assert texts(found[4:]) == [BATCH, *texts(after)]
    assert list(batches_in(found)) == ["batch_of_kernel_0_0"]


def test_large_tensors_are_made_one_by_one() -> None:
    assert len(batches_in(batched(STEPS, LITTLE))) == 1
    assert batched(STEPS, LITTLE + 1) == STEPS


CHUNKED: list[Step] = [
    BEGIN,
    Allocate("T5", (4, 6), (6, 1), torch.float32),
    Cut(("T6", "T7"), "T5", len, (0, 12)),
    launch("kernel_0_0", len, ("T0", "T6")),
    launch("kernel_1_0", min, ("T0", "T7")),
]


def test_chunks_that_kernels_alone_see_are_addresses() -> None:
    found = address_chunks(CHUNKED, ["T5"])
    assert texts(CHUNKED)[2] == "T6, T7 = chunks_T5(T5)"
    assert texts(found) == [
        *texts(CHUNKED[:2]),
        "T5_at = T5.data_ptr()",
        "T6 = T5_at + 0",
        "T7 = T5_at + 12",
        *texts(CHUNKED[3:]),
    ]
    assert texts(batched(found))[-1] == "batch_of_kernel_0_0(stream, T0, T6, T0, T7)", (
        "and their kernels are one launch"
    )
    assert str(freed(found, ["T5"])[-1]) == "del T7"


def test_chunks_that_others_see_are_views() -> None:
    others = [
        Call(("T8",), "torch_2", len, ("T6",)),
        Communicate("collective_2", len, ("T6", "T8")),
        Call((), "wait", None, ("done_0", "T7")),
    ]
    for other in others:
        steps = [*CHUNKED, other]
        assert address_chunks(steps, ["T5"]) == steps
    assert address_chunks(CHUNKED, []) == CHUNKED, "its memory would be free before the kernels run"
    whole = [*CHUNKED, Call(("T8",), "torch_2", len, ("T5",))]
    assert address_chunks(whole, []) != whole
