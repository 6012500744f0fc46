# pyright: reportUnknownMemberType=false
"""The order of kernels that wait for other GPUs: those of a rank follow one another, of whatever programs and streams.

Two such kernels at a time might each have all the multiprocessors that another rank's need: rank 0 would wait in one,
rank 1 in the other.  All ranks call programs in one order, and so launch in one order.

A launch on another stream than the last one waits for that stream.  Within the capture of a CUDA graph it waits for the
last launch of the same capture, which the graph keeps.  Replays are the caller's: they are no launches seen from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardfuse.mesh.peer_memory import capture_of


@dataclass(eq=False)
class LaunchOrder:
    """Of one device.  last: the stream of the last launch outside of captures.

    launches: how many those were, by the ranks that wait for one another in them.
    """

    device: torch.device
    last: torch.cuda.Stream | None = None
    captured: tuple[int, torch.cuda.Stream] | None = None
    """The last capture with launches, by its number, and the stream of the last of them."""
    launches: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])

    def follow(self, stream: int | None, ranks: tuple[int, ...]) -> None:
        """Have the current stream go on where the last launch's has.

        stream: its handle, where that is known.  ranks: that wait for one another in the launch, ascending.
        """
        if self.device.type != "cuda":
            self.launches[ranks] = self.launches.get(ranks, 0) + 1
            return
        if torch.cuda.is_current_stream_capturing():
            self._follow_in_capture()
            return
        self.launches[ranks] = self.launches.get(ranks, 0) + 1
        if stream is not None and self.last is not None and stream == self.last.cuda_stream:
            return
        current = torch.cuda.current_stream(self.device)
        # whoever waits for a stream that is captured takes part in the capture
        if self.last is not None and self.last != current and not capture_of(self.last.cuda_stream):
            current.wait_stream(self.last)
        self.last = current

    def _follow_in_capture(self) -> None:
        current = torch.cuda.current_stream(self.device)
        number = capture_of(current.cuda_stream)
        if self.captured is not None and self.captured[0] == number and self.captured[1] != current:
            current.wait_stream(self.captured[1])
        self.captured = number, current
