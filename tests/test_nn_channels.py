"""GroupNorm, BatchNorm and SyncBatchNorm, plain and sharded, against torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from module_cases import FLOATS, NARROW, ONE, assert_state_dicts_fit, check_module, each_rank
from nn_cases import S0, S1, S2, Here, P, Placements, R, along
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch_answers import assert_beside

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh
from shardfuse.errors import ModuleArgumentError, ModuleInputError, PlacementError
from shardfuse.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, LayerNorm, SyncBatchNorm

EPS = 1e-5
S3 = Shard(3)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def in_format(x: Tensor, last: bool) -> Tensor:
    return x.contiguous(memory_format=LAST[x.ndim]) if last else x


def check_group(
    here: Here,
    at: Placements,
    dtype: torch.dtype = torch.float64,
    shape: Sequence[int] = (4, 8, 6, 5),
    *,
    groups: int = 4,
    affine: bool = True,
    silu: bool = False,
    last: bool = False,
) -> None:
    module = GroupNorm(
        groups,
        shape[1],
        EPS,
        affine,
        activation="silu" if silu else None,
        mesh=here.mesh,
        input=at,
        dtype=dtype,
        device=here.device,
    )
    names = ("weight", "bias") if affine else ()
    parameters = {name: here.sample(along(at, 1), shape[1:2], dtype, 5 + k) for k, name in enumerate(names)}

    def function(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        y = functional.group_norm(x, groups, weight, bias, EPS)
        return (functional.silu(y) if silu else y,)

    def call(x: Tensor) -> Tensor:
        result = module(in_format(x, last), unsharded=tuple(shape) if here.mesh.size > 1 else None)
        if last:
            assert result.is_contiguous(memory_format=LAST[x.ndim])
        return result

    samples = {"x": here.sample(at, shape, dtype, 1)}
    check_module(module, function, samples, parameters, [here.sample(at, shape, dtype, 2)], dtype, call=call)


def check_batch(
    here: Here,
    at: Placements,
    dtype: torch.dtype = torch.float64,
    shape: Sequence[int] = (4, 3, 6, 5),
    *,
    affine: bool = True,
    training: bool = True,
    last: bool = False,
) -> None:
    kind = {2: BatchNorm1d, 3: BatchNorm1d, 4: BatchNorm2d, 5: BatchNorm3d}[len(shape)]
    module = kind(shape[1], EPS, affine=affine, mesh=here.mesh, input=at, dtype=dtype, device=here.device).train(
        training
    )
    whole = [R] * here.mesh.ndim
    kept = here.sample(whole, shape[1:2], dtype, 8).full, here.sample(whole, shape[1:2], dtype, 9).full.square()
    module.running_mean.copy_(kept[0])
    module.running_var.copy_(kept[1])
    kept = tuple(t.double().clone() for t in (module.running_mean, module.running_var))
    parameters = {
        name: here.sample(whole, shape[1:2], dtype, 5 + k) for k, name in enumerate(("weight", "bias")[: 2 * affine])
    }

    def function(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        running = (None, None) if training else (t.to(x.dtype) for t in kept)
        return (functional.batch_norm(x, *running, weight, bias, training, 0.1, EPS),)

    def call(x: Tensor) -> Tensor:
        return module(in_format(x, last), unsharded=tuple(shape) if here.mesh.size > 1 else None)

    x = here.sample(at, shape, dtype, 1)
    check_module(module, function, {"x": x}, parameters, [here.sample(at, shape, dtype, 2)], dtype, call=call)
    dims = [0, *range(2, len(shape))]
    expected = [0.9 * k + 0.1 * t for k, t in zip(kept, (x.full.mean(dims), x.full.var(dims)), strict=True)]
    for found, want in zip((module.running_mean, module.running_var), expected if training else kept, strict=True):
        assert_beside(found, want.to(dtype))
    assert module.num_batches_tracked == training


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_group_norm(dtype: torch.dtype) -> None:
    for shape in ((3, 32), (3, 8, 5), (2, 8, 3, 4, 5)):
        check_group(ONE, [R], dtype, shape, silu=len(shape) == 3)
    for options in ({"silu": True}, {"last": True, "silu": True}, {"affine": False, "silu": True}, {"affine": False}):
        check_group(ONE, [R], dtype, **options)
    check_group(ONE, [R], dtype, (2, 8, 3, 4, 5), last=True)
    check_group(ONE, [R], dtype, groups=1)
    check_group(ONE, [R], dtype, groups=8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_batch_norm(dtype: torch.dtype) -> None:
    for shape in ((6, 3), (4, 3, 5), (4, 3, 6, 5), (2, 3, 4, 2, 3)):
        for training in (True, False):
            check_batch(ONE, [R], dtype, shape, training=training)
    check_batch(ONE, [R], dtype, affine=False)
    check_batch(ONE, [R], dtype, last=True)
    check_batch(ONE, [R], dtype, last=True, training=False, affine=False)


def test_on_ranks() -> None:
    each_rank([2], {
        "group_batch": partial(check_group, at=[S0], silu=True),
        "group_channels": partial(check_group, at=[S1], silu=True),
        "group_channels_last": partial(check_group, at=[S1], silu=True, last=True),
        "group_image_rows": partial(check_group, at=[S2], silu=True),
        "group_image_rows_last": partial(check_group, at=[S2], last=True, shape=(2, 8, 7, 3)),
        "group_uneven_batch": partial(check_group, at=[S0], shape=(3, 8, 2, 2)),
        "group_uneven_columns": partial(check_group, at=[S3], shape=(2, 8, 2, 5)),
        "group_vectors": partial(check_group, at=[S1], shape=(3, 32)),
        "batch": partial(check_batch, at=[S0]),
        "batch_last": partial(check_batch, at=[S0], last=True),
        "batch_rows": partial(check_batch, at=[S2]),
        "batch_uneven": partial(check_batch, at=[S0], shape=(5, 3, 2, 2)),
        "batch_eval": partial(check_batch, at=[S0], training=False),
        **{f"group_{dtype}": partial(check_group, at=[S2], dtype=dtype, silu=True) for dtype in NARROW},
        **{f"batch_{dtype}": partial(check_batch, at=[S0], dtype=dtype) for dtype in NARROW},
    })  # fmt: skip
    square = {"group": partial(check_group, at=[S0, S1]), "batch": partial(check_batch, at=[S0, S2])}
    each_rank([2, 2], square)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_float32_beside_16_bits(dtype: torch.dtype) -> None:
    """Each element is the number of ``dtype`` nearest to float64, give or take float32's error: rounded once."""
    x = torch.randn(4, 8, 5, 5).to(dtype)
    vectors = {
        LayerNorm(5): lambda x, w, b: functional.layer_norm(x, (5,), w, b),
        GroupNorm(2, 8): lambda x, w, b: functional.group_norm(x, 2, w, b),
        BatchNorm2d(8): lambda x, w, b: functional.batch_norm(x, None, None, w, b, True),
    }
    for module, function in vectors.items():
        for p in module.parameters():
            torch.nn.init.normal_(p)
        given = x.clone().requires_grad_()
        result = module(given)
        result.backward(torch.ones_like(result))
        wide = function(x.double(), module.weight.detach().double(), module.bias.detach().double())
        assert_near(result.detach(), wide, n=0.51)
        assert given.grad.dtype == dtype
        assert module.weight.grad.dtype == module.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("affine", [True, False])
