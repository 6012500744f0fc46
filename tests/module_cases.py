"""One check for modules of shardfuse.nn: results, gradients and state dicts against a function of unsharded tensors.

A case makes unsharded tensors, hands each rank its pieces, and compares with torch in float64 by `nn_cases.compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from nn_cases import Here, Placements, Sample, compare
from ranks import run_ranks
from torch import Tensor
from torch_gradients import leaf

from shardfuse import DeviceMesh

CPU = torch.device("cpu")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NARROW = FLOATS[1:]
ONE = Here(DeviceMesh([0]), CPU)
"""One rank: what a module without a mesh sees too."""


def check_module(
    module: torch.nn.Module,
    function: Callable[..., tuple[Tensor, ...]],
    activations: dict[str, Sample],
    parameters: dict[str, Sample],
    upstream: Sequence[Sample],
    dtype: torch.dtype,
    results_at: Sequence[Placements] | None = None,
    call: Callable[..., Tensor | tuple[Tensor, ...]] | None = None,
) -> None:
    """``module(*activations)`` is ``function(*activations, *parameters)``, and so are the gradients of all.

    upstream: the gradients of the results, each where the module wants it; ``results_at``: where results are, if not
    there.  call: what is called in the module's place.
    """
    if parameters:
        module.load_state_dict({name: p.full.to(dtype) for name, p in parameters.items()}, strict=False)
    leaves = [leaf(t.local) for t in activations.values()]
    results = (call or module)(*leaves)
    results = (results,) if isinstance(results, Tensor) else tuple(results)
    assert len(results) == len(upstream)
    torch.autograd.backward(results, [g.local for g in upstream])
    places = results_at or [g.placements for g in upstream]
    named = {
        f"result {k}": (r, replace(g, placements=at))
        for k, (r, g, at) in enumerate(zip(results, upstream, places, strict=True))
    }
    found = [*leaves, *(getattr(module, name) for name in parameters)]
    compare(function, {**activations, **parameters}, upstream, named, [t.grad for t in found], dtype)


def each_rank(shape: Sequence[int], cases: dict[str, Callable[[Here], None]]) -> None:
    """Every case on every rank of a mesh of this shape, in one world."""

    def run(rank: int, size: int) -> None:
        here = Here(DeviceMesh(torch.arange(size).view(*shape).tolist()), CPU)
        for name, case in cases.items():
            try:
                case(here)
            except Exception as error:
                error.add_note(f"case {name}")
                raise

    run_ranks(torch.Size(shape).numel(), run)


def assert_state_dicts_fit(module: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Each loads the other's, and then has it."""
    for giver, taker in ((theirs, module), (module, theirs)):
        with torch.no_grad():
            for k, tensor in enumerate(giver.state_dict().values()):
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + k)
        taker.load_state_dict(giver.state_dict())
        assert list(taker.state_dict()) == list(giver.state_dict())
        for name, tensor in giver.state_dict().items():
            assert torch.equal(taker.state_dict()[name], tensor), name
            assert taker.state_dict()[name].dtype == tensor.dtype, name
