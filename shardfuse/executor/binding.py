"""Binds a caller's arguments to a fusion's inputs: what is wrong is said in terms of the caller's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..allocation.global_sizes import is_uneven, local_logical_sizes
from ..errors import InputCountError, InputError
from ..ir.domain import BoundDomain
from ..ir.dtype import DataType
from ..ir.fusion import Fusion, FusionInput
from ..ir.held_integers import integers_of
from ..ir.scalar import Number, Scalar
from ..ir.tensor_view import TensorView
from .written_inputs import check_written

Argument = torch.Tensor | int | float | bool | complex


@dataclass(frozen=True)
class Bound:
    """Arguments that fit: tensors with the inputs that they are for, and the device of all of them."""

    tensors: dict[TensorView, torch.Tensor]
    local_shapes: dict[TensorView, tuple[int, ...]]
    device: torch.device


_INT64 = range(-(2**63), 2**63)
"""The integers that kernels and host programs take as an argument."""


def bind_arguments(fusion: Fusion, arguments: Sequence[Argument], rank: int, device: torch.device | None) -> Bound:
    """Checks kind, dtype, rank, device, static sizes and contiguity.  Raises ``InputError``, ``InputCountError``."""
    if len(arguments) != len(fusion.inputs):
        raise InputCountError(len(arguments), [declared.val.name for declared in fusion.inputs])
    tensors: dict[TensorView, torch.Tensor] = {}
    shapes: dict[TensorView, tuple[int, ...]] = {}
    written = list(fusion.aliases.values())
    home = device
    elsewhere: torch.device | None = None
    for k, (declared, argument) in enumerate(zip(fusion.inputs, arguments, strict=True)):
        val = declared.val
        if isinstance(val, Scalar):
            number = _checked_scalar(k, val, argument)
            for op in fusion.held.get(val, ()):
                op.check(val, number)
            continue
        if not isinstance(argument, torch.Tensor):
            raise InputError(k, val.name, *_no_tensor(argument))
        tensors[val] = argument
        mesh = val.domain.mesh
        if mesh is not None and rank not in mesh.ranks:
            shapes[val] = _stand_in_shape(k, val, argument)  # this rank holds nothing of it: the argument is not read
            elsewhere = elsewhere or argument.device
            continue
        _check_tensor(k, declared, val, argument, home)
        if val in written:
            check_written(k, val, argument)
        if not val.is_cpu:
            home = home or argument.device
        shapes[val] = tuple(local_logical_sizes(val, argument.shape)) if val.allocation_rank else tuple(argument.shape)
    return Bound(tensors, shapes, home or elsewhere or torch.device("cpu"))


def check_kinds(fusion: Fusion, arguments: Sequence[object]) -> None:
    """Tensors for tensors and numbers for scalars, one each.  Raises ``InputError``, ``InputCountError``."""
    if len(arguments) != len(fusion.inputs):
        raise InputCountError(len(arguments), [declared.val.name for declared in fusion.inputs])
    for k, (declared, argument) in enumerate(zip(fusion.inputs, arguments, strict=True)):
        if isinstance(declared.val, Scalar):
            _checked_scalar(k, declared.val, argument)
        elif not isinstance(argument, torch.Tensor):
            raise InputError(k, declared.val.name, *_no_tensor(argument))


def _no_tensor(argument: object) -> tuple[str, str, str]:
    """What was found in place of a tensor, what was expected, and what to do."""
    kind = type(argument)
    if isinstance(argument, int | float | bool | complex):
        return f"scalar {argument!r}", "an at::Tensor", "pass a torch.Tensor, or declare it with define_scalar"
    if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return "a numpy.ndarray", "a torch.Tensor", "pass torch.from_numpy(it), on the device of the other inputs"
    return f"a {kind.__name__}" if argument is not None else "None", "a torch.Tensor", "pass one"


def _stand_in_shape(k: int, val: TensorView, argument: torch.Tensor) -> tuple[int, ...]:
    """Sizes that are not static are those of the tensor that a rank outside of the mesh passes in place of a shard."""
    if all(n >= 0 for n in val.shape):
        return val.shape
    if argument.ndim != val.ndim:
        raise InputError(
            k, val.name, f"shape {list(argument.shape)} on a rank outside of its mesh", f"of {val.ndim} dims",
            "pass a tensor of a shard's shape (it is not read), or declare static sizes",
        )  # fmt: skip
    return tuple(n if n >= 0 else m for n, m in zip(val.shape, argument.shape, strict=True))


def ranges_of(fusion: Fusion) -> list[range]:
    """For each input the integers that it takes, where it is a scalar: what its dtype and all that reads it hold."""
    return [
        _shared([_range_of(i.val), *(integers_of(op.dtype) for op in fusion.held.get(i.val, ()))])
        if isinstance(i.val, Scalar)
        else _INT64
        for i in fusion.inputs
    ]


def _shared(ranges: Sequence[range]) -> range:
    return range(max(r.start for r in ranges), min(r.stop for r in ranges))


def _range_of(val: Scalar) -> range:
    """The integers of its dtype, of 64 bits at most, as kernels have them."""
    if not val.dtype.is_integral:
        return _INT64
    if val.dtype is DataType.Bool:
        return range(2)
    limits = torch.iinfo(val.dtype.torch)
    return range(max(limits.min, _INT64[0]), min(limits.max, _INT64[-1]) + 1)


def is_out_of(argument: object, taken: range | None) -> bool:
    """Is it an integer that the input does not take?  Programs are found by this, as by a number's type."""
    return type(argument) is int and taken is not None and argument not in taken


