"""Modules of shardfuse.nn on ranks under what torch offers: each against the same call without it, bit by bit.

What the modules give without it is compared with torch's in float64 in test_nn.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from module_ways import TABLE, TWICE, WAYS, Trial, differentiated_twice, run
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.roundings import assert_near, spacing
from shardfuse import DeviceMesh, nn
from shardfuse.errors import PlacementError
from shardfuse.nn import (
    AddLayerNorm,
    AddRMSNorm,
    CrossEntropyLoss,
    DropoutAddNorm,
    FusionTimer,
    RMSNorm,
    SwiGLU,
    redistribute,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from lm_model import LanguageModel, ModelConfig, UnshardedLanguageModel

pytestmark = [pytest.mark.mpi]
HIDDEN, ROWS, BATCH, CHANNELS = 16, 8, 2, 4
PLAIN = ("loss", "redistribute", "softmax", "gelu", "GELU gate", "rotary", "log-probability")
"""Those without parameters."""


class Move(torch.nn.Module):
    """``redistribute`` as a module."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return redistribute(x, self.mesh, Partial(), Shard(1))


def normal(pg, *shape: int, seed: int) -> Tensor:
    """Of this rank alone, where ``seed`` is even; of all ranks where it is odd."""
    generator = torch.Generator().manual_seed(seed if seed % 2 else seed + 1000 * (1 + pg.rank))
    return torch.randn(shape, generator=generator).to(pg.device)


