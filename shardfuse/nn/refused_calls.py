"""What a call of a module or a function that fails ends by: looked at then, so that calls that succeed pay nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch

from ..arguments import misfit
from ..errors import (
    ArgumentError,
    DefinitionError,
    InputCountError,
    InputError,
    ModuleArgumentError,
    ModuleInputError,
    PeerLostError,
    PlacementError,
    ProgramMismatchError,
    PromiseError,
    ShapeError,
    ShardfuseError,
    ShardingError,
)
from ..executor.agreement import failures_told
from ..executor.refusals import is_noted, mark_noted, note_refusal
from ..executor.uncompiled import uncompiled
from ..frontend.detection import has_dtensor
from ..module_errors import NamingError
from ..rank_errors import RanksLateError
from .transforms import check_not_traced

if TYPE_CHECKING:
    from .fused import FusedModule


P = ParamSpec("P")
R = TypeVar("R")


_BEFORE_A_RUN = (
    InputCountError, InputError, ModuleInputError, PeerLostError, PlacementError, ProgramMismatchError,
    RanksLateError, ShapeError, ShardingError,
)  # fmt: skip
"""Errors of a call that has run nothing."""
Why = Callable[..., ShardfuseError | None]
"""Of the arguments of a call that torch has refused: what does not fit, where that is known."""
_INPUT = {"x": "input"}
"""What functions call the tensor that modules call x."""


def refusing(
    function: Callable[P, R], *, takes_dtensors: bool = False, why: Why | None = None, names: Mapping[str, str] = _INPUT
) -> Callable[P, R]:
    """``function`` (or a method called ``forward``), whose bad calls end by one error that names the argument.

    Tensors: ModuleInputError, by its name; options: ModuleArgumentError.  torch.compile does not trace how the error is
    found: it runs a call whose trace has raised uncompiled, which ends by the same error (with fullgraph=True it raises
    its own, which quotes what ``function`` has raised).
    names: what ``function`` calls arguments of the modules that it is made of, whose errors are its own.
    why: looks at what ``function`` itself does not check, as torch does.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if torch.compiler.is_compiling():
                raise
            refuse_call(function, error, args, kwargs, takes_dtensors, why)
            if isinstance(error, NamingError):
                _name_after(function, error, args, names)
            raise

    # torch.compile counts how often it compiles a code object: each function has one of its own.
    made = cast("Any", call)
    made.__code__ = made.__code__.replace(co_name=function.__name__)
    return call


def refusing_beside_dtensors(function: Callable[P, R]) -> Callable[P, R]:
    """As ``refusing``, of a function that takes DTensors."""
    return refusing(function, takes_dtensors=True)


