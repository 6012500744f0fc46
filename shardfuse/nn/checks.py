"""What modules and functions refuse, each under its own name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from ..arguments import expected_of
from ..errors import ArgumentError, ModuleArgumentError, ModuleInputError
from ..ir import DataType

if TYPE_CHECKING:
    from ..mesh import DeviceMesh
    from .placement import TensorPlacement

Parameters = dict[str, torch.Tensor | None]
SUPPORTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What modules compute with."""


class Checks:
    """Raise errors that name an argument of a module, or of a function."""

    @property
    def checked_name(self) -> str:
        """Of what the caller has called."""
        raise NotImplementedError

    def check_argument(self, argument: str, value: object, is_right: bool, expected: str) -> None:
        """Raise ModuleArgumentError unless ``is_right``, which the value of an argument that makes the module is."""
        if not is_right:
            raise ModuleArgumentError(self.checked_name, argument, value, expected)

    def check_eps(self, eps: float) -> None:
        """Raise ModuleArgumentError for an eps that is negative."""
        self.check_argument("eps", eps, eps >= 0, "0 or more")

    def check_sizes(self, unsharded: Sequence[int], x: torch.Tensor) -> None:
        """Raise ModuleInputError for what is no shape of a tensor with x's dims."""
        sizes: list[object] = list(unsharded)
        if len(sizes) != x.ndim or not all(isinstance(n, int | torch.SymInt) and n >= 0 for n in sizes):
            expected = f"{x.ndim} sizes of 0 or more, as the tensor has {x.ndim} dims"
            advice = "pass the shape of the whole tensor"
            raise ModuleInputError(self.checked_name, "unsharded", f"sizes {sizes}", expected, advice)

    def check_whole(
        self, unsharded: Sequence[int], mesh: DeviceMesh | None, placements: Sequence[TensorPlacement], x: torch.Tensor,
        is_shaped: bool,
    ) -> None:  # fmt: skip
        """Raise ModuleInputError for an unsharded shape of which x, the first tensor of the op, is no piece.

        placements: of the op's tensors.  Where shards differ in size their fusion compares them.
        is_shaped: have they other dims than a caller's, along those that are not cut?
        """
        if any(p.uneven for p in placements) or x.ndim != len(unsharded):
            return
        at = placements[0].resolve("unsharded", x.ndim)
        wanted, here = at.local_shape(mesh, unsharded), tuple(x.shape)
        if any(wanted[dim] != here[dim] for dim in (at.cut_dims if is_shaped else range(x.ndim))):
            found, expected = f"sizes {list(unsharded)}", f"those of the tensor of which this rank has {list(here)}"
            advice = f"of {list(unsharded)} it has {list(wanted)}; leave it out where all pieces have one size"
            raise ModuleInputError(self.checked_name, "unsharded", found, expected, advice)

    def check_said(self, unsharded: Sequence[int] | None, shape: Sequence[int], argument: str) -> None:
        """Raise ModuleInputError for an unsharded shape that is not the one that DTensors have as a whole.

        argument: the DTensor that says it.
        """
        if unsharded is not None and tuple(unsharded) != tuple(shape):
            found, expected = f"sizes {list(unsharded)}", f"{list(shape)}, as {argument} is a DTensor"
            advice = "leave it out, as DTensors know their shape as a whole"
            raise ModuleInputError(self.checked_name, "unsharded", found, expected, advice)

    def check_dtype(self, argument: str, tensor: torch.Tensor) -> DataType:
        """The tensor's dtype.  Raises ModuleInputError unless it is one of the four that fusions compute norms in."""
        if tensor.dtype not in SUPPORTED:
            expected = f"one of {', '.join(map(str, SUPPORTED))}"
            raise ModuleInputError(self.checked_name, argument, f"dtype {tensor.dtype}", expected, "cast it")
        return DataType.from_torch(tensor.dtype)

    def check_devices(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ModuleInputError for tensors on several devices, of which torch.compile's own error names none."""
        for tensor in tensors:
            if tensor.device != tensors[0].device:
                found, expected = f"its elements on {tensor.device}", f"{tensors[0].device}, that of the first"
                advice = "move the module, or what it is given"
                raise ModuleInputError(self.checked_name, "one of its tensors", found, expected, advice)

    def check_plain(self, **tensors: torch.Tensor | None) -> None:
        """As ``check_dtype``, of tensors that are not handed to a fusion, and may be none."""
        for argument, tensor in tensors.items():
            if tensor is not None and getattr(tensor, "dtype", None) not in SUPPORTED:
                self.check_type(argument, tensor)  # NumPy's arrays have a dtype too
                self.check_dtype(argument, tensor)

    def check_type(self, argument: str, tensor: object) -> None:
        """Raise ModuleInputError for what is no tensor.

        Not from the AttributeError of its use: Dynamo of torch 2.11 does not trace ``raise ... from None``.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ModuleInputError.of_type(self.checked_name, argument, tensor, "a torch.Tensor")

    def check_size(self, argument: str, tensor: torch.Tensor, dim: int, expected: int) -> None:
        """Raise ModuleInputError unless ``tensor`` has ``expected`` elements along ``dim``."""
        if tensor.ndim == 0 or tensor.shape[dim] != expected:
            found, wanted = f"shape {tuple(tensor.shape)}", f"{expected} along dim {dim}"
            advice = "pass this rank's local tensor, or make the module for this size"
            raise ModuleInputError(self.checked_name, argument, found, wanted, advice)

    def check_vectors(self, named: Mapping[str, torch.Tensor], size: int) -> None:
        """Raise ModuleInputError for a parameter or buffer, in whose place a caller may have put any other, that is
        no vector of ``size`` elements on this rank."""
        for name, tensor in named.items():
            if tensor.ndim != 1 or tensor.shape[0] != size:
                found, expected = f"shape {tuple(tensor.shape)}", f"{(size,)} on this rank"
                advice = "assign one of that shape, or make the module for this size"
                raise ModuleInputError(self.checked_name, name, found, expected, advice)

    def check_same(
        self,
        argument: str,
        tensor: torch.Tensor,
        other_name: str,
        other: Sequence[int],
        advice: str = "pass tensors of one shape; on a mesh, local tensors of one placement",
    ) -> None:
        """Raise ModuleInputError unless ``tensor`` has the shape of the other."""
        if tensor.shape != torch.Size(other):
            found, wanted = f"shape {tuple(tensor.shape)}", f"{tuple(other)}, the shape of {other_name}"
            raise ModuleInputError(self.checked_name, argument, found, wanted, advice)


class Function(Checks):
    """The checks of modules, under the name of a function."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def checked_name(self) -> str:
        return self.name

    def check_numbers(self, kind: type[int | float], **numbers: object) -> None:
        """Raise ModuleArgumentError for what is no integer (``kind`` is int), or no number (float)."""
        for argument, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, (int, kind)):
                raise ModuleArgumentError(self.name, argument, number, expected_of(kind))

    def shape_of(self, argument: str, tensor: torch.Tensor) -> torch.Size:
        """Raise ModuleInputError for what is no tensor."""
        shape = getattr(tensor, "shape", None)
        if shape is None:
            self.check_type(argument, tensor)
        return cast("torch.Size", shape)

    def sizes(self, argument: str, given: Sequence[int]) -> tuple[int, ...]:
        """A shape that a caller has said.  Raises ArgumentError."""
        try:
            sizes = tuple(given)
        except TypeError:
            sizes = None
        if sizes is None:
            raise ArgumentError(self.name, argument, given, "a list of sizes")
        return sizes

    def refuse(self, argument: str, found: str, expected: str, advice: str = "pass one that fits") -> ModuleInputError:
        return ModuleInputError(self.name, argument, found, expected, advice)

    def shaped(self, parameters: Parameters, shape: Sequence[int]) -> None:
        """Raise ModuleInputError for a parameter of another shape."""
        for name, tensor in parameters.items():
            found = getattr(tensor, "shape", None)
            if tensor is not None and (found is None or tuple(found) != tuple(shape)):
                self.check_type(name, tensor)
                raise self.refuse(name, f"shape {tuple(tensor.shape)}", f"{tuple(shape)}")
