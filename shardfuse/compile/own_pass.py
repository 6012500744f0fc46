# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What shardfuse's passes over Inductor's graphs have in common: they run behind the caller's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, get_args

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from .backend import Take
from .compile_errors import CompileOptionError
from .kept_regions import sources_hash
from .rank_regions import facts_here

GraphPass = Callable[[Graph], None]


class OwnPass(CustomGraphPass):
    """``take``: "auto", regions that are expected to gain; "all" that can be; "none".  ``before``: passes that run
    first, the caller's own.
    """

    def __init__(self, take: Take = "auto", before: Sequence[GraphPass] = ()) -> None:
        if take not in get_args(Take):
            raise CompileOptionError("shardfuse.take", take, get_args(Take))
        self.take: Take = take
        self.before = tuple(before)

    def __call__(self, graph: Graph) -> None:
        for other in self.before:
            other(graph)
        if self.take != "none":
            self.run(graph)

    @abstractmethod
    def run(self, graph: Graph) -> None:
        """The pass itself."""

    def uuid(self) -> object:
        """Tells compiled graphs apart in torch's caches; None, for no caching, where a pass before it has no uuid.

        Asked for at each look-up: process groups may have been made since the last one.
        """
        others: list[object] = []
        for other in self.before:
            found: Any = other.uuid() if isinstance(other, CustomGraphPass) else None
            if not found:
                return None
            others.append(found)
        return ("shardfuse", sources_hash(), self.take, *facts_here(), *others)
