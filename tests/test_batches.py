"""Which launches of a program become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardfuse.executor.batches import batch_launches
from shardfuse.executor.storage import LITTLE, freed
from shardfuse.executor.stream_chunks import address_chunks


class Batches:
    """Stands for the driver: a batch is the tuple of its launches."""

    def batch(self, launches: tuple[Callable[..., None], ...]) -> Any:
        return launches


def with_mailbox(*_: object) -> None:
    """A launch that does more than launch."""


NAMES = {"kernel_0_0": len, "kernel_1_0": min, "kernel_2_0": max, "kernel_3_0": with_mailbox}
LINES = [
    "if current_device() != 0: return on_device(program, T0)",
    "stream = begin()",
    "T1 = empty((8,), (1,), uint8)",
    "kernel_0_0(stream, T0, T1)",
    "T2 = T0 if own_T0 else empty((8,), (1,), uint8)",
    "kernel_1_0(stream, T1, T2, S0, 3)",
]


def batched(lines: list[str], size: int = 8) -> tuple[list[str], dict[str, object]]:
    names: dict[str, object] = dict(NAMES)
    made = {name: torch.empty(size, dtype=torch.uint8, device="meta") for name in ("T1", "T3", "T4")}
    found = batch_launches(lines, made, names, Batches(), {})
    return found, {name: value for name, value in names.items() if name not in NAMES}


def test_launches_between_allocations_are_one() -> None:
    lines, names = batched([*LINES, "T3 = torch_3(T2)"])
    assert lines == [
        *LINES[:3],
        "T2 = T0 if own_T0 else empty((8,), (1,), uint8)",
        "batch_of_kernel_0_0(stream, T0, T1, T1, T2, S0, 3)",
        "T3 = torch_3(T2)",
    ]
    assert names == {"batch_of_kernel_0_0": (len, min)}


def test_whatever_else_runs_stands_between() -> None:
    for other in ("T3 = collective_2(T2)", "wait(done_0, T2)", "kernel_3_0(stream, T2)", "S1 = host_0(S0)"):
        lines, names = batched([*LINES, other, "T4 = base + 512", "kernel_2_0(stream, T2, T4)"])
        assert lines[4:] == [
            "batch_of_kernel_0_0(stream, T0, T1, T1, T2, S0, 3)",
            other,
            "T4 = base + 512",
            "kernel_2_0(stream, T2, T4)",
        ]
        assert list(names) == ["batch_of_kernel_0_0"]


def test_large_tensors_are_made_one_by_one() -> None:
    assert len(batched(LINES, LITTLE)[1]) == 1
    assert batched(LINES, LITTLE + 1) == (LINES, {})


CHUNKED = [
    "stream = begin()",
    "T5 = empty((4, 6), (6, 1), float32)",
    "T6, T7 = chunks_T5(T5)",
    "kernel_0_0(stream, T0, T6)",
    "kernel_1_0(stream, T0, T7)",
]


def addressed(lines: list[str], *outputs: str) -> list[str]:
    """``lines`` with what address_chunks makes of them, where T5 is cut along its second dim."""
    whole = torch.empty(4, 6, device="meta")
    meta: dict[Any, torch.Tensor] = {"T5": whole, "T6": whole[:, :3], "T7": whole[:, 3:]}
    return address_chunks(lines, meta, outputs)


def test_chunks_that_kernels_alone_see_are_addresses() -> None:
    found = addressed(CHUNKED, "T5")
    assert found == [
        *CHUNKED[:2],
        "T5_at = T5.data_ptr()",
        "T6 = T5_at + 0",
        "T7 = T5_at + 12",
        *CHUNKED[3:],
    ]
    lines, _ = batched(found)
    assert lines[-1] == "batch_of_kernel_0_0(stream, T0, T6, T0, T7)", "and their kernels are one launch"
    assert freed(found, ["T5"])[-1] == "del T7"


def test_chunks_that_others_see_are_views() -> None:
    for other in ("T8 = torch_2(T6)", "collective_2(queue, T6, T8)", "wait(done_0, T7)"):
        lines = [*CHUNKED, other]
        assert addressed(lines, "T5") == lines
    assert addressed(CHUNKED) == CHUNKED, "its memory would be free before the kernels run"
    assert addressed([*CHUNKED, "T8 = torch_2(T5)"]) != [*CHUNKED, "T8 = torch_2(T5)"]
