"""What a run is given: a list with an argument for each input of the fusion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import cast

from shardfuse.arguments import INPUTS
from shardfuse.base_error import shown
from shardfuse.compat.nvfuser_direct.nvfuser_errors import translated
from shardfuse.errors import DefinitionError
from shardfuse.executor.agreement import failures_told
from shardfuse.executor.binding import Argument, check_kinds
from shardfuse.frontend.argument_checks import ranks_of
from shardfuse.ir.fusion import Fusion


@translated
def listed(method: str, inputs: object) -> list[Argument]:
    """``inputs`` as a list.

    Raises ``RuntimeError`` for a tensor by itself, whose rows would be taken for arguments, and for what has no order.
    """
    is_array = hasattr(inputs, "__array__")  # a tensor has it too
    if is_array or isinstance(inputs, str | bytes | Mapping | Set) or not isinstance(inputs, Iterable):
        raise DefinitionError(method, f"inputs {shown(cast(object, inputs))}", INPUTS)
    return list(cast("Iterable[Argument]", inputs))


def flattened(inputs: Iterable[Argument]) -> list[Argument]:
    """``inputs`` with the numbers of a vector one by one."""
    flat: list[Argument] = []
    for v in inputs:
        flat += cast("list[Argument]", v) if isinstance(v, list | tuple) else [v]
    return flat


def checked_inputs(method: str, fusion: Fusion, inputs: object, *, is_computed: bool) -> list[Argument]:
    """The inputs of ``fusion``, flattened; a refusal is reported to the other ranks.

    is_computed: torch computes with them before the fusion runs, which would refuse what is of another kind.
    """
    with failures_told(ranks_of(fusion)):
        flat = flattened(listed(method, inputs))
        if is_computed:
            check_kinds(fusion, flat)
    return flat