def trial_of(name: str, pg, parameters: str) -> Trial:
    mesh, n = DeviceMesh(list(range(pg.size))), pg.size
    where = {"mesh": mesh, "parameters": parameters, "device": pg.device}
    halves = (BATCH, ROWS // n, HIDDEN // 2)
    whole, rows, columns = (BATCH, ROWS, HIDDEN), (BATCH, ROWS // n, HIDDEN), (BATCH, ROWS, HIDDEN // n)
    image, heads = (BATCH, CHANNELS, ROWS // n, 3), (BATCH, 2, ROWS // n, HIDDEN)
    made: dict[str, tuple[Callable[[], torch.nn.Module], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
        "norm of rows": (lambda: RMSNorm(HIDDEN, input=Shard(1), **where), [rows], [rows]),
        "norm of a hidden axis": (lambda: RMSNorm(HIDDEN, input=Shard(-1), **where), [columns], [columns]),
        "norm between parallel layers": (
            lambda: AddRMSNorm(
                HIDDEN,
                bias=True,
                input=Partial(),
                residual=Shard(1),
                output=Replicate(),
                output_grad=Partial(),
                **where,
            ),
            [whole, rows],
            [whole, rows],
        ),
        "gate": (lambda: SwiGLU(HIDDEN, bias=True, input=Shard(-1), **where), [columns, columns], [columns]),
        "loss": (lambda: CrossEntropyLoss(mesh=mesh, logits=Shard(-1)), [columns], [()]),
        "redistribute": (lambda: Move(mesh), [whole], [rows]),
        "layer norm": (
            lambda: AddLayerNorm(
                HIDDEN, input_bias=True, input=Partial(), residual=Shard(1), output=Replicate(), **where
            ),
            [whole, rows],
            [whole, rows],
        ),
        "packed gate": (lambda: SwiGLU(HIDDEN // 2, bias=True, input=Shard(1), **where), [rows], [halves]),
        "dropout and norm": (
            lambda: DropoutAddNorm(
                HIDDEN, input_bias=True, input=Partial(), residual=Shard(1), output=Replicate(), **where
            ).eval(),
            [whole, rows],
            [whole, rows],
        ),
        "group norm": (
            lambda: nn.GroupNorm(2, CHANNELS, activation="silu", input=Shard(2), **where), [image], [image]
        ),
        "batch norm": (lambda: nn.BatchNorm2d(CHANNELS, input=Shard(2), **where), [image], [image]),
        "softmax": (lambda: nn.Softmax(mesh=mesh, input=Shard(-1)), [columns], [columns]),
        "gelu": (lambda: nn.GELU("tanh", mesh=mesh, input=Shard(1)), [rows], [rows]),
        "GELU gate": (lambda: nn.GeGLU(mesh=mesh, input=Shard(-1)), [columns, columns], [columns]),
        "rotary": (lambda: nn.RotaryEmbedding(HIDDEN, mesh=mesh, input=Shard(2)), [heads, heads], [heads, heads]),
        "log-probability": (
            lambda: nn.LogProb(mesh=mesh, logits=Shard(-1), entropy=True), [columns], [(BATCH, ROWS)] * 2
        ),
    }  # fmt: skip
    make, shapes, results = made[name]
    arguments = [normal(pg, *shape, seed=2 * k) for k, shape in enumerate(shapes)]
    is_replicated = name in ("loss", "log-probability")
    gradients = [normal(pg, *shape, seed=2 * k + (21 if is_replicated else 20)) for k, shape in enumerate(results)]
    if is_replicated:
        target = torch.randint(HIDDEN, (BATCH, ROWS), generator=torch.Generator().manual_seed(3))
        arguments.append(target.to(pg.device))
    return Trial(make(), arguments, gradients)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for k, (got, want) in enumerate(zip(found, expected, strict=True)):
        got, want = (t.to_local() if isinstance(t, DTensor) else t for t in (got, want))
        assert torch.equal(got, want), f"result or gradient {k}"


COMPILED = {
    "torch.compile, fullgraph": {"norm of a hidden axis": "dtensor", "packed gate": "dtensor"},
    "torch.compile, dynamic batch": {"norm between parallel layers": "dtensor", "loss": "local"},
    "torch.export": {"norm between parallel layers": "local", "loss": "local"},
}
"""Compiling takes seconds: a case or two for each way; the language model below has the other modules."""
COMPILED_ON_TWO = ("dropout and norm", "group norm", "batch norm", *PLAIN[2:])
"""In all ways, with local parameters: graphs of more ranks are alike."""
NAMES = ["norm of rows", "norm of a hidden axis", "norm between parallel layers", "gate", "layer norm", "packed gate"]
NAMES += ["dropout and norm", "group norm", "batch norm", *PLAIN]


@pytest.mark.two_ranks_suffice
@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str, pg) -> None:
    for name in NAMES:
        for parameters in ("local", "dtensor"):
            has_parameters = name not in PLAIN
            if parameters == "dtensor" and not has_parameters:
                continue
            is_on_two = pg.size == 2 and name in COMPILED_ON_TWO and parameters == "local"
            if way in COMPILED and COMPILED[way].get(name) != parameters and not is_on_two:
                continue
            trial = trial_of(name, pg, parameters)
            if way == "meta device, to_empty, reset_parameters" and not has_parameters:
                continue
            assert_equal(WAYS[way](trial), run(trial))


@pytest.mark.two_ranks_suffice
def test_a_compiled_language_model(pg) -> None:
    """The example's model, all modules in it on local tensors: one graph each way, and the gradients of eager.

    On a GPU a graph may take another of torch's attention kernels than eager torch does for heads this small, so that
    activations differ by roundings of bfloat16.
    """
    config = ModelConfig(dim=16, layers=1, heads=4, hidden=32, sequence=8, vocabulary=64)
    model = LanguageModel(config, DeviceMesh(list(range(pg.size)))).to(pg.device)
    whole = UnshardedLanguageModel(config, seed=0).to(pg.device)
    model.load_unsharded(dict(whole.named_parameters()))
    model.dtype = torch.bfloat16
    tokens, targets = torch.randint(64, (2, 2, 8), generator=torch.Generator().manual_seed(0)).to(pg.device)
    trial = Trial(model, [tokens, targets], [torch.ones((), device=pg.device)])
    expected = run(trial)
    model.timer = timer = FusionTimer().watch(model)
    found = WAYS["torch.compile, fullgraph"](trial)
    assert timer.seconds() > 0
    if pg.device.type == "cpu":
        assert_equal(found, expected)
        return
    model.double().dtype = torch.float64
    for k, (got, eager, wide) in enumerate(zip(found, expected, run(trial), strict=True)):
        # Twice eager torch's largest error, and a rounding of bfloat16 for each of the two products that the largest
        # element comes out of, where eager torch's happen to cancel.
        off = 2 * (eager.double() - wide).abs().amax() + 2 * spacing(wide.abs().amax(), torch.bfloat16)
        assert_near(got, wide, slack=lambda off=off: off, what=f"result or gradient {k}")


@pytest.mark.two_ranks_suffice
def test_compiled_on_dtensors(pg) -> None:
    """Activations and their gradients as DTensors, of rows that ranks share out unevenly."""
    mesh = DeviceMesh(list(range(pg.size)))
    torch_mesh = init_device_mesh(pg.device.type, (pg.size,))
    norm = AddRMSNorm(
        HIDDEN, bias=True, mesh=mesh, input=Partial(), residual=Shard(1), output=Replicate(), device=pg.device
    )
    shape = (BATCH, ROWS - 1, HIDDEN)
    rows = len(torch.arange(ROWS - 1).chunk(pg.size)[pg.rank])
    x = DTensor.from_local(normal(pg, *shape, seed=0), torch_mesh, [Partial()], run_check=False)
    local = normal(pg, BATCH, rows, HIDDEN, seed=2)
    stride = torch.empty(shape, device="meta").stride()
    residual = DTensor.from_local(
        local, torch_mesh, [Shard(1)], run_check=False, shape=torch.Size(shape), stride=stride
    )
    torch._dynamo.reset()
    found = []
    for call in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
        norm.zero_grad()
        leaves = [t.detach().requires_grad_() for t in (x, residual)]
        normed, total = call(*leaves)
        assert normed.placements == (Replicate(),)
        assert total.placements == (Shard(1),)
        assert total.shape == shape
        (normed.to_local().square().sum() + total.to_local().square().sum()).backward()
        found.append([normed, total, *(t.grad for t in (*leaves, *norm.parameters()))])
    assert_equal([t.detach() for t in found[1]], [t.detach() for t in found[0]])


@pytest.mark.two_ranks_suffice
def test_a_sync_batch_norm_compiled(pg) -> None:
    """Which makes a mesh of the process group where it is first called, or compiled."""
    x, dy = (normal(pg, 3, 4, 5, seed=pg.rank + k) for k in (1, 100))
    for is_first in (True, False):
        compiled, module = (nn.SyncBatchNorm(4, device=pg.device) for _ in range(2))
        if not is_first:
            compiled(x), module(x)
        torch._dynamo.reset()
        found = []
        for norm, call in ((module, module), (compiled, torch.compile(compiled, fullgraph=True, backend="aot_eager"))):
            given = x.clone().requires_grad_()
            result = call(given)
            found.append([result, *torch.autograd.grad(result, [given, *norm.parameters()], dy), *norm.buffers()])
        assert_equal(*([t.detach() for t in made] for made in found))


@pytest.mark.two_ranks_suffice
def test_a_compiled_sync_batch_norm_between_evaluations_is_compiled_once(pg) -> None:
    x = normal(pg, 2, 4, 3, 3, seed=pg.rank)
    module = nn.SyncBatchNorm(4, device=pg.device)
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=counter)
    for _ in range(3):
        for mode in (True, False):
            module.train(mode)
            compiled(x)
    assert counter.frame_count == 2, "one for training and one for evaluation"


@pytest.mark.two_ranks_suffice
def test_uneven_local_tensors_compiled(pg) -> None:
    rows = len(torch.arange(ROWS - 1).chunk(pg.size)[pg.rank])
    trial = trial_of("norm between parallel layers", pg, "local")
    cut = normal(pg, BATCH, rows, HIDDEN, seed=2)
    whole = trial.arguments[0][:, 1:].contiguous()
    trial = Trial(trial.module, [whole, cut], [whole.clone(), cut.clone()])
    assert_equal(WAYS["torch.compile, fullgraph"](trial), run(trial))


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_fake_outputs_are_as_those_of_a_run(rows: int, pg) -> None:
    """Shapes of gathered rows follow from this rank's, or, where ranks have parts of other sizes, from the whole."""
    mesh = DeviceMesh(list(range(pg.size)))
    norm = RMSNorm(HIDDEN, mesh=mesh, input=Shard(1), output=Replicate(), parameters="local", device=pg.device)
    here = len(torch.arange(rows).chunk(pg.size)[pg.rank])
    tensors = [normal(pg, BATCH, here, HIDDEN, seed=0).requires_grad_(), norm.weight]
    unsharded = None if rows == ROWS else [BATCH, rows, HIDDEN]
    assert norm(tensors[0], unsharded=unsharded).shape == (BATCH, rows, HIDDEN)
    torch.library.opcheck(norm.library_op, (tensors, norm.text, unsharded), test_utils="test_faketensor")


def test_double_backward_is_refused(pg) -> None:
    assert TWICE.fullmatch(differentiated_twice(trial_of("norm of rows", pg, "local")))


class Tower(torch.nn.Module):
    """Plain modules of both kinds around plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = (
            RMSNorm(HIDDEN),
            torch.nn.Linear(HIDDEN, HIDDEN),
            torch.nn.Linear(HIDDEN, HIDDEN),
        )
        self.swiglu, self.down = SwiGLU(HIDDEN, bias=True), torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(self.swiglu(self.gate(x), self.up(x)))


def tower(pg) -> tuple[Tower, Tensor]:
    torch.manual_seed(0)
    return Tower().to(pg.device), torch.randn(4 * pg.size, HIDDEN).to(pg.device)


def summed_gradients(model: Tower, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("way", ["DistributedDataParallel", "fully_shard (FSDP2)"])
def test_data_parallel(way: str, pg) -> None:
    """Each rank has a part of the batch; gradients are the mean over ranks, those of the whole batch."""
    model, x = tower(pg)
    expected = summed_gradients(model, x)
    model.zero_grad()
    mine = x.chunk(pg.size)[pg.rank]
    if way == "DistributedDataParallel":
        wrapped: torch.nn.Module = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(pg.device.type, (pg.size,))
        for part in (model.norm, model.swiglu):
            fully_shard(part, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    for _ in range(2):  # parameters come and go between the calls
        model.zero_grad()
        wrapped(mine).square().mean().backward()
    for p, want in zip(model.parameters(), expected, strict=True):
        got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_data_parallel_of_dtensors_is_refused_by_torch(pg) -> None:
    trial = trial_of("norm of rows", pg, "dtensor")
    with pytest.raises(NotImplementedError, match="broadcast"):
        DistributedDataParallel(trial.module)
    run(Trial(DistributedDataParallel(trial_of("norm of rows", pg, "local").module), trial.arguments, trial.gradients))


def test_parallelize_module(pg) -> None:
    """Layers that torch shards, around a module that is made for what they leave."""
    model, x = tower(pg)
    expected = summed_gradients(model, x)
    mesh = init_device_mesh(pg.device.type, (pg.size,))
    gate = SwiGLU(HIDDEN, bias=True, mesh=DeviceMesh.from_torch(mesh), input=Shard(-1), device=pg.device)
    gate.load_state_dict(model.swiglu.state_dict())
    model.swiglu = gate
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    found = summed_gradients(model, x)
    for got, want in zip(found, expected, strict=True):
        got = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_parallelize_module_refuses_a_plain_module(pg) -> None:
    """A style that makes a plain module's parameters DTensors: it has no mesh on which its fusion would run."""
    model, x = tower(pg)
    parallelize_module(model, init_device_mesh(pg.device.type, (pg.size,)), {"norm": SequenceParallel(sequence_dim=0)})
    with pytest.raises(PlacementError, match="make the module with mesh=DeviceMesh"):
        model.norm(x.chunk(pg.size)[pg.rank])


@pytest.mark.two_ranks_suffice
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_a_compiled_module_replays_its_draw(pg, use_reentrant: bool) -> None:
    """One within the compiled function, around an op that takes a list of tensors and draws, is refused by torch."""
    where = {"mesh": DeviceMesh(list(range(pg.size))), "device": pg.device}
    module = DropoutAddNorm(HIDDEN, 0.5, input=Shard(0), residual=Shard(0), **where)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager")
    x, residual = (normal(pg, ROWS, HIDDEN, seed=seed).requires_grad_() for seed in (2, 4))
    _, added = checkpoint(compiled, x, residual, use_reentrant=use_reentrant)
    added.sum().backward()
    kept = added.detach() != residual.detach()
    assert 0 < kept.sum() < kept.numel()
    assert x.grad is not None
    assert torch.equal(x.grad, 2.0 * kept)


def test_the_table_has_all() -> None:
    assert {"DistributedDataParallel", "fully_shard (FSDP2)", "parallelize_module", *WAYS} < set(TABLE)
