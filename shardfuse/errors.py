"""One class per error that a user can meet. The constructor takes values; the class holds the sentence.

Each sentence names the argument, what was found, what was expected, and what to do. A `ShardfuseError` is
about the caller's program; a bug in shardfuse itself is an `AssertionError`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base_error import ArgumentError as ArgumentError
from .base_error import ShardfuseError as ShardfuseError
from .base_error import Words as Words
from .base_error import shown
from .call_errors import CallLeftOutError as CallLeftOutError
from .call_errors import ProgramMismatchError as ProgramMismatchError
from .kernel_errors import KernelCompileError as KernelCompileError
from .kernel_errors import KernelLaunchError as KernelLaunchError
from .kernel_errors import NoKernelsError as NoKernelsError
from .module_errors import ChangedBeforeBackwardError as ChangedBeforeBackwardError
from .module_errors import CompiledElsewhereError as CompiledElsewhereError
from .module_errors import ModuleArgumentError as ModuleArgumentError
from .module_errors import ModuleChangedError as ModuleChangedError
from .module_errors import ModuleInputError as ModuleInputError
from .module_errors import PlacementError as PlacementError
from .module_errors import SecondDerivativeError as SecondDerivativeError
from .module_errors import TransformError as TransformError

# --- environment and processes -----------------------------------------------------------------------------


class EnvironmentVariableError(ShardfuseError):
    """An environment variable that shardfuse reads holds a value that it cannot use."""

    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"environment variable {name} is {value!r}, expected {expected}: correct it or unset it")


class LaunchEnvironmentError(ShardfuseError):
    """Rank and world size of the environment contradict each other, or one of a pair is missing."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(
            f"the launch environment has {found}, expected {expected}: start through torchrun, mpirun or srun"
        )


class RendezvousError(ShardfuseError):
    """The ranks did not find each other within the timeout."""

    def __init__(self, rank: int, world_size: int, where: str, timeout: float) -> None:
        super().__init__(
            f"rank {rank} of {world_size} found no rendezvous at {where} within {timeout:g} s: "
            "check that every rank was started, or set MASTER_ADDR and MASTER_PORT"
        )


class BackendUnavailableError(ShardfuseError):
    """`initialize(backend=...)` names a backend that this machine or this torch cannot run."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"backend {backend!r} cannot be used here: {reason}; leave backend out to have one chosen")


class BackendsDisagreeError(ShardfuseError):
    """The ranks chose different backends, as where only some of them see a GPU."""

    def __init__(self, chosen: Sequence[str]) -> None:
        super().__init__(
            f"the ranks chose different backends {list(chosen)} (by rank), expected one: pass backend='gloo', "
            "or give every rank a GPU of its own"
        )


class AlreadyInitializedError(ShardfuseError):
    """`initialize()` was called where a default process group of somebody else's is there already."""

    def __init__(self) -> None:
        super().__init__(
            "initialize() found a default process group that it did not make: either use that one and do not call "
            "initialize(), or leave its making to initialize()"
        )


class NotInitializedError(ShardfuseError):
    """Something needs torch.distributed's default process group and there is none."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} needs a process group and none is initialised: call shardfuse.initialize() first")


class PeerLostError(ShardfuseError):
    """Another rank failed, left early, or cannot be reached, so that this rank cannot go on."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}; this rank cannot go on without it")
        self.rank = rank
        self.reason = reason


class UnsafeFolderError(ShardfuseError):
    """A folder that shardfuse would load from could have been written by somebody else."""

    def __init__(self, path: str, found: str, expected: str, remedy: str) -> None:
        super().__init__(f"the folder {path} is refused: {found}, expected {expected}: {remedy}")


# --- device mesh -------------------------------------------------------------------------------------------


class MeshRanksError(ShardfuseError):
    """`DeviceMesh(ranks)` was given something that is not a box of distinct ranks."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(
            f"DeviceMesh(ranks=...) has {found}, expected {expected}: name each rank once, e.g. [[0, 1], [2, 3]]"
        )


class MeshDimNamesError(ShardfuseError):
    """`DeviceMesh(dim_names=...)` does not fit the mesh."""

    def __init__(self, names: object, ndim: int) -> None:
        super().__init__(
            f"DeviceMesh(dim_names={shown(names)}) does not fit {ndim} mesh dimensions: pass {ndim} distinct strings"
        )


class MeshDimensionError(ShardfuseError):
    """A parallel type names a mesh dimension that the mesh does not have."""

    is_about_schedule = True

    def __init__(self, parallel_type: str, mesh: str, available: Sequence[str]) -> None:
        super().__init__(
            f"{mesh} has no dimension {parallel_type}: use one of {', '.join(available)}, "
            "or give the mesh more dimensions"
        )


class RankNotInMeshError(ShardfuseError):
    """A rank was asked about that is not in the mesh."""

    def __init__(self, rank: int, mesh: str) -> None:
        super().__init__(f"rank {rank} is not in {mesh}: ask only ranks of the mesh, or add it to the mesh")


class TeamRanksError(ShardfuseError):
    """A team of ranks names a rank more than once."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"the team {list(ranks)} has a rank more than once, expected distinct ranks: name each once")