def refusing_by(why: Why) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As ``refusing``, of a function whose tensors torch checks."""
    return lambda function: refusing(function, why=why)


@uncompiled
def refuse_call(
    function: Callable[..., Any], error: Exception, args: Sequence[object], kwargs: Mapping[str, object],
    takes_dtensors: bool, why: Why | None = None,
) -> None:  # fmt: skip
    """Raise what a call of ``function`` ends by, where that is not ``error`` as it is."""
    name, found = _name_of(function, args), None
    if not takes_dtensors:
        found = _beside_plain(name, function, args, kwargs) if why else _of_dtensors(name, function, args, kwargs)
    if found is not None:
        raise found from None
    is_said = isinstance(error, ArgumentError | DefinitionError | PromiseError) or (
        isinstance(error, ModuleArgumentError) and str(error).startswith(f"{name}(")
    )
    wrong = None if is_said else misfit(function, args, kwargs)
    if wrong is not None:
        argument, value, expected = wrong
        if torch.Tensor.__name__ in expected:
            raise ModuleInputError.of_type(name, argument, value, expected) from None
        raise ModuleArgumentError(name, argument, value, expected) from None
    if not isinstance(error, ModuleInputError | ModuleArgumentError):
        found = _of_storage(name, function, args, kwargs)
        if found is None and why is not None and not isinstance(error, ShardfuseError | TypeError):
            found = why(*args, **kwargs)
        if found is not None:
            raise found from None


def _name_of(function: Callable[..., Any], args: Sequence[object]) -> str:
    """What the caller has called: the function, or for a method called ``forward`` a module of this class."""
    return type(args[0]).__name__ if function.__qualname__.endswith(".forward") else function.__name__


@uncompiled
def _name_after(
    function: Callable[..., Any], error: NamingError, args: Sequence[object], names: Mapping[str, str]
) -> None:
    """Have an error of a module that ``function`` is made of name what the caller has called and passed.

    An option of the module that ``function`` has not, as what follows from a tensor's shape, stays the module's.
    """
    own = inspect.signature(function).parameters
    argument = error.argument if error.argument in own else names.get(error.argument, error.argument)
    if argument in own or isinstance(error, ModuleInputError):
        error.rename(_name_of(function, args), argument)


def _tensors(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, torch.Tensor]:
    """The arguments that are tensors, by name."""
    try:
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return {}
    return {argument: t for argument, t in given.items() if isinstance(t, torch.Tensor)}


def _of_dtensors(
    name: str, function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> PlacementError | None:
    """The error of a DTensor, which only modules on a mesh take."""
    for argument, tensor in _tensors(function, args, kwargs).items():
        if has_dtensor((tensor,)) and not function.__qualname__.endswith(".forward"):
            against, advice = f"{name}, which takes tensors of one rank", "make a module of shardfuse.nn with mesh="
            return PlacementError(argument, cast("Any", tensor).placements, against, advice)
    return None


def _beside_plain(
    name: str, function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> PlacementError | None:
    """The error of a DTensor among plain tensors, which torch's own function of this name does not take either."""
    tensors = _tensors(function, args, kwargs)
    dtensor = next((argument for argument, t in tensors.items() if has_dtensor((t,))), None)
    plain = next((argument for argument, t in tensors.items() if not has_dtensor((t,))), None)
    if dtensor is None or plain is None:
        return None
    against = f"{name}, of which {plain} is a plain tensor"
    advice = f"make {plain} a DTensor too, by torch.distributed.tensor.distribute_tensor, or pass {dtensor}.to_local()"
    return PlacementError(dtensor, cast("Any", tensors[dtensor]).placements, against, advice)


def _of_storage(
    name: str, function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> ModuleInputError | None:
    """The error of a tensor without strides, and of tensors on several devices."""
    tensors = _tensors(function, args, kwargs)
    for argument, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "elements of a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            return ModuleInputError(name, argument, kind, "torch.strided", "call to_dense() or pad it")
        first = next(iter(tensors))
        if tensor.device != tensors[first].device:
            found, expected = f"its elements on {tensor.device}", f"{tensors[first].device}, that of {first}"
            return ModuleInputError(name, argument, found, expected, "move one of them")
    return None


def _of_place(module: FusedModule, given: Mapping[str, torch.Tensor]) -> ModuleInputError | None:
    """The error of a module on another device than what it is given, which a fusion says of its inputs by number."""
    for argument, tensor in given.items():
        for name, own in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if own.device != tensor.device:
                found, expected = f"its elements on {own.device}", f"{tensor.device}, that of {argument}"
                advice = f"move the module, or {argument}"
                return ModuleInputError(type(module).__name__, name, found, expected, advice)
    return None


def _note(module: FusedModule, error: Exception, found: ShardfuseError, tensors: Sequence[object]) -> None:
    """Note a call of the module that is left out, by ``found`` in place of ``error``, on ranks that may send anything.

    Where its forward sends nothing, its backward may: a batch that is left out has none.
    """
    if is_noted(error):
        mark_noted(found)
    elif module.mesh is not None and isinstance(found, _BEFORE_A_RUN):
        known = [fd.sends for fd in module.bound_fusions()]
        given = (*(t for t in tensors if isinstance(t, torch.Tensor)), *module.parameters())
        is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        if True in known or False not in known or (is_recorded and None in known):
            note_refusal(module.mesh.ranks, found)


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
    if found is error and not isinstance(error, ModuleInputError):
        found = _of_storage(type(module).__name__, type(module).forward, (module, *tensors), named) or error
    if found is error and isinstance(error, InputError):
        found = _of_place(module, _tensors(type(module).forward, (module, *tensors), named)) or error
    if not isinstance(found, ShardfuseError):
        return
    found.at(module.made_at)
    try:
        if isinstance(found, ModuleInputError | PlacementError):
            with failures_told(() if module.mesh is None else module.mesh.ranks):
                raise found from (error.__cause__ if found is error else None)
    finally:
        _note(module, error, found, tensors)
