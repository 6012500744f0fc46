"""One piece of memory for what kernels hand to one another."""

from __future__ import annotations

import random
import re

import torch

from shardfuse.executor.storage import LITTLE, freed, share_workspace


def bytes_of(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def chain(sizes: list[int]) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Each kernel reads what the one before made; T0 is an input, the last tensor an output."""
    lines: list[str] = []
    for k, size in enumerate(sizes, 1):
        lines += [f"T{k} = empty(({size},), (1,), uint8)", f"kernel_{k}_0(stream, T{k - 1}, T{k})"]
    return lines, {f"T{k}": bytes_of(size) for k, size in enumerate(sizes, 1)}


def test_two_kernels_apart_share_bytes() -> None:
    lines, made = chain([100, 600, 100, 4])
    names: dict[str, object] = {}
    assert share_workspace(lines, made, ["T4"], names) == [
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
    assert names == {"uint8": torch.uint8}
    shared = share_workspace(lines, made, ["T4"], {})
    assert [line for line in freed(shared, ["T4"]) if line.startswith("del")] == ["del T1", "del T2", "del T3"]


def test_what_is_seen_by_more_than_kernels_is_a_tensor() -> None:
    lines, made = chain([8, 8, 8, 8, 8, 8])
    seen = [*lines, "T7 = torch_7(T3)", "wait(done_0, T5)"]
    seen[6] = "T4 = T0 if own_T0 else empty((8,), (1,), uint8)"
    shared = share_workspace(seen, made, ["T6"], {})
    assert [line for line in shared if "base +" in line] == ["T1 = base + 0", "T2 = base + 512"]


def test_much_memory_and_one_tensor_are_left() -> None:
    for sizes in ([LITTLE // 2, LITTLE // 2 + 1, 4], [8, 4]):
        lines, made = chain(sizes)
        assert share_workspace(lines, made, [f"T{len(sizes)}"], {}) == lines


def test_no_two_in_use_overlap() -> None:
    draw = random.Random(0)
    for _ in range(50):
        sizes = [draw.randrange(1, 3000) for _ in range(12)]
        lines, made = chain(sizes)
        for k in range(1, 25, 2):  # kernels read older tensors too
            older = [f"T{n}" for n in range(1, k // 2) if draw.random() < 0.3]
            lines[k] = lines[k].replace("(stream", ", ".join(["(stream", *older]))
        shared = share_workspace(lines, made, ["T12"], {})
        found = {m[1]: int(m[2]) for line in shared if (m := re.fullmatch(r"(T\d+) = base \+ (\d+)", line))}
        assert len(found) == 11
        uses = {n: [k for k, line in enumerate(shared) if n in re.findall(r"\w+", line)] for n in found}
        total = int(shared[0].split("(")[2].split(",")[0])
        for a, at in found.items():
            assert at + made[a].numel() <= total
            for b, other in found.items():
                together = uses[a][0] <= uses[b][-1] and uses[b][0] <= uses[a][-1]
                apart = at + made[a].numel() <= other or other + made[b].numel() <= at
                assert a == b or apart or not together
