"""Outputs that kernels write over the inputs that they replace, under Triton's interpreter, against torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from interpreted import values
from torch_answers import assert_like

from shardfuse import DataType, FusionDefinition
from shardfuse.codegen.source import KernelSource, MemoryAccess
from shardfuse.errors import InputError
from shardfuse.executor import aliasing, in_place_writes
from shardfuse.executor.in_place_writes import reads_before_it_writes
from shardfuse.executor.options import Backend
from shardfuse.ir.domain import BoundDomain
from shardfuse.ir.expr import BoundTensor
from shardfuse.ir.tensor_view import TensorView
from shardfuse.ops.build import Ops

F = DataType.Float


def step(n: int = -1) -> FusionDefinition:
    """An AdamW step: parameter and moments in place."""
    with FusionDefinition(backend="triton") as fd:
        p, m, v, g = (fd.define_tensor([n]) for _ in range(4))
        o = fd.ops
        new_m = o.add(o.mul(m, 0.9), o.mul(g, 0.1))
        new_v = o.add(o.mul(v, 0.99), o.mul(o.mul(g, g), 0.01))
        new_p = o.sub(o.mul(p, 0.999), o.mul(o.div(new_m, o.add(o.sqrt(new_v), 1e-8)), 1e-3))
        for out, target in ((new_p, p), (new_m, m), (new_v, v)):
            fd.add_output(out, target)
    return fd


def step_of_torch(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    m, v = m * 0.9 + g * 0.1, v * 0.99 + g * g * 0.01
    return [p * 0.999 - m / (v.sqrt() + 1e-8) * 1e-3, m, v]


def host_program(fd: FusionDefinition) -> str:
    return fd.last_trace().split("# host program")[1]


@pytest.mark.parametrize("n", [4096, 5000])
def test_an_optimiser_step_copies_nothing(n: int) -> None:
    p, m, v, g = values(n), values(n, seed=1), values(n, seed=2).abs(), values(n, seed=3)
    before = [t.clone() for t in (p, m, v, g)]
    given, versions, places = g.clone(), [t._version for t in (p, m, v)], [t.data_ptr() for t in (p, m, v)]
    fd = step()
    assert fd.execute([p, m, v, g]) == []
    assert_like([p, m, v], step_of_torch, *before)
    assert torch.equal(g, given)
    assert places == [t.data_ptr() for t in (p, m, v)]
    assert all(t._version > before for t, before in zip((p, m, v), versions, strict=True)), "autograd is told"
    assert "copy_all" not in host_program(fd)
    assert fd.explain().copies == 0


@pytest.mark.parametrize("shared", ["whole", "overlapping", "one array", "apart"])
def test_inputs_that_share_memory_are_written_at_the_end(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of which each has a storage of its own.  Pieces of a buffer that are apart need no copy."""
    n, found = 4096, list[list[bool]]()

    def owners(*samples: object) -> Callable[..., list[bool]]:
        own = in_place_writes.owners(*samples)
        return lambda *given: found.append(own(*given)) or found[-1]

    monkeypatch.setattr(aliasing, "owners", owners)
    flat = values(2 * n)
    p, g = flat[:n], {"whole": flat[:n], "apart": flat[n:]}.get(shared, flat[8 : n + 8])
    m, v = values(n, seed=1), values(n, seed=2).abs()
    if shared == "one array":
        array = flat.numpy()
        g, p = torch.from_numpy(array[:n]), torch.from_numpy(array[8 : n + 8])
    before = [t.clone() for t in (p, m, v, g)]
    step().execute([p, m, v, g])
    assert_like([p, m, v], step_of_torch, *before)
    assert sorted(found[0]) == [shared == "apart", True, True], "p alone"


