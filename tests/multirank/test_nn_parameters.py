"""Parameters of modules on a mesh in the hands of torch: optimisers, clipping, checkpoints, copies, FSDP."""

from __future__ import annotations

import copy
import io
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parameter_cases import PlainTower, Tower, assert_same_parameters, numbers, whole
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardfuse import DeviceMesh
from shardfuse.errors import PlacementError
from shardfuse.nn import RMSNorm, SwiGLU, bucket_gradients

pytestmark = pytest.mark.mpi
HIDDEN, ROWS = Shard(-1), Shard(0)
SIZES = [8, 7, 1]
"""Of the hidden axis: even shards, shards that differ, and ranks that have none."""


def line(pg) -> DeviceMesh:
    return DeviceMesh(list(range(pg.size)))


def shared_folder(pg, name: str) -> str:
    """A folder that all ranks of the test know."""
    if pg.rank == 0:
        pg.store.set(name, tempfile.mkdtemp())
    return pg.store.get(name).decode()


def tower(hidden: int, mesh: DeviceMesh, by: Shard = HIDDEN) -> tuple[Tower, PlainTower]:
    model, plain = Tower(hidden, mesh, by), PlainTower(hidden)
    model.load_state_dict(plain.state_dict())
    return model, plain


def run(model: Tower, plain: PlainTower, by: Shard, seed: int = 0, remat: bool | None = None) -> None:
    """Forward and backward of both on the same numbers.  ``remat``: under checkpointing, reentrant or not."""
    mesh = model.norm.mesh
    hidden = plain.norm["weight"].shape[0]
    inputs = [numbers((2 * mesh.size, hidden), seed + k) for k in range(3)]
    x, residual, gradient = (mesh.shard_tensor(t, by.dim) for t in inputs)
    x.requires_grad_()
    shape = inputs[0].shape
    if remat is None:
        y = model(x, residual, unsharded=shape)
    else:
        y = checkpoint(model, x, residual, shape, use_reentrant=remat)
    y.backward(gradient)
    full = inputs[0].requires_grad_()
    plain(full, inputs[1]).backward(inputs[2])
    torch.testing.assert_close(x.grad, mesh.shard_tensor(full.grad, by.dim), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("by", [HIDDEN, ROWS], ids=["hidden", "rows"])
@pytest.mark.parametrize("hidden", SIZES)
def test_parameters_and_their_gradients_are_dtensors(hidden: int, by: Shard, pg) -> None:
    mesh = line(pg)
    model, plain = tower(hidden, mesh, by)
    run(model, plain, by)
    for (name, parameter), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        for tensor, full in ((parameter, want), (parameter.grad, want.grad)):
            assert isinstance(tensor, DTensor), name
            assert tensor.placements == (Shard(0) if by is HIDDEN else Replicate(),)
            assert tensor.shape == (hidden,)
            piece = mesh.shard_tensor(full.detach(), 0) if by is HIDDEN else full.detach()
            torch.testing.assert_close(tensor.to_local().detach(), piece, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("hidden", "foreach"), [(8, False), (7, True), (1, False), (1, True)])
def test_training_is_that_of_the_unsharded_model(hidden: int, foreach: bool, pg) -> None:
    """Two micro-batches a step, gradients clipped, AdamW, a moving average: all over all parameters at once."""
    for by in (HIDDEN, ROWS):
        model, plain = tower(hidden, line(pg), by)
        averages = [copy.deepcopy(m).requires_grad_(False) for m in (model, plain)]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=foreach) for m in (model, plain)]
        for step in range(2):
            for batch in range(2):
                run(model, plain, by, seed=10 * step + 5 * batch)
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=foreach) for m in (model, plain)]
            torch.testing.assert_close(whole(norms[0]), norms[1], rtol=1e-9, atol=0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            for average, of in zip(averages, (model, plain), strict=True):
                with torch.no_grad():
                    for a, p in zip(average.parameters(), of.parameters(), strict=True):
                        a.lerp_(p, 0.3)
        assert_same_parameters(model, plain)
        assert_same_parameters(*averages)
        vectors = [torch.nn.utils.parameters_to_vector(m.parameters()) for m in (model, plain)]
        torch.testing.assert_close(whole(vectors[0]), vectors[1].detach(), rtol=1e-11, atol=1e-12)
        if hidden >= pg.size or by is ROWS:  # torch has no largest element of no elements, FSDP's shards included
            largest = [torch.nn.utils.get_total_norm(list(m.parameters()), float("inf")) for m in (model, plain)]
            torch.testing.assert_close(whole(largest[0]), largest[1].detach(), rtol=1e-11, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, pg) -> None:
    for by in (HIDDEN, ROWS):
        model, plain = tower(8, line(pg), by)
        run(model, plain, by, remat=reentrant)
        for parameter, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(parameter.grad), want.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("hidden", SIZES)
def test_a_checkpoint_loads_onto_other_numbers_of_ranks(hidden: int, pg) -> None:
    """Saved by two ranks (one, where there is one), with the optimiser's moments; loaded by one, and by all."""
    few = DeviceMesh(list(range(min(2, pg.size))))
    everyone, alone = line(pg), DeviceMesh([pg.rank])
    folder = shared_folder(pg, "checkpoint")
    _, plain = PlainTower(hidden), PlainTower(hidden)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    if pg.rank in few.ranks:
        model, again = tower(hidden, few)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run(model, again, HIDDEN)
        optimizer.step()
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        group = dist.group.WORLD if few.size == pg.size else few_group(few)
        dcp.save(state, checkpoint_id=folder, process_group=group)
    dist.barrier()
    inputs = [numbers((2 * few.size, hidden), k) for k in range(3)]
    plain(inputs[0], inputs[1]).backward(inputs[2])
    reference.step()
    for mesh, solo in ((everyone, False), (alone, True)):
        model = Tower(hidden, mesh, HIDDEN)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder, no_dist=solo)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert_same_parameters(model, plain)
        for parameter, want in zip(model.parameters(), plain.parameters(), strict=True):
            for moment in ("exp_avg", "exp_avg_sq"):
                found = whole(optimizer.state[parameter][moment])
                torch.testing.assert_close(found, reference.state[want][moment], rtol=1e-9, atol=1e-12)


