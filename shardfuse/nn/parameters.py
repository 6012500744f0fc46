"""Parameters of modules on a mesh: DTensors, so that what goes over a model's parameters sees each as a whole.

Optimisers, ``clip_grad_norm_``, checkpoints and moving averages then do for a module what they do for an unsharded one.
Replicated parameters are DTensors too, as `torch.distributed.tensor.parallel.SequenceParallel` has them: functions over
lists of tensors (``torch._foreach_norm``, ``torch._fused_adamw_``) refuse lists of DTensors and plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, cast

import torch
import torch.distributed as dist

from ..errors import PlacementError
from ..frontend.detection import has_dtensor
from ..frontend.moves import move_in
from ..frontend.pieces import torch_pieces
from ..frontend.shard_order import dtensor_like, dtensor_of, is_left_to_right
from ..mesh import DeviceMesh, current_rank
from ..mesh.groups import default_group
from ..mesh.torch_mesh import torch_mesh_of
from .checks import SUPPORTED
from .dtensor_autograd import checked, local_of, local_part, placements_of
from .fused import PLAIN, FusedModule, Take
from .placement import TensorPlacement

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ParameterKind = Literal["dtensor", "local"]
"""What the parameters of a module on a mesh are: DTensors on that mesh, or each rank's own piece, a plain tensor."""


