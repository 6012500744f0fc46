"""A caller's arguments as programs take them: plain tensors whose data is there, outside of autograd.

Every entry that runs a program (`FusionDefinition.execute`, `FusionExecutorCache`, DTensors) comes by here:

    arguments = arguments if are_taken_as_they_are(arguments) else received(fusion, arguments)
    with without_graph(fusion, arguments):
        outputs = program.run(*arguments)

A program is local ops, kernels and collectives of one rank.  Autograd would record the local ops alone: gradients would
lack what came through the collectives, and kernels would give none.  So nothing is recorded on any backend, and a
caller whose input requires a gradient gets a warning once.  ``shardfuse.nn`` runs programs within an autograd.Function.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch
from torch._functorch import pyfunctorch
from torch.nn import parameter

from ..errors import InputError
from ..ir.fusion import Fusion
from ..ops.host import python_number
from .binding import Argument

_core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_functorch: Any = _core._functorch
_transforms: Any = pyfunctorch
_Uninitialized: Any = cast(Any, parameter).UninitializedTensorMixin
forward_ad: Any = torch.autograd.forward_ad
_peek: Callable[[], object] = _functorch.peek_interpreter_stack
_is_negated: Callable[[torch.Tensor], bool] = torch.Tensor.is_neg
set_grad_enabled: Callable[[bool], None] = _core._set_grad_enabled
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, complex))
TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_PACKAGE = str(Path(__file__).parents[1])


class NoGradientsWarning(UserWarning):
    """What a fusion or a collective is given requires a gradient, and gradients are not recorded through either."""

    @classmethod
    def of_input(cls, index: int, name: str) -> NoGradientsWarning:
        """Of a fusion."""
        return cls(
            f"input {index}, {name}, requires a gradient or has a tangent, and outputs of a fusion carry no graph: "
            "take a module of shardfuse.nn, or run one fusion in the forward and another in the backward of a "
            "torch.autograd.Function; where no gradient is wanted, pass input.detach() or call execute() under "
            "torch.no_grad()"
        )

    @classmethod
    def of_collective(cls, kind: str) -> NoGradientsWarning:
        """kind: the function of shardfuse.collectives."""
        return cls(
            f"{kind}: x requires a gradient, and the results of shardfuse.collectives carry no graph: take "
            "shardfuse.nn.Redistribution, which has a backward; where no gradient is wanted, pass x.detach() or call "
            f"{kind}() under torch.no_grad()"
        )


def received(fusion: Fusion, arguments: Sequence[Argument]) -> Sequence[Argument]:
    """``arguments`` with the tensors that subclasses of torch.Tensor hold, after the collectives that still fill them,
    and `resolved`.

    Raises ``InputError`` for tensors that hold no data of this rank: fake ones, those inside of torch.func, DTensors.
    """
    names = [i.val.name for i in fusion.inputs]
    found = [received_one(k, names[k] if k < len(names) else "not declared", a) for k, a in enumerate(arguments)]
    return resolved(fusion, found)


def are_taken_as_they_are(arguments: Sequence[Argument]) -> bool:
    """Are they as programs take them: by their types, and without bits that say that the storage holds something else?

    Asked in every call.
    """
    for a in arguments:
        kind = type(a)
        if kind in TENSORS:
            tensor: Any = a
            if tensor.is_neg() or tensor.is_conj():
                return False
        elif kind not in _PLAIN:
            return False
    return _peek() is None


def are_real_as_they_are(tensors: Sequence[torch.Tensor]) -> bool:
    """The same of tensors of which none is complex, so that none has the conjugate bit: by C alone."""
    if not TENSORS.issuperset(map(type, tensors)) or any(map(_is_negated, tensors)):
        return False
    return _peek() is None


def is_dual() -> bool:
    """Is forward-mode autograd at work?"""
    return forward_ad._current_level >= 0


def resolved(fusion: Fusion, arguments: Sequence[Argument]) -> Sequence[Argument]:
    """``arguments`` as kernels and collectives read them: storage that holds the values, and Python's own numbers.

    A tensor with the conjugate or the negative bit (``x.conj()``, ``x.conj().imag``) says that its storage holds
    something else; it is resolved into a copy.  NumPy's scalars become Python's.  Raises ``InputError`` where such a
    tensor is to be written to.
    """
    if not any(map(_is_to_be_resolved, arguments)):
        return arguments
    found: list[Argument] = []
    for k, argument in enumerate(arguments):
        declared = fusion.inputs[k].val if k < len(fusion.inputs) else None
        if isinstance(argument, torch.Tensor) and _is_to_be_resolved(argument):
            if declared is not None and declared in fusion.aliases.values():
                raise InputError(
                    k, declared.name, "a tensor with the negative or conjugate bit, which an output is written to",
                    "a tensor whose storage holds its values", "call .resolve_conj().resolve_neg() first",
                )  # fmt: skip
            argument = argument.resolve_conj().resolve_neg()
        found.append(argument if isinstance(argument, torch.Tensor) else python_number(argument))
    return found


def _is_to_be_resolved(argument: object) -> bool:
    if isinstance(argument, torch.Tensor):
        return argument.is_neg() or argument.is_conj()
    return type(argument) not in _PLAIN


def received_one(k: int, name: str, argument: Argument) -> Argument:
    """As ``received``, of input ``k``."""
    if not isinstance(argument, torch.Tensor):
        return argument
    kind: Any = type(argument)
    if _functorch.is_functorch_wrapped_tensor(argument):
        raise InputError(
            k, name, "a tensor inside of torch.func (grad, vmap, jvp)", "a tensor with data of its own",
            "fusions are not differentiated or batched: call the transform around a torch.autograd.Function that has "
            "the fusion in its forward",
        )  # fmt: skip
    if kind in _PLAIN:
        return argument
    if isinstance(argument, _Uninitialized):
        raise InputError(k, name, f"a {kind.__name__}", "a tensor with data", "initialise the lazy module first")
    wait = getattr(argument, "wait", None)
    if wait is not None:  # an AsyncCollectiveTensor
        return received_one(k, name, cast(torch.Tensor, wait()))
    if kind.__torch_dispatch__ is not _core._disabled_torch_dispatch_impl:
        remedy = "pass the tensors that it stands for"
        if kind.__name__ == "DTensor":
            remedy = "call execute() of the FusionDefinition, which takes DTensors, or pass to_local()"
        raise InputError(k, name, f"a {kind.__name__}", "a torch.Tensor with data of this rank", remedy)
    return argument.as_subclass(torch.Tensor)


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, after the collective that may still be filling it.  Its graph, where it has one, is not followed."""
    wait = None if type(tensor) in _PLAIN else getattr(tensor, "wait", None)
    return tensor if wait is None else cast(torch.Tensor, wait())


