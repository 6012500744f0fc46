#!/usr/bin/env python3
"""Measures shardfuse against what else there is, on one GPU; changes of sharding on several ranks.

    python benchmarks/run.py forward --json forward.json
    python benchmarks/run.py forward --case 8192x5140:float16 --only layer_norm --peers copy,inductor
    python benchmarks/run.py reduction --peers tuned          # the first launch against the one that fd.tune finds
    python benchmarks/run.py autotuned                        # the middle case of each workload against max-autotune
    python benchmarks/run.py backward --warm                  # fills the compilers' caches and measures nothing
    python benchmarks/run.py backward --write                 # benchmarks/results/, docs/measured.md, and the plot
    python benchmarks/run.py forward --read forward.json --commit 1a2b3c --write # the same from another machine's
    mpirun -n 4 python benchmarks/run.py reshard              # or by torchrun; against redistribute of DTensor
    python benchmarks/run.py models                           # training steps of whole models, against Inductor
    python benchmarks/run.py packages --only Swin             # the same of models of torchvision and transformers
    python benchmarks/run.py models --dry                     # tiny ones on the CPU: regions, and losses as eager's
    python benchmarks/run.py optimiser                        # a step of AdamW over 1,000 tensors, against torch's
    python benchmarks/run.py promises                         # what invariant="batch" costs, from 1 to 8192 rows
    python benchmarks/run.py promises_ranks                   # and invariant="ranks", on one GPU
    python benchmarks/run.py modules --only RMSNorm GELU      # shardfuse.nn's modules and functions, each way
    python benchmarks/run.py module_host --peers eager        # the host's time of a call of each, beside torch's
    python benchmarks/run.py modules --dry                    # all of them, tiny, on the CPU: results as float64's
    torchrun --nproc-per-node 2 benchmarks/run.py calls       # a call with an all-reduce, against NCCL and Inductor
    torchrun --nproc-per-node 2 benchmarks/run.py collectives # by kernels of shardfuse's own, against NCCL's
    torchrun --nproc-per-node 2 benchmarks/run.py exchange    # ranks that exchange in a kernel, in step and late
    torchrun --nproc-per-node 2 benchmarks/run.py images      # norms of images that are sharded, in step and late
    torchrun --nproc-per-node 2 benchmarks/run.py losses      # cross entropy over sharded classes; also on 1 rank
    torchrun --nproc-per-node 2 benchmarks/run.py train       # a training step, against plain torch and torch.compile
    python benchmarks/run.py groupnorm --dry --compile        # without a GPU: plans, and kernels compiled for sm_90

Times are medians of interleaved rounds behind L2 flushes; GB/s counts each input read once and each output written
once; "of copy" is against the fastest of several device-to-device copies that move as many bytes; a result is right by
the rule of benchmarks/roundings.py, element by element, and errors are ||out - ref|| / ||ref|| against float64, the
largest over the outputs.  What is wrong has no time.  Ends with code 1 where shardfuse fails or is wrong.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    os.environ.setdefault("SHARDFUSE_STRICT", "1")  # a kernel that does not compile is a failure, not a slow success

import torch

import shardfuse
from benchmarks import page, peers
from benchmarks.called import BACKWARD
from benchmarks.calls import run_calls
from benchmarks.collectives import run_collectives
from benchmarks.dry import Planned, plan_case
from benchmarks.exchange import run_exchange, run_images
from benchmarks.exchange_images import IMAGES
from benchmarks.exchange_ranks import EXCHANGE
from benchmarks.exchange_workloads import WORKLOADS as EXCHANGES
from benchmarks.host import CALLED
from benchmarks.losses import run_losses
from benchmarks.model_cases import chosen as chosen_models
from benchmarks.model_cases import model_cases
from benchmarks.model_dry import dry_models
from benchmarks.models import run_models
from benchmarks.module_dry import dry_modules
from benchmarks.optimiser import run_optimiser
from benchmarks.package_cases import package_cases, why_absent
from benchmarks.plot import plot
from benchmarks.promises import run_promises
from benchmarks.report import Results, Row, as_text, columns, has_plot
from benchmarks.reshard import run_reshard
from benchmarks.suite import OWN, STARTED, compile_tables, run_host, run_startup, run_tables
from benchmarks.train import STEPS, run_train
from benchmarks.workload import Case, CaseError, Compared, Workload
from benchmarks.workloads import SUITES, WORKLOADS
from benchmarks.workloads.modules import MODULES

Work = list[tuple[Compared, Case]]
AUTOTUNED = "copy,inductor,inductor_max_autotune"
"""Peers of the suite of that name."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.read:
        return _read(options)
    if options.suite in ON_RANKS:
        return _on_ranks(options)
    if options.suite in ON_GPU:
        return _on_gpu(options)
    try:
        return _run(options)
    except CaseError as error:
        print(error, file=sys.stderr)
        return 2


