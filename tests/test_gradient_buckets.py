"""Gradients of norms over sharded rows that are reduced together, against torch on the unsharded tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from module_cases import each_rank
from nn_cases import Here
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardfuse.nn.gradient_buckets as buckets
from benchmarks.roundings import assert_near
from shardfuse.nn import AddRMSNorm, LayerNorm, RMSNorm, bucket_gradients

HIDDEN, LAYERS = 24, 3
BATCH, SEQUENCE = 4, 8
AT = {1: (Shard(1),), 2: (Shard(0), Shard(1))}
"""Where rows live, by the dims of the mesh."""
SUMMED = torch.tensor(50.0)
"""About the magnitudes that a gradient is a sum of."""


class Model(torch.nn.Module):
    """Norms that add, whose input is each rank's summand, and two that do not."""

    def __init__(self, here: Here, kind: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        mesh, at = here.mesh, AT[here.mesh.ndim]
        options = {"mesh": mesh, "parameters": kind, "dtype": dtype}
        every = [[p] * mesh.ndim for p in (Partial(), Replicate())]
        self.adding = torch.nn.ModuleList(
            AddRMSNorm(HIDDEN, bias=True, input=every[0], residual=at, output=every[1], output_grad=every[0], **options)
            for _ in range(LAYERS)
        )
        self.centred, self.last = LayerNorm(HIDDEN, input=at, **options), RMSNorm(HIDDEN, input=at, **options)
        generator = torch.Generator().manual_seed(1)
        for p in self.parameters():
            local = p.detach() if kind == "local" else p.detach().to_local()
            local.copy_(torch.randn(HIDDEN, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for norm in self.adding:
            x, residual = norm(x, residual)
        return x, self.last(self.centred(residual))


def plain(model: Model, weights: Sequence[Tensor], x: Tensor, residual: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The same on unsharded tensors: x is every rank's summand, and what each norm gives is again."""
    given = iter(weights)
    for k, _ in enumerate(model.adding):
        weight, bias = next(given), next(given)
        residual = residual + x * (ranks if k else 1) + bias
        x = functional.rms_norm(residual, (HIDDEN,), weight, 1e-6)
    centred = functional.layer_norm(residual, (HIDDEN,), next(given), next(given), 1e-5)
    return x, functional.rms_norm(centred, (HIDDEN,), next(given), 1e-6)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def backward(here: Here, call: Callable[..., tuple[Tensor, Tensor]], seed: int, dtype: torch.dtype) -> None:
    summand, residual, *upstream = given(here, seed)
    x = summand.to(dtype).requires_grad_()
    results = call(x, here.cut(residual, AT[here.mesh.ndim]).to(dtype).requires_grad_())
    # the gradient of what is whole arrives as summands too: each rank has a part of it
    gradients = (upstream[0] / here.mesh.size, here.cut(upstream[1], AT[here.mesh.ndim]))
    torch.autograd.backward(results, [g.to(dtype) for g in gradients])


def given(here: Here, seed: int) -> list[Tensor]:
    """This rank's summand of x, and unsharded tensors: the residual, and the gradients of both results."""
    summand = numbers(seed, BATCH, SEQUENCE, HIDDEN) / here.mesh.size  # alike on all ranks
    return [summand, *(numbers(seed + k, BATCH, SEQUENCE, HIDDEN) for k in (1, 2, 3))]


def expected(here: Here, model: Model, seeds: Sequence[int]) -> list[Tensor]:
    weights = [here_of(p.detach()).double().clone().requires_grad_() for p in model.parameters()]
    for seed in seeds:
        summand, residual, *upstream = given(here, seed)
        torch.autograd.backward(plain(model, weights, summand * here.mesh.size, residual, here.mesh.size), upstream)
    return [w.grad for w in weights if w.grad is not None]


def here_of(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def check(here: Here, model: Model, seeds: Sequence[int], n: int = 64) -> None:
    wanted = expected(here, model, seeds)
    for p, right in zip(model.parameters(), wanted, strict=True):
        assert p.grad is not None
        assert type(p.grad) is type(p.data)
        assert_near(here_of(p.grad), right, n=n, terms=right.abs() + 50)


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients each all-reduce of a bucket had, on all ranks."""
    found: list[int] = []
    reduce = buckets.GradientBucket.reduce

    def counted(self: buckets.GradientBucket, summands: Sequence[Tensor]) -> None:
        found.append(len(summands))
        reduce(self, summands)

    monkeypatch.setattr(buckets.GradientBucket, "reduce", counted)
    return found


@pytest.mark.parametrize(("shape", "kind"), [((2,), "dtensor"), ((2, 2), "local")])
def test_gradients_are_those_of_the_unsharded_model(shape: tuple[int, ...], kind: str, reduced: list[int]) -> None:
    def accumulated(here: Here, dtype: torch.dtype = torch.float64) -> None:
        model = Model(here, kind, dtype)
        assert bucket_gradients(model) == 2 * LAYERS + 3
        for seed in (10, 20):
            backward(here, model, seed, dtype)
        check(here, model, (10, 20))
        model.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                here_of(p.data).mul_(1.5)  # as an optimiser does, in place
        backward(here, model, 30, dtype)
        check(here, model, (30,))

    each_rank(shape, {"float64": accumulated, "float32": lambda here: accumulated(here, torch.float32)})
    ranks = torch.Size(shape).numel()
    assert reduced == [2 * LAYERS + 3] * (2 * 3 * ranks), "one all-reduce a backward"


def test_ways_in_which_a_model_is_run(reduced: list[int]) -> None:
    def checkpointed(here: Here, *, reentrant: bool) -> None:
        model = Model(here, "local")
        bucket_gradients(model)
        backward(here, lambda *t: checkpoint(model, *t, use_reentrant=reentrant), 10, torch.float64)
        check(here, model, (10,))

    def hooked(here: Here) -> None:
        model = Model(here, "local")
        bucket_gradients(model)
        seen: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
        backward(here, model, 10, torch.float64)
        for (name, _), right in zip(model.named_parameters(), expected(here, model, (10,)), strict=True):
            assert_near(seen[name], right, n=64, terms=right.abs() + 50)

    def asked_for_one(here: Here) -> None:
        model = Model(here, "local")
        bucket_gradients(model)
        summand, residual, *upstream = given(here, 10)
        results = model(summand, here.cut(residual, AT[1]))
        gradients = (upstream[0] / here.mesh.size, here.cut(upstream[1], AT[1]))
        (found,) = torch.autograd.grad(results, [model.centred.weight], gradients)
        assert_near(found, expected(here, model, (10,))[2 * LAYERS], n=64, terms=SUMMED)
        assert model.centred.weight.grad is None

    def copied(here: Here) -> None:
        model = Model(here, "local")
        bucket_gradients(model)
        backward(here, model, 10, torch.float64)
        other = copy.deepcopy(model)
        other.zero_grad()
        backward(here, other, 20, torch.float64)
        check(here, model, (10,))
        check(here, other, (20,))

    each_rank((2,), {"reentrant": lambda here: checkpointed(here, reentrant=True)})
    each_rank((2,), {"checkpointed": lambda here: checkpointed(here, reentrant=False), "hooked": hooked})
    each_rank((2,), {"asked for one": asked_for_one, "copied": copied})
    assert len(reduced) == 2 * 5, "a copy is in no bucket"


def test_what_does_not_fit_is_reduced_as_before(reduced: list[int]) -> None:
    def replaced(here: Here) -> None:
        model = Model(here, "local")
        bucket_gradients(model)
        for module in (*model.adding, model.centred, model.last):
            for name, p in list(module.named_parameters()):
                setattr(module, name, torch.nn.Parameter(p.detach().clone()))  # as FSDP does
        backward(here, model, 10, torch.float64)
        check(here, model, (10,))

    def without_gradients(here: Here) -> None:
        model = Model(here, "local")
        bucket_gradients(model)
        with torch.no_grad():
            summand, residual, *_ = given(here, 10)
            model(summand, here.cut(residual, AT[1]))
        assert all(p.grad is None for p in model.parameters())

    def uneven(here: Here) -> None:
        """5 rows over 2 ranks."""
        x = numbers(1, 5, HIDDEN).requires_grad_()
        norm = RMSNorm(HIDDEN, mesh=here.mesh, input=Shard(0), parameters="local", dtype=torch.float64)
        assert bucket_gradients(norm) == 1
        norm(here.cut(x, [Shard(0)]), unsharded=(5, HIDDEN)).sum().backward()
        weight = torch.ones(HIDDEN, dtype=torch.float64, requires_grad=True)
        functional.rms_norm(x, (HIDDEN,), weight, 1e-6).sum().backward()
        assert norm.weight is not None
        assert_near(norm.weight.grad, weight.grad, n=8, terms=SUMMED)

    def frozen(here: Here) -> None:
        model = Model(here, "local")
        bucket_gradients(model)
        for norm in model.adding:
            norm.weight.requires_grad_(False)
        for module in (model.centred, model.last):
            module.requires_grad_(False)
        backward(here, model, 10, torch.float64)
        wanted = expected(here, model, (10,))
        for k, norm in enumerate(model.adding):
            assert norm.weight.grad is None
            assert_near(norm.input_bias.grad, wanted[2 * k + 1], n=64, terms=SUMMED)

    each_rank((2,), {"replaced": replaced, "no gradients": without_gradients, "uneven": uneven, "frozen": frozen})
    assert not reduced


@pytest.mark.parametrize("kind", ["dtensor", "local"])
def test_a_norm_that_is_frozen_for_a_while(kind: str, reduced: list[int]) -> None:
    """Before the first backward, which makes the node, and after it."""

    def frozen(here: Here, *, first: bool) -> None:
        model = Model(here, kind)
        bucket_gradients(model)
        if not first:
            backward(here, model, 10, torch.float64)
            model.zero_grad()
        model.centred.requires_grad_(False)
        backward(here, model, 20, torch.float64)
        assert model.centred.weight.grad is None
        model.centred.requires_grad_(True)
        model.zero_grad()
        backward(here, model, 30, torch.float64)
        check(here, model, (30,))

    each_rank(
        (2,), {"at first": lambda here: frozen(here, first=True), "later": lambda here: frozen(here, first=False)}
    )
    every = 2 * LAYERS + 3
    assert sorted(reduced) == sorted(2 * [every - 2, every, every, every - 2, every])


@pytest.mark.parametrize("kind", ["dtensor", "local"])
def test_norms_that_a_forward_does_not_use_have_no_gradient(kind: str) -> None:
    def skipped(here: Here) -> None:
        model = Model(here, kind)
        bucket_gradients(model)
        for _ in range(2):
            x = here.cut(numbers(1, BATCH, SEQUENCE, HIDDEN), AT[1])
            model.last(x).square().sum().backward()
        for name, p in model.named_parameters():
            assert (p.grad is None) == (name != "last.weight"), name
        weight = here_of(model.last.weight.detach()).clone().requires_grad_()
        functional.rms_norm(numbers(1, BATCH, SEQUENCE, HIDDEN), (HIDDEN,), weight, 1e-6).square().sum().backward()
        right = 2 * weight.grad
        assert_near(here_of(model.last.weight.grad), right, n=64, terms=right.abs() + 50)

    each_rank((2,), {"skipped": skipped})


@pytest.mark.parametrize("kind", ["dtensor", "local"])
def test_a_bucket_tells_a_weight_that_was_written_before_the_backward(kind: str) -> None:
    def written(here: Here) -> None:
        norm = RMSNorm(HIDDEN, mesh=here.mesh, input=AT[1], parameters=kind, dtype=torch.float64)
        bucket_gradients(norm)
        x = here.cut(numbers(1, BATCH, SEQUENCE, HIDDEN), AT[1]).requires_grad_()
        for _ in range(2):
            norm(x).sum().backward()
            loss = norm(x).sum()
            with torch.no_grad():
                norm.weight.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    each_rank((2,), {"written": written})
