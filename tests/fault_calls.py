"""What ranks do whose calls are not alike, for `fault_cases.py`: one process imports torch once for all of them.

Imports are inside of functions: the process that starts that one, and reads what comes of it, needs no torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from shardfuse import FusionDefinition

LATE = 120.0
"""Seconds for which a rank goes on that is to be ended."""
SLOW = 1.2
"""Seconds by which the slow one is late for each program."""
TOLD_AFTER = 0.2
"""Seconds in a collective after which a slow case's ranks tell of it: long before the slow one comes."""


def program(op: str, ranks: int = 2, *, is_summed: bool = True) -> FusionDefinition:
    """The sum over the rows of ``op``, or that alone, of a tensor [any, 4] that is sharded by rows."""
    from shardfuse import DeviceMesh, FusionDefinition, ParallelType

    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        y = getattr(fd.ops, op)(x)
        fd.add_output(fd.ops.sum(y, [0]) if is_summed else y)
        x.set_device_mesh(DeviceMesh(range(ranks)))
        x.outer_split(0, ranks)
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def call_differently(difference: str, *, is_guilty: bool) -> None:
    """Calls alike, then one that is not."""
    match difference:
        case "quiet" | "quiet_of_three" | "slow":
            call_after_a_quiet_program(difference, is_guilty=is_guilty)
        case "step_next":
            step_alone(is_guilty=is_guilty)
        case "failed_clip":
            clip_after_a_failure(is_guilty=is_guilty)
        case "refused_clip":
            clip_by_other_placements(is_guilty=is_guilty)
        case "refused_step":
            step_after_a_refusal(is_guilty=is_guilty)
        case "other_chunks":
            lose_over_other_rows(is_guilty=is_guilty)
        case "summands_next":
            step_without_a_gradient(is_guilty=is_guilty)
        case "longer_cached":
            gather_differently(is_guilty=is_guilty)
        case "refused_draw":
            draw_after_a_refusal(is_guilty=is_guilty)
        case "refused_rows" | "refused_module" | "refused_reduce" | "other_rows":
            go_on_after_a_refusal(difference, is_guilty=is_guilty)
        case "reduce_scatter_next" | "op_next":
            reduce_differently(difference, is_guilty=is_guilty)
        case _:
            call_other_rows(difference, is_guilty=is_guilty)


def go_on_after_a_refusal(difference: str, *, is_guilty: bool) -> None:
    """A loop in which the guilty rank has a batch that does not fit, catches that, and goes on with the next one.

    Each of its later calls would meet the other rank's of the batch before, and all would be one call short at the end.
    """
    import torch
    from torch.distributed.tensor import Shard

    from shardfuse import DeviceMesh, collectives
    from shardfuse.errors import ShardfuseError
    from shardfuse.nn import RMSNorm

    fd, norm = program("exp"), RMSNorm(8, mesh=DeviceMesh([0, 1]), input=Shard(-1), elementwise_affine=False)
    for step in range(100):
        is_bad = is_guilty and step == 3
        if is_bad:
            print(f"fault {time.time()}", flush=True)
        try:
            match difference:
                case "refused_rows":
                    fd.execute([torch.full((8, 5 if is_bad else 4), float(step))])
                case "other_rows":  # which fit, and are another program
                    fd.execute([torch.full((7 if is_bad else 8, 4), float(step))])
                case "refused_module":
                    norm(torch.full((2, 3 if is_bad else 4), float(step)))
                case _:
                    collectives.all_reduce(torch.ones(4), op="mean" if is_bad else "sum")  # pyright: ignore[reportArgumentType]
        except ShardfuseError as error:
            print(f"step {step} is left out: {error}", flush=True)
        time.sleep(0.2)


def call_other_rows(difference: str, *, is_guilty: bool) -> None:
    """Three calls alike, then one that is not: the guilty rank has 7 rows for 8, makes no call, or another."""
    import torch

    fd, other = program("exp"), program("relu")
    eight, seven = torch.zeros(8, 4), torch.zeros(7, 4)
    for rows in (seven, eight, eight) if difference == "both_cached" else (eight, eight, eight):
        fd.execute([rows])
    if difference in ("both_cached", "another_next"):
        other.execute([eight])
    print(f"fault {time.time()}", flush=True)
    match difference:
        case "one_cached" | "both_cached":
            fd.execute([seven if is_guilty else eight])
        case "both_new":
            program("neg").execute([seven if is_guilty else eight])
        case _:
            if not is_guilty:
                call_alone(fd, eight)
            if difference == "another_next":
                other.execute([eight])
    if difference == "both_cached":  # gloo may add up rows that are not one another's
        time.sleep(LATE)