def test_state_dicts_are_torchs(affine: bool) -> None:
    assert_state_dicts_fit(GroupNorm(2, 6, affine=affine), torch.nn.GroupNorm(2, 6, affine=affine))
    for kind in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"):
        ours = {"BatchNorm1d": BatchNorm1d, "BatchNorm2d": BatchNorm2d, "BatchNorm3d": BatchNorm3d}
        module = ours.get(kind, SyncBatchNorm)
        for tracked in (True, False):
            theirs = getattr(torch.nn, kind)(6, affine=affine, track_running_stats=tracked)
            assert_state_dicts_fit(module(6, affine=affine, track_running_stats=tracked), theirs)


@pytest.mark.parametrize("training", [True, False])
def test_one_running_statistic_without_the_other(training: bool) -> None:
    """Before anything is written, in either mode."""
    x = torch.randn(2, 8, 3, 3)
    module = BatchNorm2d(8).train(training)
    module.running_mean = None
    with pytest.raises(ModuleInputError, match="running_mean has None"):
        module(x)
    module = BatchNorm2d(8).train(training)
    module.running_mean = module.running_mean.bfloat16()
    with pytest.raises(ModuleInputError, match=r"running_var has dtype torch.float32, expected torch.bfloat16"):
        module(x)
    assert not module.running_mean.any()
    assert module.num_batches_tracked.item() == 0