class MeshExceedsWorldError(ShardfuseError):
    """The mesh names ranks that the world does not have."""

    is_about_schedule = True

    def __init__(self, mesh: str, size: int, largest_rank: int, world_size: int) -> None:
        super().__init__(
            f"{mesh} of {size} ranks (largest {largest_rank}) does not fit a world of {world_size}: "
            f"start at least {largest_rank + 1} ranks, or use a smaller mesh"
        )


class ShardAxisError(ShardfuseError):
    """An axis to shard is not an axis of the tensor."""

    def __init__(self, axis: int, ndim: int) -> None:
        advice = f"pass one from {-ndim} to {ndim - 1}" if ndim else "a single number is not sharded, pass it whole"
        super().__init__(f"axis {axis} is not an axis of a tensor of {ndim} dimensions: {advice}")


# --- communication -----------------------------------------------------------------------------------------


class CollectiveArgumentError(ShardfuseError):
    """A collective's argument does not fit the tensor or the team."""

    def __init__(self, kind: str, argument: str, found: str, expected: str, advice: str = "") -> None:
        advice = advice or "every rank of the team must pass values that agree"
        super().__init__(f"{kind}: {argument} is {found}, expected {expected}: {advice}")


# --- definition --------------------------------------------------------------------------------------------


class AxisError(ShardfuseError):
    """An axis number is not one of the tensor's."""

    def __init__(self, tensor: str, kind: str, axis: int, ndim: int) -> None:
        advice = f"it has {ndim}, pass one from {-ndim} to {ndim - 1}" if ndim else "it is a single number"
        super().__init__(f"{tensor} has no {kind} axis {axis}: {advice}")


class ScheduleError(ShardfuseError):
    """A split, merge, reorder, parallelisation or allocation domain that the TensorView cannot have."""

    is_about_schedule = True

    def __init__(self, where: str, found: str, why: str, remedy: str) -> None:
        super().__init__(f"{where}: {found} cannot be done: {why}; {remedy}")