def few_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    from shardfuse.mesh import process_group

    return process_group(mesh.ranks)


@pytest.mark.parametrize("hidden", SIZES)
def test_unsharded_state_dicts_go_in_and_come_out(hidden: int, pg) -> None:
    """load_state_dict takes the whole tensors on every rank, torch's set_model_state_dict those of rank 0 too."""
    model, plain = tower(hidden, line(pg))
    assert_same_parameters(model, plain)
    out = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(out, {n: p.detach() for n, p in plain.state_dict().items()})
    for broadcast in (False, True):
        other = Tower(hidden, line(pg), HIDDEN)
        given = plain.state_dict() if pg.rank == 0 or not broadcast else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(other, given, options=options)
        assert_same_parameters(other, plain)
    other = Tower(hidden, line(pg), HIDDEN, device="meta")
    other.load_state_dict(plain.state_dict(), assign=True)
    assert_same_parameters(other, plain)
    run(other, plain, HIDDEN)
    if pg.size > 1 and hidden == 8:
        with pytest.raises(RuntimeError, match=r"size mismatch for add_norm\.weight"):
            other.load_state_dict({n: p.to_local() for n, p in model.state_dict().items()})


def test_copies_casts_and_files(pg) -> None:
    for by in (HIDDEN, ROWS):
        model, plain = tower(7, line(pg), by)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.norm.weight.zero_()
        assert twin.norm.mesh is model.norm.mesh
        assert_same_parameters(model, plain)
        run(model, plain, by)
        half = copy.deepcopy(model).to(torch.bfloat16)
        for parameter, want in zip(half.parameters(), plain.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            assert torch.equal(whole(parameter), want.detach().bfloat16())
            assert torch.equal(whole(parameter.grad), whole(parameter.grad).bfloat16())
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = Tower(7, line(pg), by)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert_same_parameters(other, plain)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        assert_same_parameters(other, plain)
        plain.zero_grad()
        other.zero_grad()
        run(other, plain, by)


def test_made_without_memory(pg) -> None:
    with torch.device("meta"):
        model = Tower(7, line(pg), HIDDEN)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device=pg.device)
    for part in (model.add_norm, model.gate, model.norm):
        part.reset_parameters()
    assert all(p.device_mesh.device_type == pg.device.type for p in model.parameters())
    found = {name: whole(p).cpu() for name, p in model.named_parameters()}
    wanted = {name: torch.full((7,), float(name.endswith("weight")), dtype=torch.float64) for name in found}
    torch.testing.assert_close(found, wanted)
    plain = PlainTower(7)
    model.load_state_dict(plain.state_dict())
    model.to("cpu")  # a DTensor goes to a mesh of the device that it goes to
    assert all(p.device_mesh.device_type == "cpu" for p in model.parameters())
    run(model, plain, HIDDEN)