def _checked_scalar(k: int, val: Scalar, argument: object) -> Number:
    if not isinstance(argument, int | float | bool | complex):
        kind = type(argument).__name__
        raise InputError(k, val.name, kind, f"a {val.dtype.name} scalar", "pass a Python number")
    taken = _range_of(val)
    if isinstance(argument, int) and is_out_of(argument, taken):
        bits = argument.bit_length()
        found = str(argument) if bits < 128 else f"one of {bits} bits"
        if taken == _INT64:
            raise InputError(k, val.name, found, "an integer of 64 bits", "pass one, or a float")
        expected = f"a {val.dtype.name} scalar, {taken[0]} to {taken[-1]}"
        raise InputError(k, val.name, found, expected, "pass one, or declare dtype=DataType.Int")
    if val.dtype.is_integral and not isinstance(argument, int):
        raise InputError(k, val.name, repr(argument), f"a {val.dtype.name} scalar", "pass an int")
    if isinstance(argument, complex) and not val.dtype.is_complex:
        remedy = "pass its real part, or declare dtype=DataType.ComplexDouble"
        raise InputError(k, val.name, repr(argument), f"a {val.dtype.name} scalar", remedy)
    return argument


def _check_tensor(
    k: int, declared: FusionInput, val: TensorView, tensor: torch.Tensor, home: torch.device | None
) -> None:
    name = val.name
    if tensor.dtype != val.dtype.torch:
        raise InputError(
            k,
            name,
            f"dtype {tensor.dtype}",
            f"of dtype {val.dtype.torch}",
            f"cast it, or declare dtype={_name(tensor.dtype)}",
        )
    ndim = len(val.domain.allocation or val.domain.loop) if val.allocation_rank else val.ndim
    if tensor.ndim != ndim:
        axes = "allocation axis, a mesh axis being 1" if val.allocation_rank else "logical axis"
        raise InputError(
            k,
            name,
            f"{tensor.ndim} dims, shape {list(tensor.shape)}",
            f"a tensor of {ndim} dims",
            f"pass one for each {axes}",
        )
    if home is not None and not val.is_cpu and tensor.device != home:
        raise InputError(k, name, f"a tensor on {tensor.device}", f"on {home}", "move it there")
    if val.is_cpu and tensor.device.type != "cpu":
        raise InputError(k, name, f"a tensor on {tensor.device}", "on cpu", "move it there, or declare is_cpu=False")
    _check_contiguity(k, declared, val, tensor)


def _name(dtype: torch.dtype) -> str:
    try:
        return repr(DataType.from_torch(dtype))
    except KeyError:
        return f"a type that shardfuse has ({dtype} is none)"


def _check_contiguity(k: int, declared: FusionInput, val: TensorView, tensor: torch.Tensor) -> None:
    if val.allocation_rank or not declared.contiguity or tensor.numel() == 0:
        return
    dims = declared.dim_order or range(tensor.ndim)
    expected = 1
    for place in reversed(range(len(dims))):
        d = dims[place]
        size, stride, flag = tensor.shape[d], tensor.stride(d), declared.contiguity[place]
        if flag is None:  # a broadcast: it may be expanded, and says nothing of the dims around it
            continue
        if flag is True and size > 1 and stride != expected and val.domain.allocation is None:
            raise InputError(
                k, val.name, f"strides {list(tensor.stride())} for shape {list(tensor.shape)}",
                f"contiguous in dim {d} (stride {expected})",
                f"call {_laying_out(dims)}, or declare contiguity=False for that dim",
            )  # fmt: skip
        expected = stride * size if size > 1 else expected


def _laying_out(dims: Sequence[int]) -> str:
    """What makes a tensor lie contiguous with its dims in this order, outermost first."""
    if list(dims) == sorted(dims):
        return ".contiguous()"
    back = sorted(range(len(dims)), key=dims.__getitem__)
    return f".permute({list(dims)}).contiguous().permute({back})"


def check_local_shape(
    k: int, val: TensorView, domain: BoundDomain, found: Sequence[int], rank: int, unsharded: Sequence[int]
) -> None:
    """Does this rank's tensor have the shape that its share of the unsharded one has?"""
    expected = domain.local_shape(rank)
    if tuple(found) == expected:
        return
    where = "" if domain.mesh is None else f" on rank {rank} of {domain.mesh}, unsharded {list(unsharded)}"
    at = next(d for d, (n, m) in enumerate(zip(found, expected, strict=True)) if n != m)
    remedy = "pass this rank's piece, or correct the sizes in the definition"
    if val.shape[at] < 0 and is_uneven(val.domain, val.domain.logical[at]):
        remedy = (
            f"pass this rank's piece, or say by the shape in define_tensor(), or by sizes= of "
            f"shardfuse.FusionDefinition.execute(), how long axis {at} is: where that is left out, "
        )
        remedy += "it is as long as the axis of another input with which an op pairs it, but for one that is broadcast"
    raise InputError(k, val.name, f"shape {list(found)}", f"of shape {list(expected)}{where}", remedy)
