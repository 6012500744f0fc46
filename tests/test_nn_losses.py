"""CrossEntropyLoss with a z-loss and a temperature, LogProb, and LinearCrossEntropyLoss, plain and sharded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from module_cases import FLOATS, NARROW, ONE, check_module, each_rank
from nn_cases import S0, S1, S2, Here, P, Placements, R, named
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch_gradients import leaf

import shardfuse
from shardfuse import DeviceMesh
from shardfuse.errors import ModuleArgumentError, ModuleInputError, PlacementError
from shardfuse.nn import CrossEntropyLoss, LinearCrossEntropyLoss, LogProb


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def targets(shape: Sequence[int], classes: int) -> Tensor:
    """Of which two are ignored."""
    target = torch.randint(classes, shape, generator=torch.Generator().manual_seed(2))
    target.view(-1)[:2] = -100
    return target


def rows_of(at: Placements, last: int) -> Placements:
    return [R if isinstance(p, Shard) and p.dim == last else p for p in at]


def check_loss(
    here: Here,
    at: Placements,
    dtype: torch.dtype = torch.float64,
    shape: Sequence[int] = (3, 4, 12),
    *,
    reduction: str = "mean",
    z_loss: float = 0.0,
    temperature: float = 1.0,
    smoothing: float = 0.0,
) -> None:
    target, last = targets(shape[:-1], shape[-1]).to(here.device), len(shape) - 1
    options = {"reduction": reduction, "label_smoothing": smoothing}
    module = CrossEntropyLoss(
        mesh=here.mesh, logits=named(at, last), z_loss=z_loss, temperature=temperature, num_classes=shape[-1], **options
    )
    rows = rows_of(at, last)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        x = wide(x).flatten(0, -2) / temperature
        loss = functional.cross_entropy(x, target.flatten(), reduction="none", label_smoothing=smoothing)
        counted = target.flatten() != -100
        loss = loss + torch.where(counted, z_loss * x.logsumexp(-1).square(), 0.0)
        return (loss.view(target.shape) if reduction == "none" else
                loss.sum() / (counted.sum() if reduction == "mean" else 1),)  # fmt: skip

    statistics = wide(torch.empty(0, dtype=dtype)).dtype
    at_loss, loss_shape = (rows, shape[:-1]) if reduction == "none" else ([R] * here.mesh.ndim, ())
    gradient = here.sample(at_loss, loss_shape, statistics, 3)
    logits, mine = here.sample(at, shape, dtype, 1), here.cut(target, rows)
    whole = {"unsharded": tuple(shape)} if here.mesh.size > 1 else {}
    check_module(module, function, {"logits": logits}, {}, [gradient], dtype, call=lambda x: module(x, mine, **whole))


def check_log_prob(
    here: Here,
    at: Placements,
    dtype: torch.dtype = torch.float64,
    shape: Sequence[int] = (3, 4, 12),
    *,
    temperature: float = 1.0,
    entropy: bool = True,
) -> None:
    target, last = targets(shape[:-1], shape[-1]).to(here.device), len(shape) - 1
    module = LogProb(
        mesh=here.mesh, logits=named(at, last), temperature=temperature, entropy=entropy, num_classes=shape[-1]
    )
    rows = rows_of(at, last)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        logs = functional.log_softmax(wide(x) / temperature, -1)
        counted = target != -100
        picked = logs.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        found = [picked, -(logs.exp() * logs).sum(-1)][: 1 + entropy]
        return tuple(torch.where(counted, t, 0.0) for t in found)

    statistics = wide(torch.empty(0, dtype=dtype)).dtype
    upstream = [here.sample(rows, shape[:-1], statistics, 3 + k) for k in range(1 + entropy)]
    logits, mine = here.sample(at, shape, dtype, 1), here.cut(target, rows)
    whole = {"unsharded": tuple(shape)} if here.mesh.size > 1 else {}
    check_module(module, function, {"logits": logits}, {}, upstream, dtype, call=lambda x: module(x, mine, **whole))


def check_linear(
    here: Here,
    at: Placements,
    dtype: torch.dtype = torch.float64,
    *,
    chunk_rows: int | None = 5,
    reduction: str = "mean",
    bias: bool = False,
    **options: float,
) -> None:
    """Classes are sharded or not; x's gradient is a summand of each rank, so ranks are added up by hand."""
    classes, cut = 14, isinstance(at[0], Shard)
    target = targets((3, 4), classes).to(here.device)
    parameter = [S0 if cut else R]
    x = here.sample([R], (3, 4, 6), dtype, 1)
    weight, its = here.sample(parameter, (classes, 6), dtype, 2), here.sample(parameter, (classes,), dtype, 3)
    module = LinearCrossEntropyLoss(
        chunk_rows=chunk_rows, mesh=here.mesh, logits=at, reduction=reduction, num_classes=classes, **options
    )
    samples = {"x": x, "weight": weight, **({"bias": its} if bias else {})}

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        logits = wide(functional.linear(x, weight, bias)).flatten(0, -2)
        names = {"label_smoothing": "label_smoothing"}
        loss = functional.cross_entropy(
            logits, target.flatten(), reduction=reduction, **{names[k]: v for k, v in options.items()}
        )
        return (loss.view(target.shape) if reduction == "none" else loss,)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return module(_Summed.apply(x) if cut else x, weight, target, bias)

    statistics = wide(torch.empty(0, dtype=dtype)).dtype
    gradient = here.sample([R], (3, 4) if reduction == "none" else (), statistics, 5)
    check_module(module, function, samples, {}, [gradient], dtype, call=call)


