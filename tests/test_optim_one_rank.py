"""A gradient that one rank alone may not have: one error, at once, on all ranks, and nothing is written on any."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from shardfuse import optim
from shardfuse.optim.optim_errors import OptimizerTensorError

Spoil = Callable[[torch.nn.Parameter, torch.Tensor], None]


def sparse(p: torch.nn.Parameter, _: torch.Tensor) -> None:
    p.grad = torch.ones(3, 3).to_sparse()


def shared(p: torch.nn.Parameter, other: torch.Tensor) -> None:
    p.grad = other[:1].expand(3, 3)


def repeated(p: torch.nn.Parameter, _: torch.Tensor) -> None:
    p.grad = torch.ones(1, 3).expand(3, 3)


def of_another_type(p: torch.nn.Parameter, _: torch.Tensor) -> None:
    p.data = torch.ones(3, 3, dtype=torch.complex64)
    p.grad = torch.ones(3, 3, dtype=torch.complex64)


CALLS: dict[str, tuple[str, Spoil, str]] = {
    "clip, sparse": ("clip", sparse, "gradient 2 is torch.sparse_coo"),
    "clip, shared": ("clip", shared, "share memory|several elements"),
    "clip, repeated": ("clip", repeated, "several"),
    "clip, of another type": ("clip", of_another_type, "gradient 2 is of torch.complex64"),
    "norm, sparse": ("norm", sparse, "gradient 2 is torch.sparse_coo|tensors"),
    "step, sparse": ("step", sparse, "gradient of parameter 2 of shape .* is torch.sparse_coo"),
    "step, of another type": ("step", of_another_type, "parameter 2 .* is of torch.complex64"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("at", [0, 2])
def test_one_ranks_gradient_ends_all_ranks(name: str, at: int) -> None:
    what, spoil, message = CALLS[name]
    held: dict[int, list[torch.Tensor]] = {}

    def run(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (size,))

        def sharded(n: int) -> torch.nn.Parameter:
            p = torch.nn.Parameter(DTensor.from_local(torch.ones(n, 3), mesh, [Shard(0)]))
            p.grad = DTensor.from_local(torch.full((n, 3), 2.0), mesh, [Shard(0)])
            return p

        first, second, plain = sharded(2), sharded(3), torch.nn.Parameter(torch.ones(3, 3))
        norm = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh))
        norm.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        plain.grad = torch.full((3, 3), 2.0)
        parameters = [first, second, plain, norm]
        optimizer = optim.AdamW(parameters, max_norm=1e9)
        optimizer.step()
        gradients = [p.grad for p in (first, second)]
        held[rank] = [t.to_local() for t in (first.data, second.data, norm.data, *gradients) if isinstance(t, DTensor)]
        before = [t.clone() for t in held[rank]]
        held[rank] += before
        if rank == at:
            spoil(plain, held[rank][3])
        match what:
            case "step":
                optimizer.step()
            case "clip":
                optim.clip_grad_norm_(parameters, 0.1)
            case _:
                optim.get_total_norm([p.grad for p in parameters if p.grad is not None])

    with pytest.raises(OptimizerTensorError, match=message) as raised:
        run_ranks(3, run, timeout=20)
    assert f"raised on rank {at} of 3; ranks that raised: [{at}]" in raised.value.__notes__
    for tensors in held.values():
        half = len(tensors) // 2
        assert all(map(torch.equal, tensors[:half], tensors[half:]))
