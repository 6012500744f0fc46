"""What a call of a module that fails ends by: looked at then, so that it costs nothing to calls that succeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..arguments import misfit
from ..errors import ModuleInputError, PlacementError, ShardfuseError
from ..executor.agreement import failures_told
from ..executor.uncompiled import uncompiled
from .transforms import check_not_traced

if TYPE_CHECKING:
    from .fused import FusedModule


@uncompiled
def refuse(module: FusedModule, error: Exception, tensors: Sequence[object], named: Mapping[str, object]) -> None:
    """Raise what the call of the module ends by; return where that is ``error`` as it is, which may be anybody's.

    Where an argument is of no type that the module takes, whatever Python or torch has made of it, that is the error.
    A ShardfuseError names the line that made the module, and one about the inputs is reported to the other ranks.
    """
    found = error
    check_not_traced()
    if not isinstance(error, ShardfuseError) or isinstance(error, ModuleInputError):
        wrong = misfit(type(module).forward, (module, *tensors), named)
        if wrong is not None:
            found = ModuleInputError.of_type(type(module).__name__, *wrong)
    if not isinstance(found, ShardfuseError):
        return
    found.at(module.made_at)
    if isinstance(found, ModuleInputError | PlacementError):
        with failures_told(() if module.mesh is None else module.mesh.ranks):
            raise found from (error.__cause__ if found is error else None)