class _Summed(torch.autograd.Function):
    """x, whose gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        whole = gradient.clone()
        torch.distributed.all_reduce(whole)
        return whole


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain(dtype: torch.dtype) -> None:
    for reduction in ("mean", "sum", "none"):
        check_loss(ONE, [R], dtype, reduction=reduction, z_loss=0.3, temperature=0.7, smoothing=0.1)
        check_linear(ONE, [R], dtype, reduction=reduction)
    check_loss(ONE, [R], dtype, z_loss=0.1)
    check_loss(ONE, [R], dtype, temperature=2.5)
    for entropy in (True, False):
        check_log_prob(ONE, [R], dtype, entropy=entropy)
        check_log_prob(ONE, [R], dtype, entropy=entropy, temperature=0.6)
    check_linear(ONE, [R], dtype, bias=True, label_smoothing=0.2)
    check_linear(ONE, [R], dtype, chunk_rows=None)


def test_on_ranks() -> None:
    all_of_it = {"z_loss": 0.3, "temperature": 0.7, "smoothing": 0.1}
    each_rank([2], {
        "loss_classes": partial(check_loss, at=[S2], **all_of_it),
        "loss_uneven_classes": partial(check_loss, at=[S2], shape=(2, 3, 9), reduction="none", **all_of_it),
        "loss_rows": partial(check_loss, at=[S1], **all_of_it),
        "log_prob_classes": partial(check_log_prob, at=[S2], temperature=0.6),
        "log_prob_uneven_classes": partial(check_log_prob, at=[S2], shape=(2, 3, 9)),
        "log_prob_rows": partial(check_log_prob, at=[S0], shape=(4, 2, 7)),
        "linear_classes": partial(check_linear, at=[Shard(-1)], bias=True, label_smoothing=0.1),
        "linear_replicated": partial(check_linear, at=[R], reduction="sum"),
        **{f"loss_{dtype}": partial(check_loss, at=[S2], dtype=dtype, **all_of_it) for dtype in NARROW},
        **{f"log_prob_{dtype}": partial(check_log_prob, at=[S2], dtype=dtype) for dtype in NARROW},
    })  # fmt: skip
    each_rank([4], {"fewer_classes_than_ranks": partial(check_log_prob, at=[S2], shape=(2, 3, 3))})
    each_rank([2, 2], {"rows_and_classes": partial(check_log_prob, at=[S0, S2], shape=(4, 2, 8))})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_infinite_logits_and_of_targets_that_are_no_class(dtype: torch.dtype) -> None:
    """A class of no weight has the gradient 0, a row whose target is no class NaN, beyond 32 bits too, an ignored 0."""
    x = leaf(torch.randn(6, 9, generator=torch.Generator().manual_seed(4)).to(dtype))
    with torch.no_grad():
        x[0, 3:6], x[1, 1:], x[4, 2] = -torch.inf, -torch.inf, torch.inf
    target = torch.tensor([0, 0, 2**32 + 3, -1, -100, 9])
    log_prob, entropy = LogProb.made_again({**LogProb(entropy=True).settings()})(x, target)
    logs = functional.log_softmax(x.detach().double()[:2], -1)
    p = logs.exp()
    wanted = -torch.where(p == 0, 0.0, p * logs).sum(-1)
    assert torch.allclose(entropy[:2].double(), wanted, rtol=1e-5)
    assert log_prob[4] == entropy[4] == 0
    (log_prob.sum() + 2 * entropy.sum()).backward()
    assert x.grad is not None
    found, hot = x.grad.double(), torch.eye(9)[target[:2]].double()
    right = hot - p - 2 * torch.where(p == 0, 0.0, p * (logs + wanted[:, None]))
    assert torch.allclose(found[:2], right, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-6)
    assert found[0, 3:6].eq(0).all()
    assert found[4].eq(0).all()
    for made in (log_prob, entropy, *found.T):
        assert made[[2, 3, 5]].isnan().all()
    plain = leaf(x.detach().clone())
    loss = CrossEntropyLoss.made_again({**CrossEntropyLoss(reduction="none").settings()})(plain, target)
    loss.sum().backward()
    assert plain.grad is not None
    assert loss.isnan().tolist() == plain.grad.isnan().all(1).tolist() == [False, False, True, True, False, True]
    assert plain.grad[4].eq(0).all()


@pytest.mark.parametrize(("entropy", "bytes_a_row"), [(False, 16), (True, 20)])
def test_what_is_kept_and_what_is_sent(entropy: bool, bytes_a_row: int) -> None:
    """Beside the logits a row's target, maximum and logarithm of the sum; nothing is sent backward."""

    def run(rank: int, size: int) -> list[str]:
        mesh = DeviceMesh([0, 1])
        module = LogProb(mesh=mesh, logits=Shard(-1), entropy=entropy)
        x, target = torch.randn(5, 8, requires_grad=True), torch.arange(5)
        kept: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            kept[t.data_ptr()] = t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            found = module(x, target)
        kept.pop(x.data_ptr())
        assert sum(kept.values()) == bytes_a_row * 5
        sum(t.sum() for t in (found if entropy else (found,))).backward()
        op = module.bind((x, target[..., None]), None)
        assert not op.backward.explain().collectives
        return [c.kind for c in op.forward.explain().collectives]

    assert len(run_ranks(2, run)[0]) == 2, "the sums of moments and of the targets' logits go together"


