# pyright: reportUnknownMemberType=false
"""The order of kernels that wait for other GPUs: those of a rank follow one another, of whatever programs and streams.

Two such kernels at a time might each have all the multiprocessors that another rank's need: rank 0 would wait in one,
rank 1 in the other.  And two that have the same slots would take each other's words.  All ranks launch kernels and
graphs in one order; that in which the host launches them is the order in which each GPU runs them.

As long as all of them are on the default stream, that is so.  From the first one on, which is on another stream or in
the capture of a CUDA graph, an event stands for the end of the last: each waits for it, and records it.  In a capture
both are nodes of the graph: one before its first such kernel, which waits for what the event stands for when the host
launches the graph, and one behind all of them, which counts as recorded from then on.  So replays follow calls and
other replays, and calls follow replays, of whatever graphs and streams.  NCCL orders the kernels of a communicator in
the same way (``strongstream.cc``).  Within a capture, each kernel follows the one before.

A launch outside of captures that finds an event, or is on the default stream before there is one, takes the same steps
in C (``executor/ordered.c``), in the same memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from shardfuse.mesh import peer_memory

_DEFAULT = 0
"""The handle of the default stream, which is never captured."""
_NONE = -1
"""In place of the handle of a stream."""


class LaunchState(ctypes.Structure):
    """What launches of a device leave to the next one.

    event: stands for the end of the last launch; 0 as long as all were on the default stream.
    last: the handle of the stream of the last launch outside of captures, or ``_NONE``.
    is_captured: was there any capture?  Its replays are not seen.
    """

    _fields_ = [("event", ctypes.c_int64), ("last", ctypes.c_int64), ("is_captured", ctypes.c_int64)]
    event: int
    last: int
    is_captured: int


@dataclass
class _Capture:
    """A graph that is being captured.  last: stream of its last launch.  recording: the node that records the event."""

    last: torch.cuda.Stream
    recording: int = 0


@dataclass(eq=False)
class LaunchOrder:
    """Of one device."""

    device: torch.device
    state: LaunchState = field(default_factory=lambda: LaunchState(last=_NONE))
    captures: dict[int, _Capture] = field(default_factory=dict[int, _Capture])
    """Those that go on, by their numbers."""
    _counts: dict[tuple[int, ...], ctypes.c_int64] = field(default_factory=dict[tuple[int, ...], ctypes.c_int64])

    def launches(self) -> dict[tuple[int, ...], int]:
        """How many there were outside of captures, by the ranks that wait for one another in them."""
        return {ranks: count.value for ranks, count in tuple(self._counts.items()) if count.value}

    def count_of(self, ranks: tuple[int, ...]) -> ctypes.c_int64:
        """Where those in which ``ranks`` wait for one another are counted."""
        return self._counts.setdefault(ranks, ctypes.c_int64())

    def follow(self, stream: int | None, ranks: tuple[int, ...]) -> bool:
        """Have the current stream go on where the last launch has ended.

        stream: its handle, where that is known.  ranks: that wait for one another in the launch, ascending.
        Returns whether ``ended`` has to be called behind the launch.
        """
        state = self.state
        if self.device.type != "cuda":
            self.count_of(ranks).value += 1
            return False
        if torch.cuda.is_current_stream_capturing():
            self._follow_in_capture(torch.cuda.current_stream(self.device))
            return True
        self.count_of(ranks).value += 1
        stream = torch.cuda.current_stream(self.device).cuda_stream if stream is None else stream
        if not state.event:
            if stream == _DEFAULT:
                state.last = stream
                return False
            self._make_event()
        if state.is_captured or state.last != stream:
            peer_memory.wait_for(state.event, stream, is_captured=False)
        state.last = stream
        return True

    def _make_event(self) -> None:
        self.state.event = peer_memory.made_event()
        if self.state.last != _NONE:
            peer_memory.record(self.state.event, self.state.last)

    def _follow_in_capture(self, stream: torch.cuda.Stream) -> None:
        if not self.state.event:
            self._make_event()
        self.state.is_captured = True
        number = peer_memory.capture_of(stream.cuda_stream)
        capture = self.captures.get(number)
        if capture is None:
            for k in [k for k, c in self.captures.items() if peer_memory.capture_of(c.last.cuda_stream) != k]:
                del self.captures[k]
            peer_memory.wait_for(self.state.event, stream.cuda_stream, is_captured=True)
            self.captures[number] = _Capture(stream)
        elif capture.last != stream:
            stream.wait_stream(capture.last)
            capture.last = stream

    def ended(self, stream: int | None) -> None:
        """Behind the launch for which ``follow`` was called: what comes next waits for it."""
        stream = torch.cuda.current_stream(self.device).cuda_stream if stream is None else stream
        number = peer_memory.capture_of(stream)
        if number:
            capture = self.captures[number]
            capture.recording = peer_memory.record_in_capture(self.state.event, stream, capture.recording)
        else:
            peer_memory.record(self.state.event, stream)
