"""The host program of one rank, as it runs: a Python function and what its names stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import cast

import torch

from ..analysis.communication_table import communication_of
from ..ir.domain import BoundDomain
from ..mesh.calls import NO_CALL, Call
from ..segments.segment import Segment
from .bound_collectives import Unbound
from .kernel import Kernel
from .launch import begin_on, current_on, queue_on
from .storage import empty_on, over
from .streams import start_and_wait

Host = Callable[..., tuple[torch.Tensor | None, ...]]
FILE = "<shardfuse program>"
"""The name that tracebacks have for a program's text."""
DEVICE_CALLS = ("begin", "queue_now", "start", "wait", "empty", "over", "current_device", "on_device")
"""The names of `device_calls`, on a GPU."""


@dataclass(frozen=True, eq=False)
class Program:
    """``run(*arguments)`` gives the outputs in order; ``text`` is the source of ``body``."""

    body: Host
    """``run``, but for `on_failure`."""
    text: str
    kernels: tuple[str, ...] = ()
    """The generated sources."""
    domains: tuple[BoundDomain | None, ...] = ()
    """Of each output that is returned; ``None`` for one that comes by allocation rank."""
    functions: Mapping[str, Callable[..., object]] = field(default_factory=dict[str, Callable[..., object]])
    """What the names in ``text`` stand for."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of those that run something on the device, what they run."""
    apart: str = ""
    """``text`` with a line for each kernel, where that has one for several."""
    launched: Mapping[str, Kernel] = field(default_factory=dict[str, Kernel])
    """The kernels, by the names of their launches."""
    batches: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The launches of which a batch consists, by its name."""
    call: Call = NO_CALL
    """What its ranks know it as."""
    is_fresh: bool = False
    """Is each output contiguous, in a storage that nothing else has?"""
    by_address: frozenset[int] = frozenset()
    """Which inputs matter by their address alone, to kernels and to NCCL."""
    last_sending_line: int = 0
    """Of ``text``, counted from 1: a run that fails behind it has sent all that other ranks wait for."""
    note: Callable[[Call], None] | None = None
    """Notes each call of it, given ``call``, which the watchdog compares with the other ranks'.

    ``None`` where they send one another nothing in it.
    """
    on_failure: Callable[[Exception], None] | None = None
    """Is called with what ``body`` raises, which is raised again."""

    @cached_property
    def run(self) -> Host:
        body, on_failure = self.body, self.on_failure
        if on_failure is None:
            return body

        def run_or_tell(*arguments: object) -> tuple[torch.Tensor | None, ...]:
            try:
                return body(*arguments)
            except Exception as error:
                on_failure(error)
                raise

        return run_or_tell

    def bound_to(self, functions: Mapping[str, object]) -> Host:
        """The program with its names standing for ``functions``, kernel by kernel."""
        return bound_text(self.apart, functions)


def empty_program(outputs: int) -> Program:
    """That of a rank on which nothing runs: every output is ``None``."""
    text = f"def program(*arguments):\n    return ({'None, ' * outputs})\n"
    return Program(bound_text(text, {}), text, domains=(None,) * outputs, apart=text)


def bound_text(text: str, names: Mapping[str, object]) -> Host:
    """The program of this text."""
    space = dict(names)
    exec(compile(text, FILE, "exec"), space)
    for name, function in names.items():
        if isinstance(function, Unbound):  # from its second call on the program calls what was found
            function.tell(partial(space.__setitem__, name))
    return cast(Host, space["program"])


def device_calls(device: torch.device) -> dict[str, object]:
    """What a program calls whatever it runs, each by its name in the text: handles, storage, the stream beside."""
    start, wait = start_and_wait(device)
    calls: dict[str, object] = {"begin": begin_on(device), "queue_now": queue_on(device), "start": start, "wait": wait}
    calls |= {"empty": empty_on(device), "over": over}
    return calls | (current_on(device) if device.type == "cuda" else {})


def label_of(segment: Segment) -> str:
    """What a segment runs, and which tensors it makes."""
    kinds = [c.kind.value for e in segment.exprs if (c := communication_of(e)) is not None]
    what = " + ".join(dict.fromkeys(kinds or [e.op.name for e in segment.exprs]))
    return f"{what} {', '.join(map(str, segment.outputs))}"
