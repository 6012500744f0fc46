"""Writes docs/troubleshooting.md from the classes of errors: each message, what causes it, and what to do.

python scripts/troubleshooting.py           writes the page
python scripts/troubleshooting.py --check   ends with exit code 1 if it is not what would be written

Messages and causes are read from the sources, without running them. What to do is below; where it is not, it is the end
of the message, which says so too.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/troubleshooting.md"
SOURCES = {
    "base_error.py": "Arguments",
    "start_errors.py": "Start of the ranks",
    "rank_errors.py": "Ranks that wait for each other",
    "call_errors.py": "Ranks whose calls differ",
    "errors.py": "Definitions, meshes and runs",
    "kernel_errors.py": "Kernels",
    "module_errors.py": "Modules",
    "nn/loss.py": "Losses",
    "compile/compile_errors.py": "torch.compile",
    "optim/optim_errors.py": "Optimiser steps",
}

HEAD = """# Error messages

Written by `scripts/troubleshooting.py` from the sources; do not edit.

Search this page for the name of the error. In the messages below, words in capitals are values.

- **Every error about your program** is a `shardfuse.ShardfuseError`. Its message is one sentence: the argument, what was found, what was expected, and what to do. Below the
  sentence are the lines of your program that it is about. What `torch.compile(backend="shardfuse")` refuses, torch raises as its own `BackendCompilerFailed`, of which that error is the
  `inner_exception`.