class Bucket(Protocol):
    """What reduces the gradients of a module's parameters with those of others (`gradient_buckets.py`)."""

    def of(self, module: ParameterModule, vectors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """The local parameters to compute with in place of these; None where it has none for this call."""
        ...


class ParameterModule(FusedModule):
    """A fused module with vectors for parameters, which live where ``placement`` says.

    On a mesh they are DTensors (`ParameterKind`), but for a mesh of one rank in a process without a process group.
    """

    bucket: Bucket | None = None
    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that a call takes where they are not None, in the order of the op."""
    given: tuple[str, ...]
    """Those of ``vectors`` for which there is a parameter."""

    def __init__(self, mesh: DeviceMesh | None, placement: TensorPlacement, kind: ParameterKind) -> None:
        super().__init__()
        self.check_argument("parameters", kind, kind in ("dtensor", "local"), '"dtensor" or "local"')
        self.mesh = mesh
        self._parameter = placement
        self._kind = kind

    def make_parameter(
        self,
        name: str,
        size: int | tuple[int, ...],
        value: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> torch.nn.Parameter:
        """A vector of ``size`` elements unsharded, all ``value``.  Collective among the ranks of the mesh.

        A ``size`` of several dims is that of a parameter of which no mesh dimension cuts any.
        """
        self.check_own_dtype(dtype)
        whole = torch.full(
            size if isinstance(size, tuple) else (size,), value, device=device, dtype=dtype or torch.get_default_dtype()
        )
        if self.mesh is None or self._kind == "local" or (self.mesh.size == 1 and not dist.is_initialized()):
            return torch.nn.Parameter(self._parameter.local(self.mesh, whole).clone())
        for parallel_type, dim in zip(self.mesh.parallel_types, self._parameter.shards, strict=True):
            team = self.mesh.team(current_rank(), parallel_type)
            if dim is not None and list(team) != sorted(team):
                advice = 'put the ranks in ascending order, or pass parameters="local"'
                raise PlacementError(name, placements_of(self._parameter, 1), _unordered(self.mesh), advice)
        return torch.nn.Parameter(distributed(whole, self.mesh, self._parameter))

    def check_own_dtype(self, dtype: torch.dtype | None) -> None:
        """Raise ModuleArgumentError for a dtype of parameters and buffers that no call would take."""
        expected = f"None, or one of {', '.join(map(str, SUPPORTED))}"
        self.check_argument("dtype", dtype, dtype is None or dtype in SUPPORTED, expected)

    def parameter(self, name: str) -> torch.Tensor | None:
        """The attribute of this name, past ``torch.nn.Module.__getattr__``, which looks for it in three places."""
        registered = self._parameters
        return registered[name] if name in registered else getattr(self, name)

    def vectors_here(self) -> list[torch.Tensor]:
        """Those of ``vectors`` that there are now: a caller may have put one, or None, in a parameter's place."""
        there = self._parameters
        found: list[torch.Tensor] = []
        for name in self.vectors:
            parameter = there[name] if name in there else getattr(self, name)
            if parameter is not None:
                found.append(parameter)
        if len(found) != len(self.given):
            self.describe()
        return found

    def vector_dtypes(self, vectors: Sequence[torch.Tensor], size: int) -> dict[str, Any]:
        """ "weight_dtype" and so on, of those that there are.

        size: this rank's elements of each.  Raises ModuleInputError, as a caller may have put any other in its place.
        """
        named = dict(zip(self.given, vectors, strict=True))
        self.check_vectors(named, size)
        return {f"{name}_dtype": self.check_dtype(name, t) for name, t in named.items()}

    def describe(self) -> None:
        self.__dict__["given"] = tuple(name for name in self.vectors if self.parameter(name) is not None)
        super().describe()

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As torch's, which an assignment calls too."""
        super().register_parameter(name, param)
        if name in self.vectors and "text" in self.__dict__ and (param is not None) != (name in self.given):
            self.describe()

    @classmethod
    def made_again(cls, settings: Mapping[str, Any]) -> Self:
        """``settings``: with those of ``given``, in words, where there are ``vectors``."""
        options = dict(settings)
        given = str(options.pop("given", "")).split()
        made = cls(**options, device="meta", parameters="local")  # pyright: ignore[reportCallIssue]
        for name in cls.vectors:
            made.register_parameter(name, torch.nn.Parameter(torch.empty(0, device="meta")) if name in given else None)
        return made

    def local_parameters(self, **named: torch.nn.Parameter | None) -> tuple[torch.Tensor, ...]:
        """This rank's pieces of those that there are; gradients come back as the parameters live."""
        present = [p for p in named.values() if p is not None]
        return tuple(p if take is None else take(p) for p, take in zip(present, map(self.take, present), strict=True))

    def take(self, parameter: torch.Tensor) -> Take | None:
        """Gradients come back as the parameter lives."""
        if type(parameter) in PLAIN or not has_dtensor((parameter,)):
            return None
        name = next((name for name, p in self._parameters.items() if p is parameter), "parameter")
        gradient, move = checked(name, cast("DTensor", parameter), self.mesh, self._parameter)
        if move is None:
            return partial(local_part, gradient)
        return lambda p: local_of(name, p, self.mesh, self._parameter)

    def traced(self, parameter: torch.Tensor) -> torch.Tensor:
        from shardfuse.nn.traced_dtensors import local_traced

        return local_traced("parameter", parameter, self.mesh, self._parameter)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        """``to``, ``to_empty`` and the like: a DTensor that goes to another kind of device goes to a mesh of that."""
        mesh = self.mesh
        if mesh is None:
            return super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]

        def applied(tensor: torch.Tensor) -> torch.Tensor:
            return _rewrapped(cast("DTensor", tensor), mesh, fn) if has_dtensor((tensor,)) else fn(tensor)

        return super()._apply(applied, recurse)  # pyright: ignore[reportUnknownMemberType]

    def _is_own(self, parameter: torch.Tensor | None) -> bool:
        """Is it a DTensor as this module makes them?  FSDP puts others in their place, on a larger mesh."""
        return has_dtensor((parameter,)) and cast("DTensor", parameter).placements == placements_of(self._parameter, 1)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Unsharded tensors are cut: the state dict of an unsharded module loads as it is, on every rank."""
        is_put = bool(local_metadata.get("assign_to_params_buffers"))  # in the parameters' place, as it is
        for name, parameter in self._parameters.items():
            given = state_dict.get(prefix + name)
            if not isinstance(given, torch.Tensor) or not self._is_own(parameter) or self.mesh is None:
                continue
            if parameter is not None and given.shape == parameter.shape:
                is_cut = has_dtensor((given,))
                if is_cut and not is_left_to_right(cast("DTensor", given)):
                    with torch.no_grad():  # what torch copies, or makes a Parameter of, it takes to be so
                        given, is_cut = cast("DTensor", given).full_tensor(), False
                cut = cast("DTensor", given) if is_cut else distributed(given, self.mesh, self._parameter)
                state_dict[prefix + name] = cut if is_put else _beside(cut, cast("DTensor", parameter))
        super()._load_from_state_dict(  # pyright: ignore[reportUnknownMemberType]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        error_msgs.extend(self.misread(state_dict, prefix))

    def misread(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """What in a state dict has another meaning than the like of it here, a sentence each, ``strict`` or not."""
        return []


def distributed(whole: torch.Tensor, mesh: DeviceMesh, placement: TensorPlacement) -> DTensor:
    """The DTensor of an unsharded vector, of which every rank takes its piece: nothing is sent."""
    torch_mesh = torch_mesh_of(mesh, _mesh_device(mesh, whole.device))
    placements = placements_of(placement, 1)
    whole = whole.detach()
    if move_in(torch_mesh, placements, tuple(whole.shape), torch.device("cpu")) is None:
        local = placement.local(mesh, whole).clone()
    else:  # torch cuts it elsewhere
        sharded = {k: p for k, p in enumerate(placements) if p.is_shard()}
        index = torch_pieces(whole.shape[0], sharded, mesh)[current_rank()]
        local = whole.index_select(0, index.to(whole.device))
    return dtensor_of(local, torch_mesh, placements, whole.shape, whole.stride())


def _rewrapped(dtensor: DTensor, mesh: DeviceMesh, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``fn`` of a DTensor's local tensor, as a DTensor on a mesh of the device that it is on then."""
    with torch.no_grad():
        local = fn(dtensor.to_local())
    own = dtensor.device_mesh
    device = own.device_type if local.is_meta else local.device.type
    on = own if device == own.device_type else torch_mesh_of(mesh, device)
    return dtensor_like(dtensor, local, on)


def _beside(given: DTensor, parameter: DTensor) -> DTensor:
    """On the parameter's mesh and device, where the mesh is another one of the same ranks: torch copies between no two.

    It is another one where it has another kind of device, or other names.
    """
    own = parameter.device_mesh
    if given.device_mesh == own or not torch.equal(given.device_mesh.mesh, own.mesh):
        return given
    with torch.no_grad():
        local = given.to_local()
    local = local if parameter.is_meta else local.to(parameter.device)  # torch warns of what a meta tensor is given
    return dtensor_like(given, local, own)


def _mesh_device(mesh: DeviceMesh, device: torch.device) -> str:
    """The kind of device that the mesh of a DTensor has, of which a meta tensor says nothing."""
    if device.type != "meta":
        return device.type
    if mesh.origin is not None:
        return mesh.origin.device_type
    kinds = {kind.type for kind in cast("Any", default_group())._device_types}
    return "cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu"


def _unordered(mesh: DeviceMesh) -> str:
    return f"{mesh}, along which a DTensor's pieces would be put together in ascending order of ranks"