def _read(options: argparse.Namespace) -> int:
    try:
        results = Results.from_json(options.read.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = error.strerror if isinstance(error, OSError) else "holds no results that --json wrote"
        print(f"--read {options.read}: {what}", file=sys.stderr)
        return 2
    return _show(options, results)


def _run(options: argparse.Namespace) -> int:
    work = _work(options)
    if not work:
        print(f"no workload of {options.suite} takes these cases", file=sys.stderr)
        return 2
    if options.dry:
        if options.suite == "modules":
            return dry_modules({w.name: w for w, _ in work}.values())
        return _dry([(w, case) for w, case in work if isinstance(w, Workload)], compiled=options.compile)
    if not torch.cuda.is_available():
        print("no GPU is visible: --dry plans every case without one", file=sys.stderr)
        return 2
    if options.warm:
        return _warm(options, work)
    left_out = [reason for p in options.peers if (reason := peers.why_absent(p)) is not None]
    chosen = [p for p in options.peers if peers.why_absent(p) is None]
    return _measure(options, _rows(options, work, chosen), left_out)


MODELS = {"models": model_cases, "packages": package_cases}
ON_GPU = {
    "optimiser": lambda options: run_optimiser(options.seconds, torch.device("cuda", 0)),
    "promises": lambda options: run_promises(options.seconds, torch.device("cuda", 0)),
    "promises_ranks": lambda options: run_promises(options.seconds, torch.device("cuda", 0), invariant="ranks"),
    **dict.fromkeys(
        MODELS, lambda options: run_models(_models(options), torch.cuda.device_count(), profiles=options.profile)
    ),
}
"""Suites that have cases of their own."""


def _models(options: argparse.Namespace) -> list[str]:
    return chosen_models(options.only, MODELS[options.suite]())


def _on_gpu(options: argparse.Namespace) -> int:
    if options.dry and options.suite == "models":
        return dry_models(options.only)
    if not torch.cuda.is_available():
        print(f"no GPU is visible: {options.suite} runs on one", file=sys.stderr)
        return 2
    if options.suite == "packages" and (missing := [why for name in _models(options) if (why := why_absent(name))]):
        print("\n".join(missing), file=sys.stderr)
        return 2
    return _measure(options, ON_GPU[options.suite](options), [])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "suite", choices=(*SUITES, "modules", "module_host", "autotuned", "host", "compile", *ON_GPU, *ON_RANKS)
    )
    parser.add_argument("--case", nargs="+", default=[], metavar="SHAPE:DTYPE", help="instead of the public grid")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORKLOAD", help="workloads; steps of train; parts of models' names"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="of models, packages: tables of a step's kernels"
    )
    default = ",".join(p for p in peers.PEERS if p not in peers.ASKED_FOR)
    parser.add_argument("--peers", help=f"of {','.join(peers.PEERS)}; left out, {default}; autotuned: {AUTOTUNED}")
    parser.add_argument("--seconds", type=float, default=40.0, help="GPU time for all cases together")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="put the results in benchmarks/results/ and docs/")
    parser.add_argument("--warm", action="store_true", help="compile only, so that caches are filled")
    parser.add_argument("--commit", default="", help="of the code that was measured, where there was no git to ask")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take results from such JSON instead of measuring")
    parser.add_argument("--dry", action="store_true", help="plan only, without a GPU")
    parser.add_argument("--compile", action="store_true", help="with --dry: compile the kernels for sm_90")
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    if options.suite == "packages" and options.dry:
        parser.error("packages has no --dry: its models have one size, for a GPU; models --dry tries tiny ones")
    options.command = shlex.join(["benchmarks/run.py", *words])
    chosen = (AUTOTUNED if options.suite == "autotuned" else default) if options.peers is None else options.peers
    options.peers = [p for p in chosen.split(",") if p]
    own_names = {
        "models": model_cases(),
        "packages": package_cases(),
        "train": STEPS,
        "modules": MODULES,
        "module_host": MODULES,
        "exchange": EXCHANGES,
        "images": IMAGES,
    }
    workloads = own_names.get(options.suite, WORKLOADS)
    whole = [name for name in options.only if options.suite not in MODELS or not chosen_models([name], workloads)]
    for given, known in ((options.peers, peers.PEERS), (whole, workloads)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {'; '.join(unknown)}; known are {'; '.join(known)}")
    return options


def _work(options: argparse.Namespace) -> Work:
    """The cases of the suite's workloads; of those given, the ones of a rank that the workload has."""
    if options.suite == "host":
        return [(workload, Case.parse(text)) for workload, text in CALLED]
    if options.suite == "module_host":
        return [(w, Case.parse(w.tiny[0])) for w in MODULES.values() if not options.only or _is_named(w, options.only)]
    if options.suite == "compile":
        return [(WORKLOADS[STARTED[0]], Case.parse(STARTED[1]))]
    found: Work = []
    suites = {**SUITES, "modules": tuple(MODULES.values())}
    for workload in suites.get(options.suite, tuple(WORKLOADS.values())):
        if options.only and not _is_named(workload, options.only):
            continue
        own = [Case.parse(text) for text in workload.cases]
        ranks = [len(case.shape) for case in own]
        given = [Case.parse(text) for text in options.case]
        fits = [c for c in given if len(c.shape) in ranks and c.channels_last in [o.channels_last for o in own]]
        grid = [own[len(own) // 2]] if options.suite == "autotuned" else own
        found += [(workload, case) for case in (fits if given else grid)]
    return found


def _is_named(workload: Compared, names: Sequence[str]) -> bool:
    return not {workload.name, workload.name.removesuffix(BACKWARD)}.isdisjoint(names)


def _measure(options: argparse.Namespace, measured: Iterator[list[Row]], left_out: list[str]) -> int:
    rows: list[Row] = []
    for found in measured:
        rows += found
        results = Results.now(options.suite, _machine(), options.command, rows, left_out)
        _tell(options, results, found)
    return _show(options, results)


def _warm(options: argparse.Namespace, work: Work) -> int:
    """Failures are reported, and are no reason to stop: the run that measures has them too."""
    for failure in compile_tables(work, [p for p in options.peers if peers.why_absent(p) is None]):
        print(failure, file=sys.stderr, flush=True)
    return 0


ON_RANKS = {
    "reshard": lambda cases, device, *_: run_reshard(cases, device),
    "calls": lambda cases, device, *_: run_calls(cases, device),
    "collectives": lambda cases, device, *_: run_collectives(cases, device),
    "exchange": run_exchange,
    "images": lambda cases, device, only, _: run_images(cases, device, only),
    "train": lambda cases, device, only, _: run_train(cases, device, only=only),
    "losses": lambda cases, device, *_: run_losses(cases, device),
}
"""Of cases, a device, the names that ``--only`` has, and a list of sentences on what is left out, which they add to."""
ON_ANY_NUMBER = ("losses", "train")
"""Suites that have something to measure on one rank, too."""


def _on_ranks(options: argparse.Namespace) -> int:
    """On every rank; the first one tells."""
    # NVLink multicast stays off: a program that dies in it can take the GPUs of a shared host out of service.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if options.suite in ("exchange", "images") and torch.cuda.device_count() > 1:
        os.environ.setdefault(EXCHANGE, "symmetric")
    context, suite = shardfuse.initialize(), options.suite
    if context.world_size == 1 and suite not in ON_ANY_NUMBER:
        print(f"{suite} runs on several ranks: start it with torchrun or mpirun", file=sys.stderr)
        return 2
    where = _machine() if torch.cuda.is_available() else f"CPU, torch {torch.__version__}"
    rows: list[Row] = []
    left_out: list[str] = []

    def results() -> Results:
        return Results.now(suite, f"{context.world_size} x {where}", options.command, rows, left_out)

    cases = [Case.parse(text) for text in options.case]
    for found in ON_RANKS[suite](cases, context.device, options.only, left_out):
        rows += found
        if context.rank == 0:
            _tell(options, results(), found)
    shardfuse.finalize()
    return _show(options, results()) if context.rank == 0 else 0


def _tell(options: argparse.Namespace, results: Results, found: Sequence[Row]) -> None:
    """After each case, so that a run that is cut short leaves what it had."""
    if options.json:
        options.json.write_text(results.to_json())
    for row in found:
        said = [] if row.us is None else [f"{row.us:.1f} us"]
        said += [] if row.p99 is None else [f"99th {row.p99:.1f}"]
        said += [] if row.roundings is None else [f"{row.roundings:.2f} roundings"]
        said += [row.note] if row.note else []
        print(f"{row.workload} {row.case} {row.impl}: {', '.join(said)}", file=sys.stderr, flush=True)


def _show(options: argparse.Namespace, results: Results) -> int:
    print(as_text(results))
    if options.commit:
        results = replace(results, commit=options.commit)
    if options.write:
        page.save(results, page.RESULTS)
        page.main([])
        if has_plot(results) and find_spec("matplotlib") is not None:
            plot(results)
    return 1 if any(r.impl == OWN and r.note for r in results.rows) else 0


def _rows(options: argparse.Namespace, work: Work, chosen: Sequence[str]) -> Iterator[list[Row]]:
    match options.suite:
        case "host":
            return run_host(work, chosen)
        case "module_host":
            return run_host(work, chosen, in_graphs=False)
        case "compile":
            return run_startup(chosen)
        case _:
            return run_tables(work, chosen, options.seconds)


def _machine() -> str:
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


DRY_HEADERS = ("workload", "case", "kernels", "schedulers", "MB", "moved", "plan ms")


def _dry(work: list[tuple[Workload, Case]], *, compiled: bool) -> int:
    planned = [plan_case(workload, case, compiled=compiled) for workload, case in work]
    print("\n".join(columns([DRY_HEADERS, *map(_dry_cells, planned)])))
    kernels = [(p, r) for p in planned for r in p.compiled]
    for p, r in kernels:
        print(f"{p.workload} {p.case} {r}")
    if compiled:
        spilled = sum(bool(r.spills or r.stack) for _, r in kernels)
        narrow = sum(r.widest_load < 128 for _, r in kernels)
        print(f"{len(kernels)} kernels compiled for sm_90, {spilled} with spills, {narrow} without a load of 128 bits")
    return 0


def _dry_cells(p: Planned) -> tuple[str, ...]:
    """moved: what the segments read and write, over what the fusion takes and gives."""
    kernels = f"{p.kernels}" + (f" + {p.torch_calls} torch" if p.torch_calls else "")
    share = f"{p.moved / max(p.bytes, 1):.2f} x"
    return p.workload, p.case, kernels, " ".join(p.schedulers), f"{p.bytes / 1e6:.1f}", share, f"{p.seconds * 1e3:.1f}"


if __name__ == "__main__":
    sys.exit(main())