- **An `AssertionError` from inside of shardfuse** is a fault of shardfuse: please report it with `fd.repro_script_for(inputs)`.
- **In a job of several ranks**, read the message of the rank that is named first: those of the others follow from it. [Debug a hang](howto/debug_a_hang.md) has more.
- **Where a job does not start**, `python -m shardfuse doctor` looks at the machine.
- **Where there is no error, but the result or the speed is not what you expected**, see [questions and answers](questions.md).
"""

NOT_MET = ("ShardfuseError", "NamingError", "UntranslatableError")
"""Classes that no user has as an error: bases, and reasons that compilation reads."""

ADVICE = {
    "AlreadyInitializedError": "Call `initialize()` before anything else makes a process group, or leave it out and use the "
    "process group that is there.",
    "ArgumentError": "Compare the call with the [reference](reference.md).",
    "AxisError": "Count the axes as they are now: a split adds one, a merge removes one. `print(tensor)` shows them.",
    "BackendUnavailableError": "Leave `backend` out, or start no more ranks on a host than it has GPUs.",
    "BackendsDisagreeError": "Look at `CUDA_VISIBLE_DEVICES` on each host, or pass `backend='gloo'` everywhere.",
    "CollectiveArgumentError": "Do what the message says. Every rank of the mesh passes the same shapes and options.",
    "CollectivesDifferError": "Look at the lines that it names: the ranks call these collectives in different orders, or one of them more often.",
    "CapturedCollectiveError": "Run the step once before it is captured, as CUDA graphs ask for anyway.",
    "DefinitionError": "Correct the argument; the line of the definition is below the message.",
    "EmptyFusionError": "Name at least one result by `fd.add_output(...)`.",
    "EnvironmentVariableError": "Correct the variable or unset it. `python -m shardfuse doctor` lists all that are read.",
    "ExchangeTimeoutError": "Look at that rank first: it has stopped, runs another program, or needs more time.",
    "ExchangeMemoriesDisagreeError": "Set `SHARDFUSE_EXCHANGE_MEMORY`, or `initialize(exchange_memory=...)`, alike for every rank.",
    "ExchangeUnavailableError": "Unset `SHARDFUSE_EXCHANGE`: programs then use collectives. See [exchange](exchange.md).",
    "ForkedProcessError": "Start data loaders and pools with `multiprocessing_context='spawn'`, or keep fusions out of them.",
    "InitializeArgumentError": "Pass what the message expects, or leave the argument out.",
    "InputCountError": "Pass one argument for each `define_tensor` and `define_scalar` without a value, in that order.",
    "InputError": "Compare dtype, shape, device and strides of the tensor with its `define_tensor`. A DTensor has to be sharded as "
    "the definition says.",
    "KernelCompileError": "Report it with the source. Without `SHARDFUSE_STRICT=1` torch runs this part meanwhile.",
    "KernelLaunchError": "Often an earlier kernel is the cause, maybe another library's: run once with `CUDA_LAUNCH_BLOCKING=1`.",
    "LaunchEnvironmentError": "Start through torchrun, mpirun or srun, or unset leftovers such as `RANK` and `WORLD_SIZE`.",
    "MeshDimNamesError": "Pass one distinct string for each dimension of the mesh.",
    "MeshDimensionError": "`mesh_x` is the last dimension of a mesh, `mesh_y` the one before it.",
    "MeshExceedsWorldError": "Start more ranks, or make the mesh of `range(world.world_size)`.",
    "MeshRanksError": "Pass nested lists of equal lengths in which each rank is once.",
    "ModuleArgumentError": "Correct the argument of the constructor; the message says what it takes.",
    "ModuleInputError": "Compare the tensor's last axis and dtype with the module. On a mesh the module takes this rank's part; for shards "
    "that differ in size pass `unsharded=`.",
    "NoPlanError": "Run the fusion once, or pass `inputs=` or `sizes=` to `explain`: `inputs=` where sizes depend on a scalar.",
    "NoReproError": "Call `fd.execute(inputs, save_repro_inputs=True)` first.",
    "NoStoreError": "Another program has the port: choose another `MASTER_PORT` for all ranks.",
    "NonFiniteNormError": "Skip the step, or look for the first loss that is not finite; `torch.autograd.set_detect_anomaly` names the op.",
    "NotInitializedError": "Call `shardfuse.initialize()` at the start of the program.",
    "NotPickledError": "Define the fusion in each process. `exec` of `fd.repro_script_for()` defines it anew.",
    "OperandError": "[Ops](ops.md) lists what each op takes.",
    "OptimizerArgumentError": "Correct the argument; [Step an optimiser](howto/optimiser_steps.md) has examples.",
    "OptimizerTensorError": "Do what the message says, or give that parameter an optimiser of torch's.",
    "OutputShapeError": 'Compile with `options={"shardfuse.take": "none"}`, and report the program.',
    "PeerLostError": "Read the output of the rank that is named: its error is the cause.",
    "PlacementError": "One placement for each dimension of the mesh; `Partial()` only where the module takes summands.",
    "PortInUseError": "Choose another `MASTER_PORT`, or end the program that has it.",
    "CallLeftOutError": "Let the exception of a call end its rank, or have all ranks agree to leave the call out. "
    "See [Debug a hang](howto/debug_a_hang.md).",
    "ProgramMismatchError": "Make the definition, the dtypes and sizes of tensors, and the order of calls the same on "
    "every rank; tensors have other numbers in the definition of a module whose input has another dtype. "
    "See [Debug a hang](howto/debug_a_hang.md).",
    "PromiseError": "Do what the message says; [Keep the same bits](howto/keep_bits.md) lists what is refused.",
    "PromotionError": "Cast one operand with `fd.ops.cast`.",
    "RankNotInMeshError": "Make modules and ask for shards on the ranks of the mesh alone.",
    "RankTakenError": "Give each process another `RANK`, and each job another `MASTER_PORT`.",
    "RanksLateError": "See what the rank is doing (`py-spy dump --pid`), or raise the time limit.",
    "ReinitializedError": "Call `initialize()` with the same arguments everywhere, or once.",
    "RendezvousError": "See that every rank was started and reaches `MASTER_ADDR`; see [Debug a hang](howto/debug_a_hang.md).",
    "ScheduleError": "Order the transforms so that each one finds the axis that it names; the message says what else is possible.",
    "ShapeError": "Broadcast, reshape or keep the reduced axis (`keepdim=True`).",
    "SharedGpuError": "Unset `SHARDFUSE_SHARED_GPU`; it is for tests of several ranks on a machine with one GPU. See [exchange](exchange.md).",
    "ShardAxisError": "Count the tensor's axes from 0, or from -1 backwards.",
    "ShardingError": "Pad the axis, or pass `uneven=True` to the split; [Sharding](sharding.md#saying-where-a-tensor-is) lists all placements.",
    "SimulationError": "Call `simulate` outside of any process group, with 1 rank or more.",
    "SimulationTimeoutError": "Pass a longer `timeout`, or none; the lines that it names show where ranks spend their time.",
    "SimulationStuckError": "Look at the lines that it names: some rank calls a collective that others do not call.",
    "TeamRanksError": "Name each rank once.",
    "ThreadsError": "Run fusions of several ranks in one thread, or hand over with `shardfuse.run_in_this_thread()`.",
    "TuningUnavailableError": "Tune on a GPU: pass tensors that are there.",
    "UnknownOpError": "[Ops](ops.md) lists all ops.",
    "UnsafeFolderError": "Do what the message says (`chmod 700`), or name another folder by `SHARDFUSE_CACHE_DIR`. "
    "[Security](security.md) says why.",
    "ValidationError": "Report it with `fd.repro_script_for(inputs)`, if the reference is right.",
    "WaitingCircleError": "Call programs whose meshes share ranks in the same order on every rank.",
    "WorldSizesDisagreeError": "Set `WORLD_SIZE` alike for every rank; an old job may still be running.",
}

TAIL = """
## Warnings