def all_waited(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """As ``waited``, of each."""
    return tensors if TENSORS.issuperset(map(type, tensors)) else [waited(t) for t in tensors]


def outside_transforms() -> AbstractContextManager[object]:
    """Around a run on tensors that none of the transforms of torch.func at work has made: its results are as these.

    Under such a transform even new tensors have no storage of their own.
    """
    if _functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return cast(AbstractContextManager[object], _transforms.temporarily_clear_interpreter_stack())


class without_graph:  # noqa: N801 - used as a statement
    """The body runs without autograd, backward or forward mode.

    An input that requires a gradient, or has a tangent, is warned of once for each fusion.
    """

    __slots__ = ("arguments", "fusion", "is_dual", "is_enabled")

    def __init__(self, fusion: Fusion, arguments: Sequence[Argument]) -> None:
        self.fusion = fusion
        self.arguments = arguments
        self.is_enabled = torch.is_grad_enabled()
        self.is_dual = is_dual()

    def __enter__(self) -> None:
        if self.is_dual:
            _warn(self.fusion, self.arguments, _has_tangent)
            _core._set_fwd_grad_enabled(False)
        if self.is_enabled:
            for argument in self.arguments:
                if isinstance(argument, torch.Tensor) and argument.requires_grad:
                    _warn(self.fusion, self.arguments, _requires_grad)
                    break
            _core._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        if self.is_enabled:
            _core._set_grad_enabled(True)
        if self.is_dual:
            _core._set_fwd_grad_enabled(True)


_warned: WeakSet[Fusion] = WeakSet()


def _requires_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _warn(fusion: Fusion, arguments: Sequence[Argument], is_missed: Callable[[torch.Tensor], bool]) -> None:
    for k, (argument, declared) in enumerate(zip(arguments, fusion.inputs, strict=False)):
        if isinstance(argument, torch.Tensor) and is_missed(argument) and fusion not in _warned:
            warnings.warn(NoGradientsWarning.of_input(k, declared.val.name), stacklevel=_stack_level())
            _warned.add(fusion)
            return


_warned_of_kinds: set[str] = set()


def warn_of_collective(kind: str, x: torch.Tensor) -> None:
    """Once for each kind of collective, where autograd is on and would lose the gradient of ``x``."""
    if x.requires_grad and torch.is_grad_enabled() and kind not in _warned_of_kinds:
        warnings.warn(NoGradientsWarning.of_collective(kind), stacklevel=_stack_level())
        _warned_of_kinds.add(kind)


def _stack_level() -> int:
    """Of the line outside of shardfuse, counted from the caller of this function."""
    frame, level = sys._getframe(1), 1  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
