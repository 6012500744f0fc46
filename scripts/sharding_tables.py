"""Writes the tables of docs/sharding.md: `python scripts/sharding_tables.py [--check]`.

Changes of sharding are run, on simulated ranks with real values, and what they took is what the table says. What
DTensor does is counted on torch's fake process group, in a process of its own. --check says whether the page is up to
date.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
PAGE = ROOT / "docs" / "sharding.md"
RANKS = 8


# --- changes of sharding, run ------------------------------------------------------------------------------


def change_tables() -> str:
    from resharding_cases import PARTIAL, WHOLE, Case, Placed, run

    import shardfuse

    def took(cases: Sequence[Case], size: int) -> list[tuple[Any, ...]]:
        def rank_main() -> list[tuple[Any, ...]]:
            rank = shardfuse.initialize().rank
            return [run(case, rank).collectives for case in cases]

        return shardfuse.simulate(rank_main, size)[0]

    names = {
        "replicated": WHOLE,
        "partial sums": PARTIAL,
        "rows": Placed("outer", 0),
        "columns": Placed("outer", 1),
        "cyclic rows": Placed("inner", 0),
        "block-cyclic(2) rows": Placed("blocks", 0),
    }
    targets = {name: placed for name, placed in names.items() if placed is not PARTIAL}
    pairs = [(a, b) for a in names for b in targets]
    cases = [Case((4,), (32, 32, 16), (names[a],), (targets[b],)) for a, b in pairs]
    cells = {pair: cell(found) for pair, found in zip(pairs, took(cases, 4), strict=True)}
    first = table(["from \\ to", *targets], [[a, *(cells[a, b] for b in targets)] for a in names])

    rows, columns = Placed("outer", 0), Placed("outer", 1)
    compound = {
        "(rows, columns) to (columns, rows)": Case((2, 4), (32, 32, 16), (rows, columns), (columns, rows)),
        "(rows, rows) to (columns, columns)": Case((2, 4), (32, 32, 16), (rows, rows), (columns, columns)),
        "rows by y then x, to rows by x then y": Case((2, 4), (32, 32, 16), (rows, rows), (rows, rows), (False, True)),
        "(rows, columns) to replicated": Case((2, 4), (32, 32, 16), (rows, columns), (WHOLE, WHOLE)),
        "(rows, replicated) to (replicated, rows)": Case((2, 4), (32, 32, 16), (rows, WHOLE), (WHOLE, rows)),
        "(rows, replicated) to (columns, rows)": Case((2, 4), (32, 32, 16), (rows, WHOLE), (columns, rows)),
        "replicated to (rows, columns)": Case((2, 4), (32, 32, 16), (WHOLE, WHOLE), (rows, columns)),
        "(partial, partial) to replicated": Case((2, 4), (32, 32, 16), (PARTIAL, PARTIAL), (WHOLE, WHOLE)),
        "(partial, partial) to (replicated, rows)": Case((2, 4), (32, 32, 16), (PARTIAL, PARTIAL), (WHOLE, rows)),
        "(partial, rows) to (columns, rows)": Case((2, 4), (32, 32, 16), (PARTIAL, rows), (columns, rows)),
        "(rows, cyclic columns) to (columns, rows)": Case(
            (2, 4), (32, 32, 16), (rows, Placed("inner", 1)), (columns, rows)
        ),
    }
    chains = [
        [name, cell(found)] for (name, _), found in zip(compound.items(), took(list(compound.values()), 8), strict=True)
    ]
    return f"{first}\n\n{table(['change on a mesh of 2 x 4 (mesh_y, mesh_x)', 'collectives'], chains)}"


def cell(found: Sequence[Any]) -> str:
    if not found:
        return "–"
    return ", ".join(f"{c.kind} over {' and '.join(map(str, c.mesh_dims))}, {kilobytes(c.bytes)}" for c in found)


def kilobytes(n: float) -> str:
    if n >= 2**20:
        return f"{n / 2**20:.3g} MB"
    return f"{n / 1024:.3g} KB" if n >= 1024 else f"{n:g} B"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- norms over sharded axes, planned by shardfuse and counted in DTensor -----------------------------------

LINE, SQUARE = (RANKS,), (2, RANKS // 2)
# The op, its shape, the mesh, and the axis that each mesh dimension cuts.
OPS = {
    "rms_norm, hidden axis sharded": ("rms_norm", (1024, 4096), LINE, (1,)),
    "layer_norm, hidden axis sharded": ("layer_norm", (1024, 4096), LINE, (1,)),
    "softmax, its axis sharded": ("softmax", (1024, 4096), LINE, (1,)),
    "var, its axis sharded": ("var", (1024, 4096), LINE, (1,)),
    "group_norm, channels sharded": ("group_norm", (16, 64, 32, 32), LINE, (1,)),
    "batch_norm, batch sharded": ("batch_norm", (64, 64, 16, 16), LINE, (0,)),
    "layer_norm, hidden axis over both of 2 x 4": ("layer_norm", (1024, 4096), SQUARE, (1, 1)),
    "softmax, its axis over both of 2 x 4": ("softmax", (1024, 4096), SQUARE, (1, 1)),
    "batch_norm, batch and height over 2 x 4": ("batch_norm", (64, 64, 16, 16), SQUARE, (0, 2)),
}


def norm_table() -> str:
    counted = subprocess.run([sys.executable, __file__, "--dtensor"], check=True, capture_output=True, text=True)
    theirs = dict(line.split("\t") for line in counted.stdout.splitlines())
    rows = [
        [
            name,
            theirs[f"{name} forward"],
            theirs[f"{name} backward"],
            planned(op, shape, over, axes, False),
            planned(op, shape, over, axes, True),
        ]
        for name, (op, shape, over, axes) in OPS.items()
    ]
    head = ["8 ranks, float32", "DTensor forward", "DTensor backward", "shardfuse forward", "shardfuse backward"]
    return table(head, rows)


def planned(op: str, shape: tuple[int, ...], over: tuple[int, ...], axes: tuple[int, ...], backward: bool) -> str:
    import torch

    from shardfuse import DeviceMesh, FusionDefinition

    mesh = DeviceMesh(torch.arange(RANKS).reshape(over))
    with FusionDefinition() as fd:
        x = fd.define_tensor(list(shape), contiguity=True)
        g = fd.define_tensor(list(shape), contiguity=True) if backward else None
        for out in FORWARD[op](fd, x) if g is None else BACKWARD[op](fd, x, g):
            fd.add_output(out)
        for t in (x,) if g is None else (x, g):
            t.set_device_mesh(mesh)
            left = list(t.domain.loop)
            for p, n, axis in zip(mesh.parallel_types, over, axes, strict=True):
                at = t.domain.loop.index(left[axis])
                t.outer_split(at, n)
                t.axis(at).parallelize(p)
                left[axis] = t.domain.loop[at + 1]
    found = fd.explain().collectives
    return "–" if not found else ", ".join(f"{c.kind} {kilobytes(c.bytes)}" for c in found)


def forward_norm(fd: Any, x: Any, axes: Sequence[int], *, centred: bool) -> list[Any]:
    if not centred:
        mean = fd.ops.mean(fd.ops.mul(x, x), list(axes), keepdim=True)
        return [fd.ops.mul(x, fd.ops.rsqrt(fd.ops.add(mean, 1e-5)))]
    var, mean = fd.ops.var_mean(x, list(axes), 0, keepdim=True)
    return [fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(fd.ops.add(var, 1e-5)))]


def forward_groups(fd: Any, x: Any) -> list[Any]:
    n, c, h, w = x.shape
    (y,) = forward_norm(fd, fd.ops.reshape(x, [n, 16, c // 16, h, w]), (2, 3, 4), centred=True)
    return [fd.ops.reshape(y, [n, c, h, w])]


def forward_softmax(fd: Any, x: Any) -> list[Any]:
    e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True)))
    return [fd.ops.truediv(e, fd.ops.sum(e, [1], keepdim=True))]


def backward_norm(fd: Any, unit: Any, g: Any, axes: Sequence[int], *, centred: bool) -> list[Any]:
    """From the normed tensor; the scale by rstd, which every rank has, changes no collective."""
    along = fd.ops.mul(unit, fd.ops.mean(fd.ops.mul(g, unit), list(axes), keepdim=True))
    d = fd.ops.sub(g, along)
    return [fd.ops.sub(d, fd.ops.mean(g, list(axes), keepdim=True)) if centred else d]


def backward_groups(fd: Any, x: Any, g: Any) -> list[Any]:
    n, c, h, w = x.shape
    split = [n, 16, c // 16, h, w]
    (d,) = backward_norm(fd, fd.ops.reshape(x, split), fd.ops.reshape(g, split), (2, 3, 4), centred=True)
    return [fd.ops.reshape(d, [n, c, h, w])]


FORWARD: dict[str, Callable[[Any, Any], list[Any]]] = {
    "rms_norm": lambda fd, x: forward_norm(fd, x, (1,), centred=False),
    "layer_norm": lambda fd, x: forward_norm(fd, x, (1,), centred=True),
    "softmax": forward_softmax,
    "var": lambda fd, x: [fd.ops.var(x, [1])],
    "group_norm": forward_groups,
    "batch_norm": lambda fd, x: forward_norm(fd, x, (0, 2, 3), centred=True),
}
BACKWARD: dict[str, Callable[[Any, Any, Any], list[Any]]] = {
    "rms_norm": lambda fd, x, g: backward_norm(fd, x, g, (1,), centred=False),
    "layer_norm": lambda fd, x, g: backward_norm(fd, x, g, (1,), centred=True),
    "softmax": lambda fd, y, g: [fd.ops.mul(y, fd.ops.sub(g, fd.ops.sum(fd.ops.mul(g, y), [1], keepdim=True)))],
    "var": lambda fd, centred, g: [fd.ops.mul(centred, g)],
    "group_norm": backward_groups,
    "batch_norm": lambda fd, x, g: backward_norm(fd, x, g, (0, 2, 3), centred=True),
}


def call(torch: Any, op: str, x: Any, weight: Any) -> Any:
    """What a user of torch calls."""
    functional = torch.nn.functional
    match op:
        case "rms_norm" | "layer_norm":
            return getattr(functional, op)(x, x.shape[1:], weight)
        case "softmax":
            return torch.softmax(x, 1)
        case "var":
            return x.var(1)
        case "group_norm":
            return functional.group_norm(x, 16)
        case _:
            return functional.batch_norm(x, None, None, training=True)


def count_dtensor() -> None:
    """Prints for each op what DTensor communicates, forward and backward."""
    import warnings

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    meshes = {over: init_device_mesh("cpu", over) for over in (LINE, SQUARE)}

    class Counter(TorchDispatchMode):
        """Collectives, and the larger of the bytes that one gives and gets."""

        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(t, DTensor) for t in types):
                return NotImplemented
            out = func(*args, **(kwargs or {}))
            kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
            if func.namespace == "_c10d_functional" and func.name().split("::")[1].startswith(kinds):
                sizes = [t.numel() * t.element_size() for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
                name = func.name().split("::")[1].replace("_into_tensor", "").replace("_tensor", "")
                self.found.append(f"{name} {kilobytes(max(sizes))}")
            return out

    for name, (op, shape, over, axes) in OPS.items():
        told = ["forward", "backward"]
        try:
            x = distribute_tensor(torch.randn(shape), meshes[over], [Shard(axis) for axis in axes]).requires_grad_()
            along = [Shard(0) if axis == 1 else Replicate() for axis in axes]
            weight = distribute_tensor(torch.ones(shape[1]), meshes[over], along)
            with Counter() as counter:
                y = call(torch, op, x, weight)
            print(f"{name} {told.pop(0)}\t{', '.join(counter.found) or '–'}")
            with Counter() as counter:
                y.backward(torch.ones_like(y))
            print(f"{name} {told.pop(0)}\t{', '.join(counter.found) or '–'}")
        except Exception as error:  # noqa: BLE001 that DTensor raises is what the table says
            for what in told:
                print(f"{name} {what}\t{'raises ' + type(error).__name__ if what == told[0] else 'raises'}")


# --- the page ----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    if "--dtensor" in arguments:
        count_dtensor()
        return 0
    page = PAGE.read_text()
    for name, make in (("changes", change_tables), ("norms", norm_table)):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{make()}\n\n{end}{rest.split(end)[1]}"
    if "--check" in arguments:
        return int(page != PAGE.read_text())
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