def test_state_dicts_of_another_device(pg) -> None:
    """Whole or sharded, on the CPU or a GPU: they are copied to where the parameters are, or put in their place."""
    devices = {torch.device("cpu"), pg.device}
    for there in devices:
        plain = PlainTower(7)
        sharded = Tower(7, line(pg), HIDDEN, device=there)
        sharded.load_state_dict(plain.state_dict())
        for state in (plain.to(there).state_dict(), sharded.state_dict()):
            for here, made_on in [(device, device) for device in devices] + [(there, "meta")]:
                model = Tower(7, line(pg), HIDDEN, device=made_on)
                model.load_state_dict(state, assign=made_on == "meta")
                assert all(p.device == here and p.device_mesh.device_type == here.type for p in model.parameters())
                assert_same_parameters(model.to("cpu"), plain.cpu())


def test_state_dicts_of_another_mesh_of_the_same_ranks(pg) -> None:
    """A mesh of another name, as of another kind of device, is another one to torch, which copies between no two."""
    model, plain = tower(7, line(pg))
    named = init_device_mesh("cpu", (pg.size,), mesh_dim_names=("model",))
    other = Tower(7, DeviceMesh.from_torch(named), HIDDEN)
    other.load_state_dict(model.state_dict())
    assert all(p.device_mesh is named for p in other.parameters())
    assert_same_parameters(other, plain)
    put = Tower(7, line(pg), HIDDEN)
    for part in (put.add_norm, put.gate, put.norm):
        for name, p in list(part.named_parameters()):
            moved = DTensor.from_local(
                p.detach().to_local(), named, p.placements, shape=p.shape, stride=p.stride(), run_check=False
            )
            setattr(part, name, torch.nn.Parameter(moved))
    put.load_state_dict(plain.state_dict())
    assert all(p.device_mesh is named for p in put.parameters())
    assert_same_parameters(put, plain)
    run(put, plain, HIDDEN)


def test_local_parameters_are_asked_for(pg) -> None:
    model = Tower(7, line(pg), HIDDEN, parameters="local")
    pieces = [len(torch.arange(7).chunk(pg.size)[pg.rank]) if pg.rank < len(torch.arange(7).chunk(pg.size)) else 0]
    assert all(not isinstance(p, DTensor) and list(p.shape) == pieces for p in model.parameters())


def test_ranks_in_descending_order(pg) -> None:
    """torch puts the pieces of a DTensor together in ascending order of ranks, which is another order then."""
    if pg.size < 2:
        pytest.skip("needs 2 ranks")
    mesh = DeviceMesh(list(range(pg.size))[::-1])
    for make in (lambda **kw: RMSNorm(8, **kw), lambda **kw: SwiGLU(8, bias=True, **kw)):
        with pytest.raises(PlacementError, match=r'ascending order, or pass parameters="local"'):
            make(mesh=mesh, input=HIDDEN)
        make(mesh=mesh, input=HIDDEN, parameters="local")
        make(mesh=mesh, input=ROWS)


@pytest.mark.parametrize("by", [HIDDEN, ROWS])
def test_fsdp_over_a_tensor_parallel_mesh(pg, by: Shard) -> None:
    """Of rows, with the gradients of the norm in a bucket until FSDP puts other parameters in their place."""
    if pg.size != 4:
        pytest.skip("needs 4 ranks")
    from torch.distributed.fsdp import fully_shard

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    mesh = DeviceMesh.from_torch(both["model"])
    model, plain = tower(8, mesh, by)
    assert (bucket_gradients(model) > 0) == (by is ROWS)
    fully_shard(model, mesh=both["data"])
    assert all(p.device_mesh.ndim == 2 for p in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(2):
        batches = [[numbers((4, 8), 10 * step + 3 * d + k) for k in range(3)] for d in range(2)]
        x, residual, gradient = (mesh.shard_tensor(t, by.dim % 2) for t in batches[both.get_local_rank("data")])
        model(x, residual).backward(gradient)
        for x, residual, gradient in batches:
            plain(x, residual).backward(gradient / 2)  # FSDP takes the mean over its ranks
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
        torch.testing.assert_close(whole(norms[0]), norms[1], rtol=1e-9, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain)