class ShapeError(ShardfuseError):
    """Operands of an op do not fit each other, or an op's shape argument does not fit its operand.

    ``misfits``: the number of a tensor among the operands, its axis, and the extent that would fit there.
    """

    def __init__(
        self, op: str, found: str, expected: str, remedy: str, misfits: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        super().__init__(f"{op}: found {found}, expected {expected}; {remedy}")
        self._remedy = remedy
        self.misfits = misfits
        self.of_inputs: Sequence[tuple[str, int, int]] = ()
        """Of ``misfits`` those that are axes of inputs: the name, the axis, and the extent that would fit."""

    def advise(self, remedy: str) -> None:
        """Say another remedy, now that more is known."""
        sentence, lines = self._sentence or str(self), self._lines
        self.args, self._lines = (f"{sentence.removesuffix(self._remedy)}{remedy}",), ()
        self.at(lines)


class ShardingError(ShardfuseError):
    """A sharding that a tensor of this size cannot have."""

    is_about_schedule = True

    def __init__(self, tensor: str, found: str, why: str, remedy: str) -> None:
        super().__init__(f"cannot shard {tensor}: {found}, {why}; {remedy}")


class OperandError(ShardfuseError):
    """An argument of ``fd.ops.<op>`` is of a kind that the op does not take."""

    def __init__(self, op: str, argument: str, found: object, expected: str) -> None:
        super().__init__(f"ops.{op}: {argument} is {shown(found)}, expected {expected}")


class UnknownOpError(ShardfuseError, AttributeError):
    """``fd.ops`` has no op of that name."""

    def __init__(self, name: str, close: Sequence[str]) -> None:
        hint = f"did you mean {' or '.join(close)}?" if close else "docs/ops.md lists all of them"
        super().__init__(f"fd.ops has no op {name!r}: {hint}")


class EmptyFusionError(ShardfuseError, NotImplementedError):
    """A fusion without outputs was run."""

    def __init__(self) -> None:
        super().__init__("Fusion is empty!")


class InputError(ShardfuseError):
    """An argument of ``execute`` does not fit the input that the definition declared."""

    is_about_schedule = True

    def __init__(self, index: int, name: str, found: str, expected: str, remedy: str) -> None:
        super().__init__(f"Expected input {index}, {name}, to be {expected} but got {found}: {remedy}")


class InputCountError(ShardfuseError):
    """A fusion was given too many or too few arguments.

    ``declared``: the names of its inputs.
    """

    def __init__(self, found: int, declared: Sequence[str]) -> None:
        more = f" and {len(declared) - 6} more" if len(declared) > 6 else ""
        names = f", {', '.join(declared[:6])}{more}" if declared else ""
        super().__init__(
            f"the fusion was given {found} inputs, it declares {len(declared)}{names}: pass them in order of definition"
        )


class NoPlanError(ShardfuseError):
    """``explain`` or ``last_trace`` was asked about a fusion whose sizes are not known.

    ``rank``: this one, where it is on no mesh of the fusion and so was not told the sizes of a run.
    ``numbers``: the scalar inputs that sizes depend on.
    """

    def __init__(
        self, function: str = "explain", taken: str = ", or pass inputs=[...] or sizes={...}", rank: int | None = None,
        numbers: Sequence[str] = (),
    ) -> None:  # fmt: skip
        remedy, given = f"execute the fusion first{taken}", "sizes={...}"
        if numbers:
            remedy = (
                f"they depend on the value of {' and of '.join(numbers)}: pass inputs=[...] in place of sizes={{...}}"
            )
            remedy, given = f"{remedy}, or execute the fusion first and pass neither", "inputs=[...] and sizes={...}"
        if rank is not None:
            remedy = f"rank {rank}, which is on no mesh of the fusion, was told none and ran nothing; "
            remedy += f"pass {given} here or in the call, or ask a rank of these meshes"
        super().__init__(f"{function}() needs sizes: {remedy}")


class PageError(ShardfuseError, OSError):
    """A page that ``html=`` asks for cannot be written."""

    def __init__(self, function: str, path: str, error: OSError) -> None:
        super().__init__(
            f"{function}: html={path!r} cannot be written: {error.strerror or error}; pass a file in a folder that is "
            "there and may be written to"
        )


class TuningUnavailableError(ShardfuseError):
    """``tune`` was called where no kernel can be timed."""

    def __init__(self, found: str) -> None:
        super().__init__(f"tune() found {found}, expected tensors on a GPU: move the inputs there, or call execute()")


class DefinitionError(ShardfuseError):
    """An argument of a definition's method is not what it takes."""

    def __init__(self, method: str, found: str, expected: str) -> None:
        super().__init__(f"{method}: found {found}, expected {expected}")


class NotPickledError(ShardfuseError, TypeError):
    """A definition was pickled, as to hand it to another process."""

    def __init__(self) -> None:
        super().__init__("a FusionDefinition is not pickled: define it in each process, or send fd.repro_script_for()")


class PromiseError(ShardfuseError):
    """A promise that a fusion was made with, and that it cannot keep.

    ``promise``: as it was said; ``found``: what stands against it; ``remedy``: what to do.
    """

    def __init__(self, promise: str, found: str, remedy: str) -> None:
        super().__init__(f"{promise} cannot be kept: {found}: {remedy}, or leave the promise out")


# --- programs of several ranks -----------------------------------------------------------------------------


class IndexRangeError(ShardfuseError, IndexError):
    """An index of an index op is beyond the axis that it reads or writes.

    ``op``: with the name of its result; ``table``: the name of what is indexed.
    ``index``: what holds the index; None where that is the number itself.
    """

    def __init__(self, op: str, index: str | None, found: int, lowest: int, extent: int, dim: int, table: str) -> None:
        allowed = f"{lowest} to {extent - 1}" if extent else "no index"
        super().__init__(
            f"{op}: index {f'{index} holds ' if index else ''}{found}, expected {allowed}: "
            f"axis {dim} of {table} has {extent} elements"
        )


class PromotionError(ShardfuseError):
    """Two operand types have no common type."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a} and {b} are not promoted to a common type: cast one of the operands first")


class NoReproError(ShardfuseError, AssertionError):
    """``last_repro_script`` before any inputs were saved."""

    def __init__(self) -> None:
        super().__init__(
            "fd.last_repro_script() cannot provide a repro because "
            "fd.execute(inputs, save_repro_inputs=True) was not executed!"
        )


class ValidationError(ShardfuseError, AssertionError):
    """Outputs are not what eager torch, or the caller's references, have."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(
            f"validate: found {found}, expected {expected}: please report it with fd.repro_script_for(inputs)"
        )
