"""Calls that find what a call before them found: what they are handed is still what the program takes."""

from __future__ import annotations

import copy
import gc
import symtable
import sys
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.tensor import Partial, Replicate

import shardfuse
from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition
from shardfuse.errors import ShardfuseError
from shardfuse.executor import program
from shardfuse.executor.cache import LRUCache
from shardfuse.executor.plain_arguments import NoGradientsWarning
from shardfuse.executor.steps import (
    Bring,
    Call,
    Communicate,
    Guard,
    LaunchKernel,
    Over,
    Rename,
    Return,
    Start,
    Step,
)
from shardfuse.executor.storage import only_addressed
from shardfuse.frontend import repeat
from shardfuse.frontend.executor_cache import PROGRAMS, FusionExecutorCache
from shardfuse.nn import FusionTimer, RMSNorm, SwiGLU
from shardfuse.nn.fused import BoundOp
from shardfuse.segments.segment import Segment


@pytest.fixture(params=["C", "Python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are repeated in C, but where there is no compiler."""
    if request.param == "Python":
        monkeypatch.setattr(repeat, "driver_for", lambda tensors: None)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """What the steps of programs raise while there is anything in it, with the dims of what they are given."""
    found: list[type[BaseException]] = []
    evaluation_of = program.evaluation_of

    def evaluation(segment: Segment, rank: int, device: torch.device) -> Callable[..., object]:
        run = evaluation_of(segment, rank, device)

        def run_or_fail(*tensors: torch.Tensor) -> object:
            if found:
                raise found[0](f"planted, of {tensors[0].ndim} dims")
            return run(*tensors)

        return run_or_fail

    monkeypatch.setattr(program, "evaluation_of", evaluation)
    return found


def called(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(drawn(*y.shape, seed=9))
    assert x.grad is not None
    return y.detach(), x.grad


def check(module: torch.nn.Module, x: torch.Tensor) -> None:
    y, gradient = called(module, x)
    wide = x.detach().double().requires_grad_()
    expected = torch.nn.functional.rms_norm(wide, wide.shape[-1:], eps=1e-6)
    expected.backward(drawn(*y.shape, seed=9).double())
    assert_near(y, expected.detach(), n=4)
    assert wide.grad is not None
    assert_near(gradient, wide.grad, n=16, terms=wide.grad.abs() + 1)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was looked up by its metadata."""
    found: list[object] = []
    ready = FusionExecutorCache.ready

    def noted(self: FusionExecutorCache, arguments: object) -> object:
        found.append(arguments)
        return ready(self, arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(FusionExecutorCache, "ready", noted)
    return found


def test_what_has_run_is_not_looked_up(looked_up: list[object]) -> None:
    module = RMSNorm(16)
    check(module, drawn(4, 16))
    looked_up.clear()
    for seed in range(3):
        check(module, drawn(4, 16, seed=seed))
    assert not looked_up
    check(module, drawn(6, 16))  # another size
    assert looked_up


def test_tensors_that_are_stored_otherwise(looked_up: list[object]) -> None:
    module = RMSNorm(16)
    for _ in range(2):
        check(module, drawn(4, 16))
        check(module, drawn(16, 4).T)
        check(module, drawn(4, 32)[:, ::2])
        check(module, drawn(16).expand(4, 16))
        check(module, torch.complex(drawn(4, 16), drawn(4, 16)).conj().imag)  # negated when it is read


def test_programs_that_were_let_go_of(looked_up: list[object]) -> None:
    module = RMSNorm(16)
    check(module, drawn(4, 16))
    (bound,) = module._bound.values()
    assert isinstance(bound, BoundOp)
    for fusion in bound.op.fusions:
        fusion.fec.programs = LRUCache(PROGRAMS)  # as tuning does, and a fork
    looked_up.clear()
    check(module, drawn(4, 16))
    assert looked_up


def test_what_hooks_give_back_for_saved_tensors() -> None:
    module, x = RMSNorm(16), drawn(4, 16)
    check(module, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.double()):
        y = module(x.requires_grad_())
        with pytest.raises(ShardfuseError, match=r"Double|float64"):
            y.sum().backward()
    check(module, x.detach())


def test_gate_and_up_have_their_gradient_in_one_tensor_without_a_copy() -> None:
    module = SwiGLU(8, bias=True)
    x = drawn(4, 16).requires_grad_()
    module(x).sum().backward()
    (bound,) = module._bound.values()
    assert bound is not None
    assert "torch_call" not in str(bound.op.backward.explain())


@pytest.mark.parametrize(
    ("step", "is_address"),
    [
        (Communicate("collective_0", len, ("T1", "T2")), True),
        (LaunchKernel("kernel_0_0", len, ("T0", "T1")), True),
        (Guard(0, ("T1",)), True),
        (Over("T2", "T1", (4,), (1,)), True),
        (Call(("T2",), "view_0", len, ("T1",)), False),
        (Start(Call(("T2",), "collective_0", len, ("T1",)), "done_0"), False),
        (Call(("own_T1",), "own", len, ("T1", "T0"), gives_list=True), False),
        (Call((), "copy_all", len, (("T1",), ("T0",))), False),
        (Bring("T1", "T1", torch.device("cuda")), False),
        (Rename("T2", "T1", "contiguous()"), False),
        (Return(("T1",)), False),
        (Return((Call((), "no_view", len, ("T1",)),)), False),
        (Return(("T10",)), True),
    ],
    ids=str,
)
def test_steps_that_take_an_address(step: Step, is_address: bool) -> None:
    assert only_addressed(["T0", "T1"], [step, Return(("T0",))]) == ({1} if is_address else set())


def test_super_of_a_module_is_one_instruction() -> None:
    """Which torch 2.11 traces in Python 3.12; in a file that names ``super`` outside of functions it is not."""
    for path in Path(shardfuse.__file__).parent.rglob("*.py"):
        table = symtable.symtable(path.read_text(), str(path), "exec")
        assert "super" not in table.get_identifiers(), path


def test_a_tensor_that_a_transform_left() -> None:
    """torch.func has ended, and its tensor was kept."""
    kept: list[torch.Tensor] = []
    x = drawn(4, 8)
    torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(x)
    assert torch.equal(RMSNorm(8)(kept[0]), RMSNorm(8)(x))


def test_a_copied_timer_keeps_what_it_has() -> None:
    timer = FusionTimer()
    timer.tag = "mine"
    assert copy.deepcopy(timer).tag == "mine"


def test_the_script_of_a_repeat_that_fails_has_the_shapes_of_its_definition(
    monkeypatch: pytest.MonkeyPatch, planted: list[type[BaseException]]
) -> None:
    """Partial sums have a dim of 1 in front, which a repeat leaves out where kernels read them by their address."""

    monkeypatch.setattr(program, "only_addressed", lambda names, steps: frozenset(range(len(names))))

    def run(rank: int, size: int) -> str:
        mesh = DeviceMesh(list(range(size)))
        module = RMSNorm(16, mesh=mesh, input=Partial(), output=Replicate(), parameters="local")
        module(drawn(4, 16))
        dist.barrier()
        planted[:] = [RuntimeError]
        with pytest.raises(RuntimeError, match="planted, of 2 dims") as caught:
            module(drawn(4, 16))
        return "".join(caught.value.__notes__)

    for notes in run_ranks(2, run):
        assert "torch.testing.make_tensor((1, 4, 16), " in notes


def test_a_repeat_is_the_last_run() -> None:
    """Of which plans and programs are told."""
    norm, ran = RMSNorm(4), dict[int, object]()
    for rows in (3, 5, 3):
        for _ in range(3):
            norm(drawn(rows, 4))
        (fec,) = {bound.op.forward.fec for bound in norm._bound.values() if bound is not None}  # pyright: ignore[reportPrivateUsage]
        assert ran.setdefault(rows, fec.last_program) is fec.last_program
    assert ran[3] is not ran[5]


# definitions


def doubled(dtype: DataType = DataType.Float, *, writes: bool = False, has_number: bool = False) -> FusionDefinition:
    """``x + x``, or ``x + number``; written to ``x``, where it is to be."""
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, -1], contiguity=[False, False], dtype=dtype)
        other = fd.define_scalar(dtype=DataType.Double) if has_number else x
        fd.add_output(fd.ops.add(x, other), **({"alias_input": x} if writes else {}))
    return fd


def is_doubled(fd: FusionDefinition, x: torch.Tensor) -> bool:
    found = fd.execute([x])
    assert type(found) is list
    (y,) = found
    return torch.equal(y, x.detach() + x.detach())


def test_a_definition_looks_up_two_calls_of_a_program(looked_up: list[object]) -> None:
    fd = doubled()
    for count, x in enumerate([drawn(4, 16), *[drawn(4, 16, seed=k) for k in range(3)]], 1):
        assert is_doubled(fd, x)
        assert len(looked_up) == min(count, 2) - 1, "the first one makes it"
    assert fd.execute((x,))[0].equal(x + x)
    assert len(looked_up) == 1
    for _ in range(3):
        assert is_doubled(fd, drawn(5, 16))
    assert is_doubled(fd, drawn(5, 16))
    assert len(looked_up) == 3


def test_calls_of_programs_in_turn_keep_none(looked_up: list[object]) -> None:
    """What tells the next call of the last program takes as long to make as two look-ups."""
    fd = doubled()
    for _ in range(3):
        for rows in (4, 5):
            assert is_doubled(fd, drawn(rows, 16))
    assert fd._again is None


def test_a_call_that_looks_nothing_up_is_the_one_that_is_told_of() -> None:
    fd = doubled()
    for _ in range(3):
        assert is_doubled(fd, drawn(4, 16))
    fd._dtensors.last_variant = object()  # as a call with DTensors leaves it
    assert is_doubled(fd, drawn(4, 16))
    assert fd._dtensors.last_variant is None


@pytest.mark.parametrize(
    "other",
    [
        drawn(5, 16),
        drawn(16, 4).T,
        drawn(4, 32)[:, ::2],
        drawn(16).expand(4, 16),
        torch.complex(drawn(4, 16), drawn(4, 16)).conj().imag,
        torch.nn.Parameter(drawn(4, 16), requires_grad=False),
    ],
    ids=["size", "transposed", "strided", "expanded", "negated", "parameter"],
)
def test_a_definition_looks_up_tensors_of_another_kind(looked_up: list[object], other: torch.Tensor) -> None:
    fd = doubled()
    for _ in range(3):
        assert is_doubled(fd, drawn(4, 16))
    looked_up.clear()
    assert is_doubled(fd, other)
    assert looked_up
    looked_up.clear()
    assert is_doubled(fd, drawn(4, 16))
    with pytest.raises(ShardfuseError):
        fd.execute([drawn(4, 16), drawn(4, 16)])
    with pytest.raises(ShardfuseError):
        fd.execute([drawn(4, 16).double()])


def test_a_definition_warns_of_gradients_that_nothing_records(looked_up: list[object]) -> None:
    """Also where a tensor like that was taken while none were."""
    fd, x = doubled(), drawn(4, 16).requires_grad_()
    with torch.no_grad():
        for _ in range(4):
            assert is_doubled(fd, x)
    assert len(looked_up) == 1
    with pytest.warns(NoGradientsWarning):
        (y,) = fd.execute([x])
    assert not y.requires_grad


def test_programs_of_a_definition_that_were_let_go_of(looked_up: list[object]) -> None:
    fd = doubled()
    for _ in range(3):
        assert is_doubled(fd, drawn(4, 16))
    fd.fec.programs = LRUCache(PROGRAMS)
    looked_up.clear()
    for _ in range(3):
        assert is_doubled(fd, drawn(4, 16))
    assert len(looked_up) == 2
    copied = copy.deepcopy(fd)
    assert is_doubled(copied, drawn(4, 16))
    assert is_doubled(copy.copy(fd), drawn(4, 16))


@pytest.mark.parametrize(("writes", "has_number"), [(True, False), (False, True)])
def test_what_is_more_than_layouts_is_looked_up(looked_up: list[object], writes: bool, has_number: bool) -> None:
    """A tensor that is written to, which may be one that several elements share; and a number, of whatever type."""
    fd, x = doubled(writes=writes, has_number=has_number), drawn(4, 16)
    wanted = x.clone()
    for _ in range(4):
        wanted = wanted + wanted if writes else x + 1.5
        found = fd.execute([x, 1.5] if has_number else [x])
        assert torch.equal(x if writes else found[0], wanted)
    assert len(looked_up) == 3


def test_a_call_that_fails_again_names_what_was_called(planted: list[type[BaseException]]) -> None:
    fd, x = doubled(), drawn(4, 16)
    for _ in range(3):
        assert is_doubled(fd, x)
    planted.append(RuntimeError)
    held = sys.getrefcount(x)
    with pytest.raises(RuntimeError, match="planted") as caught:
        fd.execute([x])
    assert "FusionDefinition" in "".join(caught.value.__notes__)
    assert caught.traceback[-1].name == "run_or_fail"
    assert torch.is_grad_enabled()
    del caught
    gc.collect()
    assert sys.getrefcount(x) == held


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_call_is_left_as_it_is(planted: list[type[BaseException]], error: type[BaseException]) -> None:
    fd = doubled()
    for _ in range(3):
        assert is_doubled(fd, drawn(4, 16))
    planted.append(error)
    with pytest.raises(error) as caught:
        fd.execute([drawn(4, 16)])
    assert not hasattr(caught.value, "__notes__")
    assert torch.is_grad_enabled()


def test_gradients_are_recorded_again_behind_a_call() -> None:
    fd, x = doubled(), drawn(4, 16)
    for is_recording in (True, False, True):
        with torch.set_grad_enabled(is_recording):
            for _ in range(3):
                assert is_doubled(fd, x)
                assert torch.is_grad_enabled() is is_recording


def test_inputs_of_another_kind_of_sequence(looked_up: list[object]) -> None:
    fd, x = doubled(), drawn(4, 16)
    for _ in range(3):
        assert is_doubled(fd, x)
    with pytest.raises(ShardfuseError):
        fd.execute([])
    with pytest.raises(ShardfuseError):
        fd.execute([x, x])
    assert fd.execute(iter_of([x]))[0].equal(x + x)
    with pytest.raises(ShardfuseError):
        fd.execute([[1.0]])  # pyright: ignore[reportArgumentType]


class iter_of(list):  # noqa: N801
    """A list of another type."""


def test_a_definition_is_let_go_of_with_its_repeats() -> None:
    fd = doubled()
    for _ in range(3):
        assert is_doubled(fd, drawn(4, 16))
    assert fd._again is not None
    fusion = ref(fd)
    del fd
    gc.collect()
    assert fusion() is None