def test_logits_are_never_whole() -> None:
    """Of 64 rows and 1000 classes no tensor of more than a chunk's logits is kept, and gradients are torch's."""
    x, weight = leaf(torch.randn(64, 8)), leaf(torch.randn(1000, 8))
    target = torch.randint(1000, (64,))
    kept: list[int] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = LinearCrossEntropyLoss(chunk_rows=16)(x, weight, target)
    loss.backward()
    assert max(kept, default=0) <= 1000 * 8
    expected = [leaf(x), leaf(weight)]
    functional.cross_entropy(functional.linear(*expected), target).backward()
    for got, want in zip((x, weight), expected, strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_logits_of_minus_infinity() -> None:
    """Classes that are ruled out have no probability and no part of the entropy."""
    x = torch.tensor([[1.0, -torch.inf, 2.0], [0.0, 0.0, -torch.inf]], requires_grad=True)
    logs, entropy = LogProb(entropy=True)(x, torch.tensor([0, 1]))
    (logs.sum() + entropy.sum()).backward()
    kept = torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True)
    expected = kept.log_softmax(-1)
    their = expected[:, 0].sum(), -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(entropy, their[1])
    assert x.grad.isfinite().all()
    torch.testing.assert_close(logs[0], expected[0, 0])


def test_bad_arguments() -> None:
    for make, message in (
        (lambda: CrossEntropyLoss(z_loss=-1.0), "z_loss="),
        (lambda: CrossEntropyLoss(temperature=0.0), "temperature="),
        (lambda: LinearCrossEntropyLoss(chunk_rows=0), "chunk_rows="),
        (lambda: LinearCrossEntropyLoss(reduction="max"), "reduction="),
    ):
        with pytest.raises(ModuleArgumentError, match=message):
            make()
    with pytest.raises(PlacementError, match="chunks of rows"):
        LinearCrossEntropyLoss(mesh=DeviceMesh([0]), logits=S0)
    with pytest.raises(PlacementError, match="whole values"):
        LogProb(mesh=DeviceMesh([0]), logits=P)


