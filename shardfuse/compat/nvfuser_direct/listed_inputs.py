"""What a run is given: a list with an argument for each input of the fusion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import cast

from shardfuse.arguments import INPUTS
from shardfuse.base_error import shown
from shardfuse.compat.nvfuser_direct.nvfuser_errors import translated
from shardfuse.errors import DefinitionError
from shardfuse.executor.binding import Argument


@translated
def listed(method: str, inputs: object) -> list[Argument]:
    """``inputs`` as a list.

    Raises ``RuntimeError`` for a tensor by itself, whose rows would be taken for arguments, and for what has no order.
    """
    is_array = hasattr(inputs, "__array__")  # a tensor has it too
    if is_array or isinstance(inputs, str | bytes | Mapping | Set) or not isinstance(inputs, Iterable):
        raise DefinitionError(method, f"inputs {shown(cast(object, inputs))}", INPUTS)
    return list(cast("Iterable[Argument]", inputs))