| message begins with | what it means, and what to do |
|---|---|
| `NoGradientsWarning` | A fusion or one of `shardfuse.collectives` was given a tensor that requires a gradient. Its result has none: use `shardfuse.nn` (of collectives `Redistribution`), or an `autograd.Function` of two fusions. |
| `kernels are launched through Triton's own entry` | The C module for launches could not be made. Results are the same, each launch takes some microseconds more. Install a C compiler and Python's headers. |
| `the key that vouches for kept kernels cannot be kept` | This user has no folder for a key: each process compiles its kernels. Set `HOME` or `XDG_CONFIG_HOME`. |
| `the folder ... is refused` | Others could write there. See `UnsafeFolderError` above. |
| `... until then Triton keeps what it compiles for this process alone` | Others could write into Triton's cache folder. Do what the message says; [Security](security.md#tritons-folder). |
| `... segment K runs by torch instead` | A kernel did not compile. The result is right and slower; please report the message. `SHARDFUSE_STRICT=1` makes it an error. |
| `... the ranks of the program exchange by collectives instead` | A kernel that [exchanges](exchange.md) did not compile. The result is right; please report the message. |
| `collectives are called through torch, which takes longer` | NCCL's own functions could not be called. Results are the same. Install a C compiler and Python's headers. |
| `N process groups may have kernels of NCCL on ... at a time` | NCCL may need so much of the GPU that kernels that exchange have little or no room: make process groups before the first call, or set `NCCL_MAX_CTAS` ([beside NCCL](exchange.md#beside-nccl)). |
| `tuning segment K on rank R` | Tuning failed there; the schedule that was proposed is used. |
| `promise(...) found no module of shardfuse.nn that promises anything` | Nothing is promised: call `shardfuse.nn.convert(model)` first. Matrix products, as in `shardfuse.nn.Linear`, promise nothing. |
| `the memory of another GPU was not closed` | An error of the driver at the end of a job; nothing to do. |
"""


def page() -> str:
    lines = [HEAD]
    known: set[str] = set()
    for name, title in SOURCES.items():
        lines += [f"## {title}", "", "| error and message | cause | what to do |", "|---|---|---|"]
        tree = ast.parse((ROOT / "shardfuse" / name).read_text())
        for error in sorted(errors_of(tree), key=lambda c: c.name):
            known.add(error.name)
            cause = (ast.get_docstring(error) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
            message = message_of(error)
            cells = (f"**{error.name}**<br>`{message}`", cause, ADVICE.get(error.name) or remedy_of(message))
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
        lines.append("")
    if not set(ADVICE) <= known:
        raise SystemExit(f"troubleshooting.py: ADVICE has errors that are none: {sorted(set(ADVICE) - known)}")
    return "\n".join(lines).rstrip("\n") + "\n" + TAIL


def errors_of(tree: ast.Module) -> list[ast.ClassDef]:
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Error")]
    return [node for node in found if node.name not in NOT_MET]


def message_of(error: ast.ClassDef) -> str:
    """The sentence that the constructor hands on, values as words in capitals."""
    for node in ast.walk(error):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"), args=[text]):
                return joined(text).split("\n")[0].replace("`", "'")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="ShardfuseError"), attr="__init__"), args=[_, text]):
                return joined(text).split("\n")[0].replace("`", "'")  # of one that is another's subclass
            case _:
                pass
    raise SystemExit(f"troubleshooting.py: {error.name} has no sentence")


def joined(text: ast.expr) -> str:
    """The text of a string, or of an f-string; what is added to a word, and may be nothing, is three dots."""
    found = ""
    for value in text.values if isinstance(text, ast.JoinedStr) else [text]:
        is_added = isinstance(value, ast.FormattedValue) and found[-1:].isalnum()
        found += "..." if is_added else part_of(value)
    return found


def remedy_of(message: str) -> str:
    """What stands behind the last colon or semicolon."""
    remedy = message.replace("; ", ": ").rsplit(": ", 1)[-1]
    return f"{remedy[0].upper()}{remedy[1:]}."


def part_of(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    assert isinstance(value, ast.FormattedValue)
    if isinstance(value.value, ast.IfExp) or (isinstance(value.value, ast.BinOp) and not named(value.value)):
        return "..."
    return (named(value.value) or "...").upper()


def named(value: ast.expr) -> str:
    """What the value of an expression is called: the first name in it that is no function's."""
    functions = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and id(node) not in functions and node.id != "map":
            return "..." if node.id in ("str", "x", "p") else node.id
    return ""


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text() == text:
            return 0
        print("docs/troubleshooting.md is not up to date: run python scripts/troubleshooting.py")
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