def test_bad_inputs() -> None:
    x, target, weight = torch.randn(3, 5), torch.arange(3), torch.randn(7, 5)
    for call, message in (
        (lambda: LogProb()(x, target.float()), "LogProb: target has dtype"),
        (lambda: LogProb()(x, target[:2]), "LogProb: target has shape"),
        (lambda: LogProb()(x[:, :0], target), "LogProb: logits has no classes"),
        (lambda: CrossEntropyLoss(label_smoothing=0.1)(x[:, :0], target), "CrossEntropyLoss: logits has no classes"),
        (lambda: CrossEntropyLoss()(x[:0, :0], target[:0]), "CrossEntropyLoss: logits has no classes"),
        (lambda: LinearCrossEntropyLoss()(x, weight[:0], target), "CrossEntropyLoss: logits has no classes"),
        (lambda: LogProb()(x, target + 3), "LogProb: target has 1 values that are no classes"),
        (lambda: LinearCrossEntropyLoss()(x[0, 0], weight, target[0]), "x has no dims"),
        (lambda: CrossEntropyLoss()(x[0, 0], target[0]), "CrossEntropyLoss: logits has no dims"),
        (lambda: LogProb()(x[0, 0], target[0]), "LogProb: logits has no dims"),
        (lambda: LinearCrossEntropyLoss()(x, weight.T, target), "weight has shape"),
        (lambda: LinearCrossEntropyLoss()(x, weight.double(), target), "weight has dtype"),
        (lambda: LinearCrossEntropyLoss()(x, weight, target[:2]), "target has shape"),
    ):
        with pytest.raises(ModuleInputError, match=message):
            call()


def test_a_single_row_is_sharded_along_its_classes_or_not_at_all() -> None:
    """Its first axis is that of classes, which other losses' Shard(0) are not."""

    def run() -> list[float]:
        world = shardfuse.initialize()
        mesh, logits, target = DeviceMesh(range(2)), torch.arange(4.0), torch.tensor(1)
        local = logits.chunk(2)[world.rank]
        found: list[float] = []
        for kind in (CrossEntropyLoss, LogProb):
            found.append(kind(mesh=mesh, logits=Shard(-1))(local, target).item())
            with pytest.raises(PlacementError, match=r"logits=Shard\(0\) does not fit the axis of classes"):
                kind(mesh=mesh, logits=S0)(local, target)
        return found

    expected = functional.cross_entropy(torch.arange(4.0), torch.tensor(1)).item()
    alone = CrossEntropyLoss(mesh=DeviceMesh([0]), logits=S0)(torch.arange(4.0), torch.tensor(1))  # cuts nothing
    assert alone.item() == pytest.approx(expected, rel=1e-6)
    for loss, log_prob in shardfuse.simulate(run, 2):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert log_prob == pytest.approx(-expected, rel=1e-6)