def test_one_value_a_channel_in_evaluation_without_statistics() -> None:
    with pytest.raises(ModuleInputError, match="more without running statistics"):
        BatchNorm1d(8, track_running_stats=False).eval()(torch.randn(1, 8))


def test_the_bias_may_change_before_the_backward() -> None:
    """No gradient reads it; but that of an activation does."""
    for activation in (None, "silu"):
        module = GroupNorm(4, 8, activation=activation)
        x = torch.randn(2, 8, 3, 3, requires_grad=True)
        result = module(x)
        with torch.no_grad():
            module.bias.mul_(2)
        if activation is None:
            result.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("unsharded", [(4, 8, 4), (), (4, 8, 4, 6, 5), (-1, 8, 4, 6)])
def test_what_is_no_shape_of_the_whole(unsharded: Sequence[int], last: bool) -> None:
    def on_rank(rank: int, size: int) -> None:
        x, mesh = in_format(torch.randn(2, 8, 4, 6), last), DeviceMesh(range(size))
        for module in (GroupNorm(2, 8, mesh=mesh, input=S0), BatchNorm2d(8, mesh=mesh, input=S0)):
            with pytest.raises(ModuleInputError, match=r"unsharded has sizes .*, expected 4 sizes of 0 or more"):
                module(x, unsharded=unsharded)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("tracked", [True, False])
def test_running_statistics_over_several_batches(momentum: float | None, tracked: bool) -> None:
    module = BatchNorm2d(3, momentum=momentum, track_running_stats=tracked)
    theirs = torch.nn.BatchNorm2d(3, momentum=momentum, track_running_stats=tracked)
    for step in range(4):
        x = torch.randn(4, 3, 5, 5) * (1 + step) + step
        torch.testing.assert_close(module(x), theirs(x))
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor)
    torch.testing.assert_close(module.eval()(x), theirs.eval()(x))
    module.reset_running_stats()
    if tracked:
        assert (module.running_var == 1).all()
        assert module.num_batches_tracked == 0


@pytest.mark.parametrize("momentum", [0.3, None])
def test_an_empty_batch_leaves_the_running_statistics(momentum: float | None) -> None:
    module, theirs = (kind(3, momentum=momentum) for kind in (BatchNorm1d, torch.nn.BatchNorm1d))
    mean, variance = torch.zeros(3), torch.ones(3)
    for rows in (4, 0, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(module(x), theirs(x))
        functional.batch_norm(x, mean, variance, training=True, momentum=0.5)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor)
    assert torch.stack([mean, variance]).isfinite().all()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("compiled", [False, True])
def test_running_statistics_in_float16_are_rounded_once(momentum: float | None, compiled: bool) -> None:
    """Of a variance that float16 does not hold its share is kept, and more batches are counted than it holds."""
    module, theirs = (kind(3, momentum=momentum, dtype=torch.float16) for kind in (BatchNorm1d, torch.nn.BatchNorm1d))
    for own in (module, theirs):
        own.num_batches_tracked.fill_(0 if momentum else 70000)
    x = (torch.randn(64, 3) * 400).to(torch.float16)
    (torch.compile(module, backend="eager", fullgraph=True) if compiled else module)(x)
    theirs(x)
    assert theirs.running_var.isfinite().all()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor)


def test_sync_batch_norm() -> None:
    """Over the ranks' batches as over one; gradients of parameters are the ranks' average."""
    x, gradient = torch.randn(6, 3, 4, 4, dtype=torch.float64), torch.randn(6, 3, 4, 4, dtype=torch.float64)
    theirs, given = torch.nn.BatchNorm2d(3, dtype=torch.float64), x.clone().requires_grad_()
    expected = theirs(given)
    expected.backward(gradient)

    def run(rank: int, size: int) -> None:
        module = SyncBatchNorm(3, process_group=dist.group.WORLD, dtype=torch.float64)
        mine = x.chunk(size)[rank].clone().requires_grad_()
        result = module(mine)
        result.backward(gradient.chunk(size)[rank])
        torch.testing.assert_close(result, expected.detach().chunk(size)[rank])
        torch.testing.assert_close(mine.grad, given.grad.chunk(size)[rank])
        torch.testing.assert_close(module.weight.grad, theirs.weight.grad / size)
        torch.testing.assert_close(module.running_var, theirs.running_var)

    run_ranks(2, run)
    for group in (None, dist.GroupMember.NON_GROUP_MEMBER):
        alone = SyncBatchNorm(3, process_group=group, dtype=torch.float64)
        torch.testing.assert_close(alone(x), expected.detach())


