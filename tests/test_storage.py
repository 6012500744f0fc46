"""One piece of memory for what kernels hand to one another."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from shardfuse.executor.steps import Address, Allocate, Call, LaunchKernel, Step
from shardfuse.executor.storage import LITTLE, freed, share_workspace


def bytes_of(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def allocated(name: str, size: int, own: str = "") -> Allocate:
    return Allocate.like(name, bytes_of(size), own)


def chain(sizes: list[int]) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """Each kernel reads what the one before made; T0 is an input, the last tensor an output."""
    steps: list[Step] = []
    for k, size in enumerate(sizes, 1):
        steps += [allocated(f"T{k}", size), LaunchKernel(f"kernel_{k}_0", len, (f"T{k - 1}", f"T{k}"))]
    return steps, {f"T{k}": bytes_of(size) for k, size in enumerate(sizes, 1)}


def test_two_kernels_apart_share_bytes() -> None:
    steps, made = chain([100, 600, 100, 4])
    shared = share_workspace(steps, made, ["T4"])
    assert list(map(str, shared)) == [
        "workspace = empty((1536,), (1,), uint8)",
        "base = workspace.data_ptr()",
        "T1 = base + 0",
        "kernel_1_0(stream, T0, T1)",
        "T2 = base + 512",
        "kernel_2_0(stream, T1, T2)",
        "T3 = base + 0",
        "kernel_3_0(stream, T2, T3)",
        "T4 = empty((4,), (1,), uint8)",
        "kernel_4_0(stream, T3, T4)",
    ]
    ends = [str(step) for step in freed(shared, ["T4"]) if step not in shared]
    assert ends == ["del T1", "del T2", "del T3"]


def test_what_is_seen_by_more_than_kernels_is_a_tensor() -> None:
    steps, made = chain([8, 8, 8, 8, 8, 8])
    seen = [*steps, Call(("T7",), "torch_7", len, ("T3",)), Call((), "wait", None, ("done_0", "T5"))]
    seen[6] = allocated("T4", 8, own="T0")
    shared = share_workspace(seen, made, ["T6"])
    assert [str(step) for step in shared if isinstance(step, Address)][1:] == ["T1 = base + 0", "T2 = base + 512"]


def test_much_memory_and_one_tensor_are_left() -> None:
    for sizes in ([LITTLE // 2, LITTLE // 2 + 1, 4], [8, 4]):
        steps, made = chain(sizes)
        assert share_workspace(steps, made, [f"T{len(sizes)}"]) == steps


def test_no_two_in_use_overlap() -> None:
    draw = random.Random(0)
    for _ in range(50):
        sizes = [draw.randrange(1, 3000) for _ in range(12)]
        steps, made = chain(sizes)
        for k in range(1, 25, 2):  # kernels read older tensors too
            older = [f"T{n}" for n in range(1, k // 2) if draw.random() < 0.3]
            launch = steps[k]
            assert isinstance(launch, LaunchKernel)
            steps[k] = replace(launch, arguments=(*older, *launch.arguments))
        shared = share_workspace(steps, made, ["T12"])
        found = {s.name: s.offset for s in shared if isinstance(s, Address) and s.offset is not None}
        assert len(found) == 11
        uses = {name: [k for k, step in enumerate(shared) if step.mentions(name)] for name in found}
        workspace = shared[0]
        assert isinstance(workspace, Allocate)
        for a, at in found.items():
            assert at + made[a].numel() <= workspace.shape[0]
            for b, other in found.items():
                together = uses[a][0] <= uses[b][-1] and uses[b][0] <= uses[a][-1]
                apart = at + made[a].numel() <= other or other + made[b].numel() <= at
                assert a == b or apart or not together