def test_an_output_that_is_a_view_is_apart_from_what_is_written() -> None:
    array = np.arange(4097, dtype=np.float32)
    with FusionDefinition(backend="triton") as fd:
        x, y = fd.define_tensor([4096]), fd.define_tensor([4096])
        fd.add_output(fd.ops.add(x, 1.0), x)
        fd.add_output(fd.ops.reshape(y, [64, 64]))
    (view,) = fd.execute([torch.from_numpy(array[1:]), torch.from_numpy(array[:-1])])
    assert torch.equal(view.flatten(), torch.arange(4096, dtype=torch.float32))
    assert array.tolist() == [0, *range(2, 4098)]


def residual(rows: int, columns: int) -> FusionDefinition:
    """The residual stream and the norm of it."""
    with FusionDefinition(backend="triton") as fd:
        x, stream, w = fd.define_tensor([-1, columns]), fd.define_tensor([-1, columns]), fd.define_tensor([columns])
        o = fd.ops
        total = o.add(x, stream)
        mean = o.mean(o.mul(total, total), [1], keepdim=True)
        gain = o.broadcast_in_dim(w, [rows, columns], [1])
        fd.add_output(total, stream)
        fd.add_output(o.mul(o.mul(total, o.rsqrt(o.add(mean, 1e-6))), gain))
    return fd


