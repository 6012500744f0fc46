"""In which collective of a program this rank waits, and what it reports to the other ranks about that.

A rank that has waited in a collective for seconds publishes in its record in which one, and how many collectives it
has issued in each process group.  Such a record proves something: collective 7 of a group cannot end before each of
its ranks has issued 7.  So as long as a rank of the group has issued fewer and waits itself, this one waits for it.  A
circle of such waits is a deadlock, whatever else is slow; `executor/circles.py` looks for it.

On a GPU the host does not wait in its collectives.  There it is the GPU whose wait is reported, after a longer time, in
one of the process groups of which the rank has issued more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from shardfuse.errors import PeerLostError, ShardfuseError
from shardfuse.mesh.calls import NO_CALL, Call
from shardfuse.mesh.groups import group_sequences, name_of_group

if TYPE_CHECKING:
    from shardfuse.mesh.watchdog import Fault

REPORTED_AFTER = 2.0
"""Seconds in a collective after which a rank reports it: that costs the others a text to read."""
GPU_REPORTED_AFTER = 10.0
"""The same of a collective on the GPU: the host goes on meanwhile."""
COMMUNICATION_PATIENCE = 3.0
"""Seconds to find the rank behind a collective that failed, which wait in vain where torch itself is the reason.

One that was killed or has left is known within 10 ms (2 and 4 ranks on 2 cores that others keep busy, 2026-11-23).
Calls that differ are named by the fourth of their comparisons, of which there are two a second (``calls.py``)."""


class ReportedWait(NamedTuple):
    """The collective that a rank waits in, as it reports it.

    serial: the number of this wait; the same number is the same wait. groups: the ranks of each process group, by
    name, to which the collective may belong.
    """

    serial: int
    groups: Mapping[str, Sequence[int]]

    def missing(self, issued: Mapping[str, int], rank: int, others: Mapping[str, int]) -> bool:
        """Has ``rank``, which has issued ``others``, not come to the collective of a rank that has ``issued``?"""
        return any(
            rank in ranks and name in others and name in issued and others[name] < issued[name]
            for name, ranks in self.groups.items()
        )


class CollectiveWait:
    """``with wait.within(group):`` around a collective that the host waits in.  One thread does at a time.

    A collective that fails because of another rank is a PeerLostError that names it, where that is found out in time:
    gloo says of it that a connection was closed.

    call: the program that this rank called last. culprit: what explains that a collective failed here, where it is
    found within so many seconds.
    """

    def __init__(self, rank: int = 0, culprit: Callable[[float], Fault | None] = lambda patience: None) -> None:
        self._rank, self._culprit = rank, culprit
        self.latest: list[Call] = [NO_CALL]
        self._group: dist.ProcessGroup | None = None
        self._serial = 0
        self._since = 0.0

    @property
    def call(self) -> Call:
        return self.latest[0]

    def within(self, group: dist.ProcessGroup) -> CollectiveWait:
        self._since = time.monotonic()
        self._serial += 1
        self._group = group
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group = None
        if isinstance(error, RuntimeError) and not isinstance(error, ShardfuseError):
            fault = self._culprit(COMMUNICATION_PATIENCE)
            if fault is not None and fault.rank is not None and fault.rank != self._rank:
                raise PeerLostError(fault.rank, fault.reason) from error

    def waited(self) -> float:
        """Seconds for which the host has been waiting in a collective; 0 where it waits in none."""
        group = self._group  # read first: what is told of a wait that begins meanwhile is its own time
        return 0.0 if group is None else time.monotonic() - self._since

    def reported(self, waited_on_gpu: float) -> tuple[ReportedWait | None, dict[str, int]]:
        """The wait, where it is long enough to be reported, and how many collectives were issued in each process group.

        waited_on_gpu: seconds for which a collective on this rank's GPU has been waiting.
        """
        serial, group = self._serial, self._group
        if group is not None and time.monotonic() - self._since > REPORTED_AFTER:
            sequences = group_sequences()
            name = name_of_group(group)
            # Read before and after: then what was issued is what was issued within this wait.
            if self._group is group and self._serial == serial and name in sequences:
                issued = {key: count for key, (_, count) in sequences.items()}
                return ReportedWait(serial, {name: sequences[name][0]}), issued
        elif waited_on_gpu > GPU_REPORTED_AFTER:
            sequences = group_sequences()
            issued = {key: count for key, (_, count) in sequences.items()}
            return ReportedWait(-1, {key: ranks for key, (ranks, _) in sequences.items()}), issued
        return None, {}

    def text(self, wait: ReportedWait) -> str:
        """The program that this rank is in, for those to read that it waits for."""
        return json.dumps([wait.serial, self.call.text])
