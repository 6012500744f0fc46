"""Which generated kernels a change of the schedulers or of codegen changes: their text, launch options and grids.

    scripts/kernel_snapshot.py freeze FILE          every kernel of this tree's plans, to FILE (gzip of JSON); with
                                                    --first-of-each one plan of each kind
    scripts/kernel_snapshot.py compare OLD NEW      what differs, as a unified diff of one kernel of each workload
    scripts/kernel_snapshot.py against COMMIT       both trees frozen and compared

Plans are made for an H200 and need no GPU: every case of the benchmarks and sizes that were not tuned, in four dtypes,
forward and backward, whole and sharded over two and four ranks, what ranks exchange inside of kernels, and promises.  A
step that only moves or renames leaves all of it as it was, to the byte; any other step says which kernels it changes
and why.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.workload import Case, Workload
    from shardfuse import FusionDefinition
    from shardfuse.codegen import KernelSource
    from shardfuse.compiler import Plan

ROOT = Path(__file__).parents[1]
PLANS = 600
"""At least so many are frozen: fewer would leave forms of kernels out."""
WIDTHS = (
    *(16, 48, 96, 130, 384, 640, 1000, 1023, 1536, 2560, 3072, 5139, 7168, 10240, 14336, 24576),
    *(32001, 50257, 65537, 100352, 128257, 262144),
)
"""Lengths of rows, even and odd, short enough for a warp and too long for a team."""
ELEMENTS = 1 << 26
"""Of a tensor of many rows."""
FEW_ROWS = 8
MOST_ROWS = 1 << 16
IMAGES = (
    *("4x960x24x24", "1x128x384x384", "8x320x33x33", "2x60x32x32:groups=12", "2x120x17x17:groups=40"),
    *("3x40x64x64:groups=5", "1x256x9x64x64"),
)
"""Sizes of group norms and batch norms that were not tuned."""
OTHERS = {"sum_middle": ("48x1000x768", "2048x33x96"), "transpose": ("4097x8190", "3x1000x513")}
DTYPES = ("bfloat16", "float32", "float16", "float64")

Kernels = dict[str, dict[str, str]]
"""Of each plan, by its name: the kernels by theirs, each as one text."""


def plans(*, first_of_each: bool = False) -> Iterator[tuple[str, dict[str, str]]]:
    """Every plan of the tree that ``benchmarks`` and ``shardfuse`` are imported from, or the first of each kind."""
    for kind in (_workloads, _sharded_norms, _losses, _sharded_losses, _exchanges, _draws, _promised):
        yield from islice(kind(), 1 if first_of_each else None)


def _workloads() -> Iterator[tuple[str, dict[str, str]]]:
    """Every case of the benchmarks, whole."""
    from benchmarks.workload import Case
    from benchmarks.workloads import WORKLOADS

    for workload in WORKLOADS.values():
        for text in dict.fromkeys(cases_of(workload)):
            case = Case.parse(text)
            yield f"{workload.name} {case}", _unsharded(workload, case)


def cases_of(workload: Workload) -> Iterator[str]:
    """The public cases, in float32 too, the tiny ones, and others of their kind."""
    for text in workload.cases:
        yield text
        yield ":".join([text.split(":")[0], "float32", *text.split(":")[2:]])
    yield from workload.tiny
    yield from OTHERS.get(workload.name, ())
    sizes, *rest = workload.cases[0].split(":")
    if sizes.count("x") == 1:
        for k, width in enumerate(WIDTHS):
            for rows in (FEW_ROWS, min(MOST_ROWS, max(ELEMENTS // width, FEW_ROWS))):
                yield f"{rows}x{width}:{DTYPES[k % 2]}"
        yield from (f"2048x{width}:{dtype}" for width, dtype in product((768, 8192), DTYPES))
    elif "norm" in workload.name and "modulated" not in workload.name:
        for image, dtype in product(IMAGES, ("float16", "float32")):
            shape, *groups = image.split(":")
            yield ":".join([shape, dtype, *(part for part in rest if part == "channels_last"), *groups])


def _unsharded(workload: Workload, case: Case) -> dict[str, str]:
    import torch

    from benchmarks.workload import Draw

    inputs = workload.bind(workload.arguments(case, Draw(torch.device("meta"))))
    return _kernels(workload.fusion(case), [tuple(t.shape) for t in inputs], inputs)


def _sharded_norms() -> Iterator[tuple[str, dict[str, str]]]:
    """RMSNorm and its sum with a residual, forward and backward, as rank 0 of two and of four runs them."""
    import torch
    from torch.distributed.tensor import Partial, Replicate, Shard

    from shardfuse import DeviceMesh
    from shardfuse.nn import AddRMSNorm, RMSNorm

    placements = {"hidden": Shard(-1), "rows": Shard(0), "replicas": Replicate(), "partial": Partial()}
    shapes = ((1, 8192), (64, 8192), (4096, 4096), (2048, 5120), (512, 50256))
    for ranks, (rows, hidden), dtype in product((2, 4), shapes, (torch.bfloat16, torch.float32)):
        mesh = DeviceMesh(range(ranks))
        for name, placement in placements.items():
            made = {"mesh": mesh, "device": "meta", "dtype": dtype, "parameters": "local"}
            if name == "partial":
                module = AddRMSNorm(hidden, input=placement, residual=Replicate(), output=Replicate(), **made)
            else:
                module = RMSNorm(hidden, input=placement, **made)
            local = [-(-rows // ranks) if name == "rows" else rows, hidden // ranks if name == "hidden" else hidden]
            x = torch.empty(local, dtype=dtype, device="meta")
            op = module.op(x, x, (rows, hidden)) if name == "partial" else module.op(x, (rows, hidden))
            for way, fusion in (("forward", op.forward), ("backward", op.backward)):
                title = f"{type(module).__name__} {way} {rows}x{hidden} {dtype} {name} of {ranks}"
                yield title, _local_kernels(fusion, (rows, hidden))


def _losses() -> Iterator[tuple[str, dict[str, str]]]:
    """Cross entropy and log-probabilities of whole logits: the modules' fusions return the statistics of rows too."""
    import torch

    from shardfuse.nn import CrossEntropyLoss, LogProb

    modules = {
        "CrossEntropyLoss": CrossEntropyLoss(),
        "CrossEntropyLoss smoothed": CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-4, temperature=2.0),
        "LogProb": LogProb(),
        "LogProb entropy": LogProb(entropy=True),
    }
    shapes = ((1024, 8192), (4096, 32000), (8192, 50257), (8, 128256))
    for (rows, classes), dtype in product(shapes, (torch.bfloat16, torch.float32)):
        logits = torch.empty((rows, classes), dtype=dtype, device="meta")
        target = torch.empty((rows, 1), dtype=torch.int64, device="meta")
        for name, module in modules.items():
            op = module.bind((logits, target), None)
            for way, fusion in (("forward", op.forward), ("backward", op.backward)):
                yield f"{name} {way} {rows}x{classes} {dtype}", _local_kernels(fusion, (rows, classes))