@pytest.mark.parametrize("columns", [1024, 1000, 40000])
def test_a_norm_writes_the_stream_that_it_adds_to(columns: int) -> None:
    """Rows of one program, and of a team of them."""
    rows = 3
    x, stream, w = values(rows, columns), values(rows, columns, seed=1), values(columns, seed=2)
    before = stream.clone()

    def added(x: torch.Tensor, stream: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        total = x + stream
        return [total, total * torch.rsqrt((total * total).mean(1, keepdim=True) + 1e-6) * w]

    fd = residual(rows, columns)
    (found,) = fd.execute([x, stream, w])
    assert_like([stream, found], added, x, before, w)
    assert "copy_all" not in host_program(fd)
    assert "apart(" not in host_program(fd), "what a kernel makes is nobody else's"
    assert fd.explain().copies == 0


@pytest.mark.parametrize("reader", ["output", "view", "another kernel", "another place"])
def test_what_others_read_is_written_at_the_end(reader: str) -> None:
    with FusionDefinition(backend="triton") as fd:
        x, y = fd.define_tensor([64, 64]), fd.define_tensor([64, 64])
        o = fd.ops
        if reader == "output":
            fd.add_output(x)
        if reader == "view":
            fd.add_output(o.permute(x, [1, 0]))
        if reader == "another kernel":
            fd.add_output(o.sum(o.exp(x), [0, 1]))
        other = o.permute(x, [1, 0]) if reader == "another place" else x
        fd.add_output(o.add(o.mul(y, 2.0), other), x)
    given, y = values(64, 64), values(64, 64, seed=1)
    x = given.clone()
    found = fd.execute([x, y])
    assert_like(x, lambda x, y: y * 2.0 + (x.T if reader == "another place" else x), given, y)
    before = {"output": lambda x: x, "view": lambda x: x.T, "another kernel": lambda x: x.exp().sum()}
    if reader in before:
        assert_like(found, before[reader], given)
    else:
        assert found == []
    if reader in ("view", "another place"):
        assert "copy_all(" in host_program(fd)


@pytest.mark.parametrize(
    ("accesses", "may"),
    [
        (["load T0_ptr + c", "store T1_ptr + c"], True),
        (["load T0_ptr + c", "load T0_ptr + 128 + c", "store T1_ptr + c", "store T1_ptr + 128 + c"], True),
        (["load T0_ptr + c", "store T1_ptr + c", "load T0_ptr + c"], False),  # read again
        (["store T1_ptr + c", "load T0_ptr + c"], False),  # too late
        (["load T0_ptr + n - c", "store T1_ptr + c"], False),  # another's element
        (["load T0_ptr + c", "load T0_ptr", "store T1_ptr + c"], False),
        (["load T0_ptr + c", "prefetch T0_ptr + n", "store T1_ptr + c"], False),
        (["load T0_ptr + c", "next stage", "store T1_ptr + c"], False),  # by another program
        (["load T2_ptr + c", "next stage", "load T0_ptr + c", "store T1_ptr + c"], True),
    ],
)
def test_what_a_kernel_may_write_over(accesses: list[str], may: bool) -> None:
    tensors = {f"T{k}_ptr": BoundTensor(f"T{k}", F, BoundDomain(())) for k in range(3)}
    stages: list[list[MemoryAccess]] = [[]]
    for text in accesses:
        kind, pointer = text.split(" ", 1)
        if kind == "next":
            stages.append([])
        else:
            stages[-1].append(MemoryAccess(kind, tensors[pointer.split()[0]], pointer))
    x, y, other = tensors.values()
    source = KernelSource("kernel", "", (x, y), (), (), 1, 4, 1, accesses=tuple(map(tuple, stages)))
    assert reads_before_it_writes(source, x, y) is may
    assert reads_before_it_writes(source, other, y), "what it does not read"
    assert not reads_before_it_writes(source, x, other), "what it does not write by that name"


def test_what_nobody_reads_is_written_over() -> None:
    with FusionDefinition(backend="triton") as fd:
        x, y = fd.define_tensor([4096]), fd.define_tensor([4096])
        fd.add_output(fd.ops.exp(y), x)
    x, y = values(4096), values(4096, seed=1)
    fd.execute([x, y])
    assert_like(x, torch.exp, y)
    assert "copy_all" not in host_program(fd)


def test_an_expanded_input_is_refused() -> None:
    x, y = values(1).expand(4096), values(4096, seed=1)
    with FusionDefinition(backend="triton") as fd:
        a, b = fd.from_pytorch(x), fd.define_tensor([4096])
        fd.add_output(fd.ops.add(fd.ops.mul(b, 2.0), a), a)
    with pytest.raises(InputError, match=r"input 0, T0, .* a place each, because an output is written to it"):
        fd.execute([x, y])


def _flipped(o: Ops, x: TensorView) -> TensorView:
    return o.flip(x, [1])


def _shifted(o: Ops, x: TensorView) -> TensorView:
    return o.pad(o.slice(x, [0, 1], [4, 6]), [0, 1])


def _rolled(o: Ops, x: TensorView) -> TensorView:
    return o.cat([o.slice(x, [0, 2], [4, 6]), o.slice(x, [0, 0], [4, 2])], 1)


def _itself_and_flipped(o: Ops, x: TensorView) -> TensorView:
    return o.sub(o.mul(x, 2.0), o.flip(x, [1]))


MOVED = {
    "flip": (_flipped, lambda x: x.flip(1)),
    "shift": (_shifted, lambda x: torch.nn.functional.pad(x[:, 1:], (0, 1))),
    "roll": (_rolled, lambda x: torch.cat([x[:, 2:], x[:, :2]], 1)),
    "itself and flip": (_itself_and_flipped, lambda x: 2 * x - x.flip(1)),
}


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("is_normed", [False, True], ids=["pointwise", "normed"])
@pytest.mark.parametrize("name", MOVED)
def test_an_input_that_is_read_at_other_places_is_replaced_at_the_end(
    name: str, is_normed: bool, backend: Backend
) -> None:
    move, by_torch = MOVED[name]
    with FusionDefinition(backend=backend) as fd:
        x = fd.define_tensor([4, 6])
        w = move(fd.ops, x)
        fd.add_output(fd.ops.mul(w, fd.ops.sum(w, [0], keepdim=True) if is_normed else w), alias_input=x)
    given = values(4, 6)

    def expected(x: torch.Tensor) -> torch.Tensor:
        wide = by_torch(x)
        return wide * (wide.sum(0, keepdim=True) if is_normed else wide)

    before = given.clone()
    assert fd.execute([given]) == []
    assert_like(given, expected, before)
    assert fd.explain().copies == 1