def test_a_rank_may_evaluate_a_sync_batch_norm_alone() -> None:
    """Before the first step of training as between two; gradients are then this rank's own."""
    x = torch.randn(6, 3, 4, dtype=torch.float64)

    def check_alone(module: SyncBatchNorm) -> None:
        theirs = torch.nn.BatchNorm1d(3, dtype=torch.float64)
        theirs.load_state_dict(module.state_dict())
        for m in (theirs.eval(), module.eval()):
            m.zero_grad()
            m(x).square().sum().backward()
        torch.testing.assert_close(module.weight.grad, theirs.weight.grad)
        module.zero_grad()
        module.train()

    def run(rank: int, size: int) -> None:
        module = SyncBatchNorm(3, dtype=torch.float64)
        for evaluating in range(size):
            if rank == evaluating:
                check_alone(module)
            result = module(x.chunk(size)[rank])
            expected = torch.nn.functional.batch_norm(x, None, None, training=True).chunk(size)[rank]
            torch.testing.assert_close(result, expected)

    run_ranks(2, run)


def test_bad_arguments() -> None:
    mesh = DeviceMesh([0])
    for make, message in (
        (lambda: GroupNorm(0, 4), "num_groups="),
        (lambda: GroupNorm(3, 4), "num_channels="),
        (lambda: GroupNorm(2, 4, -1.0), "eps="),
        (lambda: GroupNorm(2, 4, activation="gelu"), "activation="),
        (lambda: BatchNorm2d(0), "num_features="),
        (lambda: BatchNorm2d(4, momentum=2.0), "momentum="),
        (lambda: SyncBatchNorm(4, process_group=[0, 1]), "process_group="),
        (lambda: BatchNorm1d(4, eps=float("nan")), "eps="),
    ):
        with pytest.raises(ModuleArgumentError, match=message):
            make()
    for make in (
        lambda: GroupNorm(2, 4, mesh=mesh, input=P),
        lambda: GroupNorm(2, 4, mesh=mesh, input=Shard(-1)),
        lambda: GroupNorm(3, 6, mesh=DeviceMesh([0, 1]), input=S1, parameters="local"),
        lambda: GroupNorm(2, 4, input=S0),
        lambda: BatchNorm2d(4, mesh=mesh, input=S1),
        lambda: BatchNorm2d(4, mesh=mesh, input=P),
    ):
        with pytest.raises(PlacementError, match="input="):
            make()


def test_bad_inputs() -> None:
    for call, message in (
        (lambda: GroupNorm(2, 4)(torch.ones(4)), "GroupNorm: x has 1 dims"),
        (lambda: GroupNorm(2, 4)(torch.ones(2, 3)), "GroupNorm: x has shape"),
        (lambda: GroupNorm(2, 4)(torch.ones(2, 4, dtype=torch.int32)), "GroupNorm: x has dtype"),
        (
            lambda: GroupNorm(4, 4)(torch.ones(1, 4, 1)),
            r"GroupNorm: x has shape \(1, 4, 1\), one value per group, expected",
        ),
        (
            lambda: GroupNorm(4, 4).eval()(torch.ones(1, 4)),
            "GroupNorm: x has shape .* one value per group",
        ),  # as torch's
        (lambda: BatchNorm2d(4)(torch.ones(2, 4)), "BatchNorm2d: x has 2 dims, expected 4"),
        (lambda: BatchNorm1d(4)(torch.ones(1, 4)), "BatchNorm1d: x has .* one value per channel"),
    ):
        with pytest.raises(ModuleInputError, match=message):
            call()
    torch.testing.assert_close(GroupNorm(4, 4)(torch.ones(2, 4)), torch.nn.GroupNorm(4, 4)(torch.ones(2, 4)))


def test_autograd_makes_no_gradients_of_statistics() -> None:
    """It fills zeros in for results that nothing is made of, each by a launch, unless they are said to have none."""
    norm, x = BatchNorm2d(4), torch.randn(2, 4, 3, 3, requires_grad=True)
    result = norm(x).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
        result.backward()
    assert not any(e.name in ("aten::zeros", "aten::zero_") for e in seen.events())


def test_batches_are_counted_where_statistics_were_put_away() -> None:
    ours, theirs = BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    for module in (ours, theirs):
        module.running_mean = module.running_var = None
        for _ in range(2):
            module(torch.ones(4, 3))
        module.eval()(torch.ones(4, 3))
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 2
