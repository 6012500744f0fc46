"""Tuning: schedules near the proposed ones are compiled, checked against them, and timed.

1. Each segment is tuned by one rank, the first of its mesh that holds some of it, on random inputs of its own shards;
   the others wait for the answer in the store.  So all ranks run the same kernels, and replicated results stay equal.
2. Whatever goes wrong there is an answer as well: then all use what was proposed, and say so.
3. Schedules decide how one rank runs a segment, never what it sends: no communication depends on an answer.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TextIO

import torch

from ..codegen.source import KernelSource
from ..config import read_settings
from ..device import device_here
from ..errors import ShardfuseError, TuningUnavailableError
from ..ir.dtype import DataType
from ..ir.expr import BoundTensor
from ..schedulers import kernels_of, makes_kernels, proposed
from ..schedulers.candidates import candidates, may_run
from ..schedulers.plan import KernelPlan
from ..schedulers.schedule import Schedule
from ..segments.segment import Segment
from .answers import answer_of, answer_once
from .choices import Tuned, choice_name, read_choice, write_choice
from .host_scalars import sample
from .kernel import Kernel
from .launch import begin_on
from .options import CompileOptions
from .program import ProgramBuilder
from .progress import Progress
from .timing import Timer, gpu_timer

_ROUNDS = 3
"""How often the neighbours of the best so far are tried."""
_WORTH = 0.98
"""A choice that takes more of the proposed time than this is not worth being another."""

Scheduled = tuple[Segment, str]
"""A segment and its scheduler."""


def check_can_tune(options: CompileOptions, device: torch.device, timer: Timer | None) -> None:
    """Raises TuningUnavailableError."""
    if options.backend_for(device) == "torch":
        raise TuningUnavailableError(f"tensors on {device.type}, which torch runs without generated kernels")
    if device.type != "cuda" and timer is None:
        raise TuningUnavailableError(f"tensors on {device.type}, where kernels have no time worth measuring")


def tune_segments(
    builder: ProgramBuilder, segments: Sequence[Scheduled | None], ranks: Sequence[int], question: str, tuner: Tuner
) -> list[Tuned | None]:
    """What is chosen for each segment; ``None`` where nothing is to choose, or tuning failed, which is said.

    segments: ``None`` for one that has the kernels of another.

    builder: of this rank, with all segments added.  ranks: those that run the program, none where that is this one
    alone.  question: a text that only they have, and have alike.  Raises RanksLateError.
    """
    owners = [
        None if s is None or not makes_kernels(s[1]) else owner_of(s[0], ranks or (builder.rank,)) for s in segments
    ]
    answers: dict[int, str] = {}
    for k, (owner, scheduled) in enumerate(zip(owners, segments, strict=True)):
        if owner == builder.rank and scheduled is not None:
            answers[k] = answer_once(
                ranks, _of_segment(question, k), lambda one=scheduled: _answer(builder, one, tuner)
            )
    for k, owner in enumerate(owners):
        if owner is not None and k not in answers:
            answers[k] = answer_of(ranks, _of_segment(question, k), owner)
    return [None if owner is None else _chosen(answers[k], k, owner) for k, owner in enumerate(owners)]


def _of_segment(question: str, k: int) -> str:
    return f"{question}\nsegment {k}"


def owner_of(segment: Segment, ranks: Sequence[int]) -> int | None:
    """The first of ``ranks`` that holds some of all tensors of ``segment``."""
    return next((r for r in ranks if all(_holds(t, r) for t in segment.tensors)), None)


def _holds(tensor: BoundTensor, rank: int) -> bool:
    mesh = tensor.domain.mesh
    return (mesh is None or rank in mesh.ranks) and 0 not in tensor.domain.local_shape(rank)


def _answer(builder: ProgramBuilder, scheduled: Scheduled, tuner: Tuner) -> str:
    try:
        return tuner.tune(builder, *scheduled).to_json()
    except Exception as error:  # noqa: BLE001 - whatever it is, other ranks wait for an answer
        return json.dumps({"failed": f"{type(error).__name__}: {error}"})


def _chosen(answer: str, k: int, owner: int) -> Tuned | None:
    tuned = Tuned.from_json(answer)
    if tuned is None:
        failed = json.loads(answer).get("failed", answer)
        warnings.warn(f"tuning segment {k} on rank {owner}: {failed}; it runs as proposed", stacklevel=2)
    return tuned


class Tuner:
    """timer: None is CUDA events behind L2 flushes.  stream: where the bar is drawn.

    seconds: for all that it tunes; left out, half of what other ranks wait for an answer.
    """

    def __init__(
        self,
        options: CompileOptions,
        timer: Timer | None,
        stream: TextIO | None,
        seconds: float | None = None,
    ) -> None:
        self.options = options
        self.timer = timer
        self.progress = Progress(stream)
        self.deadline = time.monotonic() + (read_settings().timeout / 2 if seconds is None else seconds)

    def timer_on(self, device: torch.device) -> Timer:
        if self.timer is None:
            self.timer = gpu_timer(device)
        return self.timer

    def tune(self, builder: ProgramBuilder, segment: Segment, scheduler: str) -> Tuned:
        """The choice of the disk, or that of a search, which is then kept there."""
        trial = _Trial(builder, segment, scheduler)
        schedule = proposed(scheduler, segment, trial.device)
        directory, name = self.options.cache_directory, choice_name(trial.sources(schedule), builder.device)
        kept = read_choice(directory, name)
        if kept is not None and kept.proposed == schedule and _may_run(trial, kept):
            return replace(kept, tried=0)
        found = self._search(trial, schedule)
        write_choice(directory, name, found)
        return found

    def _search(self, trial: _Trial, schedule: Schedule) -> Tuned:
        timer = self.timer_on(trial.builder.device)
        runs = {schedule: trial.first(schedule)}
        best, times = schedule, {schedule: 0.0}
        for _ in range(_ROUNDS):
            near = [c for c in candidates(trial.scheduler, trial.segment, best, trial.device) if c not in runs]
            taken = {best: runs[best], **dict(self._tried(trial, near, times))}
            runs |= taken
            if len(taken) == 1:
                break
            times |= dict(zip(taken, timer(list(taken.values())), strict=True))
            winner = min(taken, key=times.__getitem__)
            if times[winner] > _WORTH * times[best]:
                break
            best = winner
        both = list(dict.fromkeys((schedule, best)))
        final = dict(zip(both, timer([runs[p] for p in both]), strict=True))
        if final[best] > _WORTH * final[schedule]:
            best = schedule
        name = trial.plans(schedule)[0].name
        tuned = Tuned(name, schedule, best, float(final[schedule]), float(final[best]), len(runs) - 1)
        self.progress.close(name, len(runs) - 1, f"{tuned.us:.1f} us, proposed {tuned.proposed_us:.1f} us")
        return tuned

    def _tried(
        self, trial: _Trial, near: Sequence[Schedule], times: dict[Schedule, float]
    ) -> Iterator[tuple[Schedule, Callable[[], None]]]:
        """Those of ``near`` that compile, run and give the same results, as long as there is time."""
        best = min(times.values())
        for done, schedule in zip(count(1), near, strict=False):
            if time.monotonic() > self.deadline:
                return
            run = trial.checked(schedule)
            self.progress.show(trial.segment_name, done, len(near), f"best {best:.1f} us" if best else "first round")
            if run is not None:
                yield schedule, run


def _may_run(trial: _Trial, kept: Tuned) -> bool:
    is_proposed = kept.chosen == kept.proposed
    return is_proposed or may_run(trial.scheduler, trial.segment, kept.chosen, trial.device)


class _Trial:
    """One segment on random inputs, run by any schedule; the results of the first are those that count."""

    def __init__(self, builder: ProgramBuilder, segment: Segment, scheduler: str) -> None:
        self.builder = builder
        self.segment = segment
        self.scheduler = scheduler
        self.device = device_here(builder.device)
        self.env: dict[BoundTensor, torch.Tensor] = {}
        self.wanted: list[torch.Tensor] = []

    @property
    def segment_name(self) -> str:
        return f"{self.scheduler} {', '.join(map(str, self.segment.outputs))}"

    def plans(self, schedule: Schedule) -> tuple[KernelPlan, ...]:
        return kernels_of(self.scheduler, self.segment, self.device, schedule)

    def kernels(self, schedule: Schedule) -> list[Kernel]:
        """Raises KernelCompileError."""
        plans = self.plans(schedule)
        for t in (t for plan in plans for t in plan.segment.outputs):
            self.builder.contiguous(t)
        return [self.builder.compiled(plan) for plan in plans]

    def sources(self, schedule: Schedule) -> list[KernelSource]:
        return [kernel.source for kernel in self.kernels(schedule)]

    def first(self, schedule: Schedule) -> Callable[[], None]:
        """Makes inputs and outputs, and keeps the results of ``schedule``."""
        device = self.builder.device
        generator = torch.Generator(device).manual_seed(0)
        for t in self.segment.inputs:
            self.env[t] = _random(self.builder.meta[t], t.dtype, device, generator)
        for t in self.segment.outputs:
            self.env[t] = _poisoned(self.builder.meta[t], device)
        run = self.run_of(schedule)
        run()
        self.wanted = [self.env[t].clone() for t in self.segment.outputs]
        return run

    def run_of(self, schedule: Schedule) -> Callable[[], None]:
        """All kernels of the segment, one after the other; what they hand on is theirs alone."""
        own = dict(self.env)
        launches: list[tuple[Callable[..., None], Sequence[object]]] = []
        for kernel in self.kernels(schedule):
            for t in kernel.source.tensors:
                if t not in own:
                    own[t] = _poisoned(self.builder.meta[t], self.builder.device)
            arguments = [*(own[t] for t in kernel.source.tensors), *map(sample, kernel.source.scalars)]
            launches.append((kernel.launcher(), arguments))

        begin = begin_on(self.builder.device)

        def run() -> None:
            stream = begin()
            for launch, arguments in launches:
                launch(stream, *arguments)

        return run

    def checked(self, schedule: Schedule) -> Callable[[], None] | None:
        """A run of ``schedule``; ``None`` where it does not compile, does not launch, or computes something else."""
        from triton.errors import TritonError  # pyright: ignore[reportMissingTypeStubs]

        try:
            for t in self.segment.outputs:
                _poison(self.env[t])
            run = self.run_of(schedule)
            run()
            found = [self.env[t] for t in self.segment.outputs]
            is_right = all(same(x, y) for x, y in zip(found, self.wanted, strict=True))
        except (TritonError, ShardfuseError, RuntimeError):
            return None  # too much shared memory, more programs than are resident at once, no memory
        return run if is_right else None


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Are the two alike up to the order of summation?  NaN and infinities stand in the same places."""
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    wide = torch.float64 if wanted.dtype is torch.float64 else torch.float32
    a, b = found.to(wide), wanted.to(wide)
    equal = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(equal, 0.0, (a - b).abs())
    finite = torch.where(b.isfinite(), b, 0.0).abs()
    largest = finite.max() if finite.numel() else finite.sum()
    # two steps of what is stored, and what reordering a long sum moves
    tolerance = 2 * torch.finfo(wanted.dtype).eps + 64 * torch.finfo(wide).eps
    return bool((difference <= tolerance * largest).all())


def _random(like: torch.Tensor, dtype: DataType, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """In the strides of ``like``, which may be 0."""
    size = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    if dtype.is_floating:
        compute = torch.float64 if dtype is DataType.Double else torch.float32
        flat = torch.empty(size, dtype=compute, device=device).normal_(generator=generator).to(dtype.torch)
    else:
        flat = torch.randint(0, 2 if dtype is DataType.Bool else 5, (size,), device=device, generator=generator)
        flat = flat.to(dtype.torch)
    return flat.as_strided(like.shape, like.stride())


def _poisoned(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return _poison(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device))


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """An element that is not written is seen: every byte is 255, a NaN."""
    torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(255)
    return tensor