def call_alone(fd: FusionDefinition, rows: Tensor) -> None:
    """A caller that catches exceptions sees who has left, and not gloo's word for a closed connection."""
    try:
        fd.execute([rows])
    except Exception as error:
        print(f"raised {type(error).__name__}", flush=True)
        raise


def call_after_a_quiet_program(difference: str, *, is_guilty: bool) -> None:
    """A program that sends nothing and one that does, in turn, as a forward and a backward of a norm of sharded rows.

    At last the guilty rank has 7 rows for 8: it is new to it that nothing is sent, so there it waits for the others,
    and they for it in their sum.  A rank that is but slow ends nobody: neither who waits for it in the sum, nor
    before a new program.
    """
    import torch

    from shardfuse import initialize
    from shardfuse.mesh import collective_waits

    device = initialize().device
    ranks = 3 if difference == "quiet_of_three" else 2
    forward, backward = program("exp", ranks, is_summed=False), program("neg", ranks)
    for _ in range(2):
        forward.execute([torch.zeros(8, 4, device=device)])
        backward.execute([torch.zeros(8, 4, device=device)])
    print(f"fault {time.time()}", flush=True)
    if difference == "slow":
        collective_waits.REPORTED_AFTER = TOLD_AFTER
        for each in (forward, backward):
            for rows in (8, 7):
                time.sleep(SLOW if is_guilty else 0.0)
                each.execute([torch.zeros(rows, 4, device=device)])
        return
    rows = torch.zeros(7 if is_guilty else 8, 4, device=device)
    forward.execute([rows])
    backward.execute([rows])


def step_alone(*, is_guilty: bool) -> None:
    """A step of the optimiser, whose norm is summed over the ranks; then one that the guilty rank leaves out.

    What it calls in its place sends as many bytes, so that no process ends before calls are compared.
    """
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
    from shardfuse.optim import AdamW

    mesh = DeviceMesh(range(2)).to_torch("cpu")
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimiser = AdamW([parameter], max_norm=1.0)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], dtype=DataType.Double)
        fd.add_output(fd.ops.sum(x, [0]))
        x.set_device_mesh(DeviceMesh(range(2)))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
    rows = torch.zeros(8, dtype=torch.float64)
    optimiser.step()
    fd.execute([rows])
    print(f"fault {time.time()}", flush=True)
    if not is_guilty:
        optimiser.step()
    fd.execute([rows])
    time.sleep(LATE)  # gloo adds up numbers that do not belong together, or raises


def clip_after_a_failure(*, is_guilty: bool) -> None:
    """Clipping by the norm over both ranks; then one that refuses what the guilty rank alone has, which catches that.

    It makes no other call, in whose place the others' all-reduce would be.
    """
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    from shardfuse import DeviceMesh, optim
    from shardfuse.optim.optim_errors import OptimizerTensorError

    mesh = DeviceMesh(range(2)).to_torch("cpu")
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optim.clip_grad_norm_([parameter], 1.0)
    own = torch.nn.Parameter(torch.ones(2))
    own.grad = torch.ones(2).to_sparse() if is_guilty else torch.ones(2)
    print(f"fault {time.time()}", flush=True)
    try:
        optim.clip_grad_norm_([parameter, own], 1.0)
    except OptimizerTensorError:
        print("raised OptimizerTensorError", flush=True)
    time.sleep(LATE)


def clip_by_other_placements(*, is_guilty: bool) -> None:
    """As ``clip_after_a_failure``, of plain tensors: the guilty rank gives more placements than its mesh has dims."""
    import torch
    from torch.distributed.tensor import Shard

    from shardfuse import DeviceMesh, optim
    from shardfuse.optim.optim_errors import OptimizerArgumentError

    mesh, own = DeviceMesh(range(2)), torch.nn.Parameter(torch.ones(2))
    own.grad = torch.ones(2)
    optim.clip_grad_norm_([own], 1.0, mesh=mesh, placements=Shard(0))
    print(f"fault {time.time()}", flush=True)
    try:
        optim.clip_grad_norm_([own], 1.0, mesh=mesh, placements=[Shard(0)] * (2 if is_guilty else 1))
    except OptimizerArgumentError:
        print("raised OptimizerArgumentError", flush=True)
    time.sleep(LATE)


