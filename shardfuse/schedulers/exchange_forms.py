"""Which kernels exchange words with other ranks by default: those whose form has run over several GPUs.

Here alone it is said.  A form that has only run in Triton's interpreter, and been compiled, is chosen where
``SHARDFUSE_EXCHANGE=symmetric`` asks for kernels, and nowhere else; once its test in ``tests/gpu/test_exchange.py``
has passed and ranks have run it over GPUs of their own, the line below gets their names and the date.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from .long_rows import has_nothing_somewhere
from .plan import KernelPlan


class Form(Enum):
    """What a kernel exchanges."""

    STATISTICS = "statistics of rows of which all ranks have as much"
    UNEVEN = "statistics of rows of which some ranks have more"
    ALIKE = "results that all ranks have, of rows of which some ranks have more"
    WORDS = "summands, in words that are their own flags"
    ROWS = "summands, row by row"
    PASSED = "summands, of which each of more than two ranks adds up some rows for all"
    GATHERED = "the rows that each of two ranks makes"
    SCATTERED = "summands of the rows of each of two ranks, and the rows that it makes of them"
    FURTHER = "rows that each of more than two ranks makes"
    BLOCKS = "rows with reductions of each of their blocks"
    LONG = "statistics of rows that are read again, as no program holds them"
    SHARED = "statistics of rows that several programs of each rank hold"
    SHARED_ALIKE = "results that all ranks have, of rows that several programs hold and some ranks have more of"
    NONE_SOMEWHERE = "statistics of rows of which some rank has nothing"


HAVE_RUN: Mapping[Form, str] = {
    Form.STATISTICS: "2 x H200, 2026-11-23; 4 x H200, 2026-11-28",
    Form.UNEVEN: "2 x H200, 2026-11-28",
    Form.ALIKE: "2 x H200, 2026-11-28",
    Form.WORDS: "2 x H200, 2026-11-23; 4 x H200, 2026-11-28",
    Form.ROWS: "2 x H200, 2026-11-23; 4 x H200, 2026-11-28",
    Form.BLOCKS: "2 x H200, 2026-11-28",
    Form.SCATTERED: "2 x H200, 2026-11-28",
    Form.GATHERED: "2 x H200, 2026-11-28",
    Form.FURTHER: "4 x H200, 2026-11-30",
    Form.LONG: "2 x H200, 2026-11-29",
    Form.SHARED: "2 x H200, 2026-11-29",
    Form.SHARED_ALIKE: "4 x H200, 2026-11-30",
}
"""On which GPUs, and when."""


def exchanged_form(plan: KernelPlan) -> Form:
    """Of a kernel that is planned."""
    exchange = plan.rank_exchange
    if exchange.passed is not None:
        return Form.PASSED
    if plan.space.block:
        return Form.BLOCKS
    if exchange.gathered is not None:
        of_two = Form.GATHERED if exchange.sent is None else Form.SCATTERED
        return of_two if exchange.ranks == 2 else Form.FURTHER
    if not plan.schedule.is_held:
        return Form.NONE_SOMEWHERE if has_nothing_somewhere(plan.space, exchange) else Form.LONG
    if exchange.sent is None and exchange.members > 1:
        return Form.SHARED_ALIKE if exchange.is_alike else Form.SHARED
    if exchange.sent is not None:
        return Form.ROWS if exchange.is_in_rows else Form.WORDS
    if exchange.is_alike:
        return Form.ALIKE
    return Form.UNEVEN if exchange.is_uneven else Form.STATISTICS


def why_not_by_default(plan: KernelPlan) -> str | None:
    """Why a kernel that could exchange is not chosen unless it is asked for; ``None`` where it is."""
    form = exchanged_form(plan)
    return (
        None if form in HAVE_RUN else f"{form.value}, have not run over GPUs yet: SHARDFUSE_EXCHANGE=symmetric has them"
    )