def _sharded_losses() -> Iterator[tuple[str, dict[str, str]]]:
    """Cross entropy over classes that are sharded, evenly and unevenly, or rows, as rank 0 runs it with collectives."""
    import torch
    from torch.distributed.tensor import Shard

    from shardfuse import DeviceMesh
    from shardfuse.nn import CrossEntropyLoss

    placements = {"classes": Shard(-1), "rows": Shard(0)}
    options = {"mean": {}, "none": {"reduction": "none", "z_loss": 1e-4}, "smoothed": {"label_smoothing": 0.1}}
    shapes = ((8, 50304), (4096, 32000), (8192, 50257))
    ranks = 2
    mesh = DeviceMesh(range(ranks))
    for (rows, classes), dtype in product(shapes, (torch.bfloat16, torch.float32)):
        for (placed, placement), (name, chosen) in product(placements.items(), options.items()):
            module = CrossEntropyLoss(mesh=mesh, logits=placement, num_classes=classes, **chosen)
            local = (rows // ranks, classes) if placed == "rows" else (rows, -(-classes // ranks))
            logits = torch.empty(local, dtype=dtype, device="meta")
            target = torch.empty((local[0], 1), dtype=torch.int64, device="meta")
            op = module.bind((logits, target), (rows, classes))
            for way, fusion in (("forward", op.forward), ("backward", op.backward)):
                title = f"loss {name} {way} {rows}x{classes} {dtype} {placed} of {ranks}"
                yield title, _local_kernels(fusion, (rows, classes))


def _exchanges() -> Iterator[tuple[str, dict[str, str]]]:
    """What ranks exchange inside of kernels, of even and uneven shards, as the first and the last rank run it."""
    from shardfuse import DataType
    from tests.exchange_cases import KINDS, LOSS, define, define_backward, plan_of

    shapes = ((1, 8192), (8, 8192), (64, 1024), (4096, 8192), (16384, 512), (8, 8191), (2048, 50257))
    for ranks, (rows, n) in product((2, 3, 8), shapes):
        dtype = DataType.BFloat16 if rows > 1 else DataType.Half
        title = f"{rows}x{n} {dtype.name} of {ranks}"
        for kind in (*KINDS, LOSS):
            yield f"exchange {kind} {title}", _of_ranks(plan_of(define(kind, n, ranks, dtype), rows), ranks)
        if n % ranks == 0:
            yield f"exchange backward {title}", _of_ranks(plan_of(define_backward(n, ranks, dtype), rows), ranks)
        fd = define("rms_norm", n, ranks, dtype, gives_rms=True)
        yield f"exchange rms_norm and rms {title}", _of_ranks(plan_of(fd, rows), ranks)


def _draws() -> Iterator[tuple[str, dict[str, str]]]:
    """Dropout, residual and norm, by a seed that is a number, and by one that is a tensor where the tree has the op."""
    import torch

    from shardfuse import DataType, FusionDefinition
    from shardfuse.ops.table import POINTWISE

    ways = ("number", *(["tensor"] if "philox_uniform" in POINTWISE else []))
    shapes = ((8192, 1024), (8192, 768), (16384, 1600), (2048, 1280), (64, 93), (512, 16384))
    for (rows, n), dtype, way in product(shapes, (DataType.BFloat16, DataType.Float), ways):
        with FusionDefinition() as fd:
            x, residual = (fd.define_tensor([rows, n], contiguity=True, dtype=dtype) for _ in range(2))
            if way == "number":
                dropped = fd.ops.dropout(x, 0.1, fd.define_scalar(dtype=DataType.Int), 0)
            else:
                places = fd.ops.reshape(fd.ops.iota(rows * n), [rows, n])
                drawn = fd.ops.philox_uniform(fd.define_tensor([], dtype=DataType.Int), places)
                dropped = fd.ops.where(fd.ops.gt(drawn, 0.1), x, 0.0)
            y = fd.ops.add(dropped, residual)
            fd.add_output(fd.ops.mul(y, fd.ops.rsqrt(fd.ops.mean(fd.ops.mul(y, y), [1], True))))
        tensors = fd.fec.tensors()
        inputs = [torch.empty([rows, n][: t.ndim], dtype=t.dtype.torch, device="meta") for t in tensors]
        title = f"dropout and norm {rows}x{n} {dtype.name}, seed a {way}"
        yield title, _kernels(fd, [tuple(x.shape) for x in inputs], inputs)


def _promised() -> Iterator[tuple[str, dict[str, str]]]:
    """Fusions that promise the same bits for any batch, of one row, few and many."""
    import torch

    from benchmarks.promises import CASES, OTHER_WIDTHS, WIDTHS, define
    from shardfuse import DataType

    for name, dtype in product(CASES, (DataType.BFloat16, DataType.Float)):
        for n, rows in product((256, 1000, *WIDTHS.get(name, OTHER_WIDTHS)), (1, FEW_ROWS, 512)):
            fd = define(name, n, dtype)
            shapes = [tuple(rows if k < 0 else k for k in t.shape) for t in fd.fec.tensors()]
            inputs = [
                torch.empty(shape, dtype=t.dtype.torch, device="meta")
                for t, shape in zip(fd.fec.tensors(), shapes, strict=True)
            ]
            yield f"promised {name} {rows}x{n} {dtype.name}", _kernels(fd, shapes, inputs)


def _of_ranks(plan: Plan, ranks: int) -> dict[str, str]:
    """The kernels of the first and the last of so many ranks, and what Triton's interpreter runs of the first."""
    from shardfuse.codegen import generate

    found = {}
    for (k, kernel), (rank, interpret) in product(
        enumerate(kernel for s in plan.segments for kernel in s.kernels), ((0, False), (ranks - 1, False), (0, True))
    ):
        layouts = {t: t.domain.layout(rank) for t in (*kernel.segment.inputs, *kernel.segment.outputs)}
        source = generate(kernel, layouts, rank, interpret=interpret)
        found[f"{k} {source.name} rank {rank}{' interpreted' if interpret else ''}"] = _described(source)
    return found


def _local_kernels(fusion: FusionDefinition, sizes: tuple[int, ...]) -> dict[str, str]:
    """The kernels of rank 0: its tensors are as large as its allocation says."""
    import torch

    tensors = fusion.fec.tensors()
    shapes = [tuple(n if n >= 0 else sizes[k - t.ndim] for k, n in enumerate(t.shape)) for t in tensors]
    bound = [v for v in fusion.fec.plan(dict(zip(tensors, shapes, strict=True))).fusion.inputs if hasattr(v, "domain")]
    inputs = [torch.empty(v.domain.local_shape(0), dtype=v.dtype.torch, device="meta") for v in bound]
    return _kernels(fusion, shapes, inputs)


def _kernels(fusion: FusionDefinition, shapes: list[tuple[int, ...]], inputs: list) -> dict[str, str]:
    from benchmarks.sm90 import sources_of

    plan = fusion.fec.plan(dict(zip(fusion.fec.tensors(), shapes, strict=True)))
    found = {}
    for k, source in enumerate(sources_of(plan, inputs)):
        found[f"{k} {source.name}"] = _described(source)
    return found


def _described(source: KernelSource) -> str:
    options = f"warps {source.num_warps}, stages {source.num_stages}, registers {source.max_registers}"
    launch = f"grid {source.grid}, {options}, mailbox {source.mailbox}, cooperative {source.is_cooperative}"
    return f"# {launch}\n{source.text}"


def freeze(path: Path, *, first_of_each: bool) -> int:
    """Write every kernel to ``path``; how many plans there are."""
    found = dict(plans(first_of_each=first_of_each))
    with gzip.open(path, "wt") as file:
        json.dump(found, file)
    return len(found)


def compare(old: Path, new: Path) -> list[str]:
    """Lines about what differs; none where nothing does."""
    before, after = (json.loads(gzip.decompress(p.read_bytes())) for p in (old, new))
    lines = [f"no longer planned: {name}" for name in before.keys() - after.keys()]
    lines += [f"not planned before: {name}" for name in after.keys() - before.keys()]
    shown: set[str] = set()
    for name in sorted(before.keys() & after.keys()):
        if before[name] == after[name]:
            continue
        lines.append(f"other kernels: {name}")
        if name.split()[0] not in shown:
            shown.add(name.split()[0])
            texts = ["\n".join(kernels.values()).splitlines() for kernels in (before[name], after[name])]
            lines += difflib.unified_diff(*texts, "before", "after", lineterm="", n=2)
    return lines


def against(commit: str) -> list[str]:
    """This tree's kernels beside those of ``commit``, both frozen by this script."""
    with tempfile.TemporaryDirectory() as directory:
        there, files = Path(directory) / "tree", [Path(directory) / name for name in ("old.gz", "new.gz")]
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", there, commit], check=True)
        try:
            jobs = [
                subprocess.Popen(
                    [sys.executable, __file__, "freeze", path],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(_folders(tree))},
                )
                for tree, path in zip((there, ROOT), files, strict=True)
            ]
            codes = [job.wait() for job in jobs]
            if any(codes):
                sys.exit("kernel_snapshot: a tree could not be frozen")
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", there], check=True)
        return compare(*files)


def _folders(tree: Path) -> tuple[str, str]:
    """Where a process finds the tree's own modules, those that its tests share among them."""
    return str(tree), str(tree / "tests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    frozen = commands.add_parser("freeze")
    frozen.add_argument("file", type=Path)
    frozen.add_argument("--first-of-each", action="store_true", help="one plan of each kind: to try this script")
    both = commands.add_parser("compare")
    both.add_argument("old", type=Path)
    both.add_argument("new", type=Path)
    commands.add_parser("against").add_argument("commit")
    given = parser.parse_args()
    if given.command == "freeze":
        sys.path += [folder for folder in _folders(ROOT) if folder not in sys.path]
        count = freeze(given.file, first_of_each=given.first_of_each)
        print(f"{count} plans")
        is_whole = given.first_of_each or count >= PLANS
        sys.exit(0 if is_whole else f"kernel_snapshot: {count} plans, at least {PLANS} are expected")
    lines = compare(given.old, given.new) if given.command == "compare" else against(given.commit)
    print("\n".join(lines) or "no kernel differs")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