def step_after_a_refusal(*, is_guilty: bool) -> None:
    """As ``clip_after_a_failure``, of an optimiser's step: the guilty rank has assigned a rate that there is not."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    from shardfuse import DeviceMesh, optim
    from shardfuse.optim.optim_errors import OptimizerArgumentError

    mesh = DeviceMesh(range(2)).to_torch("cpu")
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer = optim.AdamW([parameter], max_norm=1.0)
    optimizer.step()
    if is_guilty:
        optimizer.param_groups[0]["lr"] = -1.0
    print(f"fault {time.time()}", flush=True)
    try:
        optimizer.step()
    except OptimizerArgumentError:
        print("raised OptimizerArgumentError", flush=True)
    time.sleep(LATE)


def lose_over_other_rows(*, is_guilty: bool) -> None:
    """A loss over chunks of rows, of which the guilty rank has one more than the other: each chunk is a program."""
    import torch
    from torch.distributed.tensor import Shard

    from shardfuse import DeviceMesh
    from shardfuse.nn import LinearCrossEntropyLoss

    loss = LinearCrossEntropyLoss(mesh=DeviceMesh(range(2)), logits=Shard(-1), chunk_rows=2)
    for rows in (4, 6 if is_guilty else 4, 4, 4):
        loss(torch.ones(rows, 4), torch.ones(3, 4), torch.zeros(rows, dtype=torch.int64))
        print(f"fault {time.time()}", flush=True)
    time.sleep(LATE)


def step_without_a_gradient(*, is_guilty: bool) -> None:
    """A step whose gradients, partial sums, are added up; then one in which the guilty rank has none of the first one.

    It adds up the second one's where the other rank adds up the first one's, of as many elements.
    """
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    from shardfuse import DeviceMesh, initialize, optim

    device = initialize().device
    mesh = DeviceMesh(range(2)).to_torch(device.type)

    def made(placement: Partial | Replicate) -> DTensor:
        return DTensor.from_local(torch.ones(4, device=device), mesh, [placement], run_check=False)

    parameters = [torch.nn.Parameter(made(Replicate())) for _ in range(2)]
    optimizer = optim.AdamW(parameters)
    for is_alike in (True, False):
        if not is_alike:
            print(f"fault {time.time()}", flush=True)
        for k, p in enumerate(parameters):
            p.grad = None if is_guilty and k == 0 and not is_alike else made(Partial())
        optimizer.step()
    time.sleep(LATE)


def gather_differently(*, is_guilty: bool) -> None:
    """Rows that are gathered: gloo ends a process that gets more of them than it waits for."""
    import torch

    from shardfuse import DeviceMesh, FusionDefinition, ParallelType

    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        y = fd.ops.exp(x)
        fd.add_output(y)
        x.set_device_mesh(DeviceMesh(range(2)))
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
        y.set_device_mesh(DeviceMesh(range(2)))
    eight, seven = torch.zeros(8, 4), torch.zeros(7, 4)
    for rows in (seven, eight, eight):
        fd.execute([rows])
    print(f"fault {time.time()}", flush=True)
    fd.execute([seven if is_guilty else eight])
    time.sleep(LATE)  # gloo takes fewer rows than it waits for


def draw_after_a_refusal(*, is_guilty: bool) -> None:
    """A dropout, whose ranks exchange nothing but its seed; then one that refuses what the guilty rank passes.

    That rank catches the error and goes on to a sum, which sends as many bytes as a seed and its offset.
    """
    import torch
    from torch.distributed.tensor import Replicate

    from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType
    from shardfuse.errors import ModuleInputError
    from shardfuse.nn import DropoutAddNorm

    mesh = DeviceMesh(range(2))
    module = DropoutAddNorm(8, mesh=mesh, input=Replicate(), residual=Replicate(), output=Replicate())
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 2], dtype=DataType.Double)
        fd.add_output(fd.ops.sum(x, [0]))
        x.set_device_mesh(mesh)
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
    rows, row = torch.ones(4, 8), torch.zeros(1, 2, dtype=torch.float64)
    module(rows, rows)
    fd.execute([row])
    print(f"fault {time.time()}", flush=True)
    try:
        module(rows[:, :4] if is_guilty else rows, rows)
    except ModuleInputError:
        print("raised ModuleInputError", flush=True)
    fd.execute([row])
    time.sleep(LATE)  # gloo takes the one's numbers for the other's, or raises


def reduce_differently(difference: str, *, is_guilty: bool) -> None:
    """Collectives without a fusion: one alike, then another kind, which both wait in, or another op: wrong numbers."""
    import torch

    from shardfuse import collectives

    x = torch.full((4,), 3.0)
    collectives.all_reduce(x)
    print(f"fault {time.time()}", flush=True)
    if difference == "op_next":
        collectives.all_reduce(x, op="prod" if is_guilty else "sum")
    elif is_guilty:
        collectives.reduce_scatter(x, -1)
    else:
        collectives.all_reduce(x)
    time.sleep(LATE)
