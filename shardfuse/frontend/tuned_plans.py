"""What was tuned of a plan that there is twice: with kernels in which ranks exchange, and with collectives."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..compiler import Plan, with_schedules
from ..executor.choices import Tuned
from ..in_kernel import exchanging
from ..schedulers.schedule import Schedule


@dataclass(frozen=True)
class Chosen:
    """``schedules`` of the segments of a plan; of the one with collectives where ``is_apart``."""

    schedules: tuple[Schedule | None, ...]
    is_apart: bool

    @staticmethod
    def of(tuned: Sequence[Tuned | None], *, is_apart: bool) -> Chosen:
        """None: what was not tuned runs as proposed."""
        return Chosen(tuple(None if t is None else t.chosen for t in tuned), is_apart)

    def within(self, plan: Plan) -> Plan:
        """``plan``, or the one with collectives that it has as well, with what was chosen."""
        if not self.is_apart:
            return with_schedules(plan, self.schedules)
        assert plan.apart is not None, "plans of one key have it, or have it not"
        return replace(plan, apart=with_schedules(plan.apart, self.schedules))


def warn_of_untuned(plan: Plan) -> None:
    """Warn of the kernels that were not tuned with the rest of ``plan``: a rank that ran one alone would wait in it."""
    names = [kernel.name for _, kernel in exchanging(plan)]
    if names:
        warnings.warn(
            f"tune() leaves {', '.join(names)} as proposed: ranks exchange inside of what one of them alone would try",
            stacklevel=4,
        )
