"""Optimiser steps over many tensors on a CPU, by torch's ops: numbers, state dicts, what is refused."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from numbers import Real

import numpy as np
import pytest
import torch
from optim_cases import (
    BF16,
    CASES,
    F32,
    F64,
    Case,
    check_moments_without_memory,
    compare,
    gradients,
    parameters,
)  # fmt: skip
from torch.distributed.tensor import Shard
from torch.nn import Parameter

from benchmarks.roundings import assert_near
from shardfuse import DeviceMesh, optim
from shardfuse.optim.optim_errors import NonFiniteNormError, OptimizerArgumentError, OptimizerTensorError
from shardfuse.optim.tensor_lists import overlapping

CPU = torch.device("cpu")
SHAPES = [(4, 5), (7,), ()]


def trained(make, tensors: list[Parameter], steps: int = 3, first: int = 0) -> torch.optim.Optimizer:
    optimizer = make(tensors) if callable(make) else make
    for step in range(first, first + steps):
        gradients(tensors, step)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_of_torch_in_float64(case: Case) -> None:
    compare(case, CPU)


def test_moments_without_memory() -> None:
    check_moments_without_memory(CPU)


@pytest.mark.parametrize("norm_type", [2.0, 1, 3.5, 0.5, math.inf, "inf"])
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("max_norm", [0.5, 1e15])
def test_clipping_is_that_of_torch(norm_type: float | str, dtype: torch.dtype, max_norm: float) -> None:
    tensors = parameters([(70, 31), (), (5,), (40_000,)], dtype, CPU)
    gradients(tensors, 0)
    without = Parameter(torch.zeros(3))
    wide = [Parameter(p.detach().double()) for p in tensors]
    for p, q in zip(tensors, wide, strict=True):
        q.grad = p.grad.double().clone()
    before = [p.grad.clone() for p in tensors]
    norm = torch.nn.utils.clip_grad_norm_(wide, max_norm, float(norm_type))
    assert_near(optim.get_total_norm([p.grad for p in tensors], norm_type), norm.to(torch.float64), n=4)
    found = optim.clip_grad_norm_([*tensors, without], max_norm, norm_type)
    assert found.dtype == (F64 if dtype == F64 else F32)
    assert found.shape == ()
    assert_near(found, norm, n=4)
    for p, q, old in zip(tensors, wide, before, strict=True):
        assert_near(p.grad, q.grad, n=4)
        assert max_norm < 1 or torch.equal(p.grad, old)


def test_no_gradients_and_empty_ones() -> None:
    nothing = [Parameter(torch.ones(3))]
    assert optim.clip_grad_norm_(nothing, 1.0).item() == 0
    assert optim.clip_grad_norm_([], 1.0).item() == 0
    empty = Parameter(torch.ones(0, 4))
    empty.grad = torch.ones(0, 4)
    for norm_type in (1.0, 2.0, math.inf):
        assert optim.clip_grad_norm_(empty, 1.0, norm_type).item() == 0
    optimizer = optim.AdamW([*nothing, empty], max_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == 0
    assert torch.equal(nothing[0], torch.ones(3))


@pytest.mark.parametrize(
    ("value", "norm_type"), [(math.nan, 2.0), (math.inf, 2.0), (math.nan, math.inf), (-math.inf, 1.0)]
)
def test_gradients_that_are_not_finite(value: float, norm_type: float) -> None:
    """As torch: NaN and inf go on to all, unless the caller wants to be told."""
    own, plain = (parameters(SHAPES, F32, CPU) for _ in range(2))
    for tensors in (own, plain):
        gradients(tensors, 0)
        tensors[1].grad[3] = value
    before = [p.grad.clone() for p in own]
    unbounded = [Parameter(p.detach().clone()) for p in own]
    for p, g in zip(unbounded, before, strict=True):
        p.grad = g.clone()
    optim.clip_grad_norm_(unbounded, math.inf, norm_type)
    assert all(p.grad.isnan().all() for p in unbounded), "torch multiplies by inf / norm"
    with pytest.raises(NonFiniteNormError, match=r"total norm of order .* expected a finite number"):
        optim.clip_grad_norm_(own, 1.0, norm_type, error_if_nonfinite=True)
    for p, g in zip(own, before, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=0, equal_nan=True)
    expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, norm_type)
    found = optim.clip_grad_norm_(own, 1.0, norm_type)
    torch.testing.assert_close(found, expected, equal_nan=True)
    for p, q in zip(own, plain, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_a_norm_that_is_only_measured_changes_nothing() -> None:
    (p,) = parameters([(4,)], F32, CPU)
    p.grad = torch.tensor([1.0, 2.0, math.inf, -1.0])
    optimizer = optim.AdamW([p], max_norm=math.inf)
    optimizer.step()
    assert optimizer.grad_norm.item() == math.inf
    assert p.isfinite().tolist() == [True, True, False, True]


def test_a_step_that_is_refused_changes_nothing() -> None:
    tensors = parameters(SHAPES, F32, CPU)
    optimizer = trained(lambda p: optim.AdamW(p, max_norm=1.0, error_if_nonfinite=True), tensors)
    kept = copy.deepcopy((tensors, optimizer.state_dict()))
    gradients(tensors, 5)
    tensors[0].grad[0, 0] = math.nan
    with pytest.raises(NonFiniteNormError):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept[0], strict=True))
    for k, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[key], kept[1]["state"][k][key]) for key in state)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_states_go_to_torch_and_come_back(dtype: torch.dtype) -> None:
    """Trained by one, saved, loaded into the other, trained on: as if by one of them all the time."""
    options = {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}
    makes = [lambda p: optim.AdamW(p, max_norm=math.inf, **options), lambda p: torch.optim.AdamW(p, **options)]
    alone = parameters(SHAPES, dtype, CPU)
    trained(makes[1], alone, steps=6)
    for first, second in (makes, makes[::-1]):
        tensors = parameters(SHAPES, dtype, CPU)
        file = io.BytesIO()
        torch.save(trained(first, tensors).state_dict(), file)
        file.seek(0)
        optimizer = second(tensors)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        trained(optimizer, tensors, first=3)
        for p, q in zip(tensors, alone, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        assert {float(s["step"]) for s in optimizer.state.values()} == {6.0}


@pytest.mark.parametrize("fused", [None, True])
def test_a_state_dict_leaves_torchs_optimiser_the_kernels_that_it_has(fused: bool | None) -> None:
    """torch's fused kernels refuse DTensors beside plain tensors: nobody is switched to them."""
    tensors = parameters(SHAPES, F32, CPU)
    state = trained(copy.deepcopy(optim.AdamW(tensors, fused=fused)), tensors).state_dict()
    by_torch = torch.optim.AdamW(tensors)
    by_torch.load_state_dict(state)
    assert by_torch.param_groups[0]["fused"] is fused
    again = optim.AdamW(tensors, fused=fused)
    again.load_state_dict(by_torch.state_dict())
    assert again.state_dict()["param_groups"] == state["param_groups"]


def test_moments_of_narrow_parameters_stay_wide() -> None:
    tensors = parameters(SHAPES, BF16, CPU)
    optimizer = trained(lambda p: optim.AdamW(p, master_weights=True), tensors)
    saved = copy.deepcopy(optimizer.state_dict())
    other = optim.AdamW(parameters(SHAPES, BF16, CPU), master_weights=True)
    other.load_state_dict(saved)
    for k, state in saved["state"].items():
        here = other.state_dict()["state"][k]
        assert here.keys() == state.keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
        assert all(here[key].dtype == F32 and torch.equal(here[key], state[key]) for key in state)
    torch_own = torch.optim.AdamW(parameters(SHAPES, BF16, CPU))
    torch_own.load_state_dict(saved)
    trained(torch_own, torch_own.param_groups[0]["params"])


def test_schedulers_groups_closures_and_copies() -> None:
    own, plain = (parameters(SHAPES, F32, CPU) for _ in range(2))
    found: list[list[Parameter]] = []
    for kind, tensors in ((optim.AdamW, own), (torch.optim.AdamW, plain)):
        optimizer = kind([{"params": tensors[:1], "weight_decay": 0.3}], lr=torch.tensor(1e-2), betas=(0.8, 0.9))
        optimizer.add_param_group({"params": tensors[1:], "lr": 3e-3, "eps": 1e-3})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(5):
            gradients(tensors, step, leave_out=step)
            assert optimizer.step(lambda: 7.0) == 7.0
            scheduler.step()
        copied, its = copy.deepcopy((optimizer, tensors))
        pickled = pickle.loads(pickle.dumps(optimizer))
        assert len(pickled.state) == len(optimizer.state)
        gradients(its, 9)
        copied.step()
        found.append(its)
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_compiled_function_may_step() -> None:
    own, plain = (parameters(SHAPES, F32, CPU) for _ in range(2))
    optimizers = [optim.AdamW(own), torch.optim.AdamW(plain)]
    for tensors in (own, plain):
        gradients(tensors, 0)

    @torch.compile(backend="eager")
    def step(scale: torch.Tensor) -> torch.Tensor:
        optim.clip_grad_norm_(own, 1.0)
        optimizers[0].step()
        return scale * 2

    assert step(torch.ones(())).item() == 2
    torch.nn.utils.clip_grad_norm_(plain, 1.0)
    optimizers[1].step()
    for p, q in zip(own, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_parameters_and_states_may_be_replaced_between_steps() -> None:
    own, plain = (parameters([(8, 6), (9,)], F32, CPU) for _ in range(2))
    optimizers = [optim.AdamW(own), torch.optim.AdamW(plain)]
    for tensors, optimizer in zip((own, plain), optimizers, strict=True):
        trained(optimizer, tensors)
        tensors[0].data = tensors[0].detach().clone() * 2
        optimizer.state[tensors[1]]["exp_avg"] = torch.full((9,), 0.25)
        trained(optimizer, tensors, first=3)
        optimizer.state.clear()
        trained(optimizer, tensors, steps=1)
    for p, q in zip(own, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    own[0].data = torch.zeros(3)
    own[0].grad = torch.zeros(3)
    with pytest.raises(
        OptimizerTensorError, match=r"'exp_avg' of parameter 0 of shape .* is of shape \[8, 6\], expected \[3\]"
    ):
        optimizers[0].step()


def test_a_model_that_is_cast_after_steps() -> None:
    (p,) = parameters([(8, 6)], F32, CPU)
    optimizer = trained(lambda p: optim.AdamW(p, master_weights=True), [p])
    for dtype in (F64, BF16):
        p.data = p.detach().to(dtype)
        before = p.detach().clone()
        trained(optimizer, [p], steps=1)
        assert p.dtype == dtype
        assert not torch.equal(p, before)
    assert torch.equal(p, optimizer.state[p]["master"].to(BF16))


def test_frozen_parameters_are_left_alone_whatever_their_type() -> None:
    frozen = [Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False), Parameter(torch.ones(2), False)]
    tensors = parameters(SHAPES, F32, CPU)
    optimizer = trained(lambda p: optim.AdamW([frozen[0], *p, frozen[1]], max_norm=1.0), tensors)
    assert optimizer.state.keys() == set(tensors)
    frozen[1].requires_grad_()
    trained(optimizer, [*tensors, frozen[1]], steps=1, first=3)
    assert {p: s["step"].item() for p, s in optimizer.state.items()} == {**dict.fromkeys(tensors, 4), frozen[1]: 1}


def test_gradients_wider_than_parameters() -> None:
    (p,) = parameters([(64,)], BF16, CPU)
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch has gradients of the parameter's type alone")
    p.grad_dtype = F32
    drawn = torch.randn(64, generator=torch.Generator().manual_seed(1))
    p.grad = drawn
    optimizer = optim.AdamW([p])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], drawn * 0.1)


BAD_TENSORS = {
    "sparse": (
        lambda: [_with(torch.ones(4, 2), torch.ones(4, 2).to_sparse())],
        r"is torch.sparse_coo, expected a dense",
    ),
    "complex": (lambda: [_with(torch.ones(3, dtype=torch.complex64))], r"is of torch.complex64, expected float32"),
    "devices": (
        lambda: [_with(torch.ones(3)), _with(torch.ones(3, device="meta"))],
        "on cpu and meta, expected one device",
    ),
    "shared": (lambda: _views(), "shares? memory"),
}


def _with(values: torch.Tensor, gradient: torch.Tensor | None = None) -> Parameter:
    p = Parameter(values)
    p.grad = torch.ones_like(values) if gradient is None else gradient
    return p


def _views() -> list[Parameter]:
    values, gradient = torch.ones(10), torch.ones(10)
    found = [Parameter(values[:6]), Parameter(values[5:])]
    for p, g in zip(found, (gradient[:6], gradient[5:]), strict=True):
        p.grad = g
    return found


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_are_refused(name: str) -> None:
    make, words = BAD_TENSORS[name]
    with pytest.raises(OptimizerTensorError, match=words):
        optim.clip_grad_norm_(make(), 1.0)
    with pytest.raises(OptimizerTensorError, match=words):
        optim.AdamW(make()).step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_listed_twice_is_named_as_such() -> None:
    """To clone it, as is advised where two share memory, would clip no gradient of it."""
    first, second, other = parameters([(3,), (4,), (4,)], F32, CPU)
    gradients([first, second, other], 5)
    kept = copy.deepcopy((first.detach(), second.grad))
    said = r"is listed twice, expected each parameter once: nothing was written; list it once"
    with pytest.raises(OptimizerTensorError, match=rf"^clip_grad_norm_: parameter 2 {said}$"):
        optim.clip_grad_norm_([Parameter(torch.ones(1)), first, second, second], 1e-3)
    with pytest.raises(OptimizerTensorError, match=rf"^AdamW.step: parameter 1 of shape \[4\] {said}$"):
        optim.AdamW([first, second, second]).step()
    assert torch.equal(first, kept[0])
    assert torch.equal(second.grad, kept[1])
    other.grad = second.grad
    with pytest.raises(OptimizerTensorError, match=r"gradients 0 and 1 share memory, .*: clone\(\) one of them"):
        optim.clip_grad_norm_([second, other], 1e-3)


def test_arguments_that_are_refused() -> None:
    p = _with(torch.ones(3))
    for call, argument in (
        (lambda: optim.clip_grad_norm_(p, math.nan), "max_norm is nan"),
        (lambda: optim.clip_grad_norm_(p, "1"), "max_norm is '1'"),
        (lambda: optim.clip_grad_norm_(p, -1.0), "max_norm is -1.0, expected a number, 0 or more"),
        (lambda: optim.clip_grad_norm_([p, 3], 1.0), r"parameters\[1\] is 3, expected a torch.Tensor"),
        (lambda: optim.AdamW([p], max_norm="1"), "max_norm is '1'"),
        (lambda: optim.clip_grad_norm_(p, 1.0, 0), "norm_type is 0"),
        (lambda: optim.clip_grad_norm_(p, 1.0, "two"), "norm_type is 'two'"),
        (lambda: optim.clip_grad_norm_(p, 1.0, mesh=3, placements=[]), "mesh is 3"),
        (lambda: optim.AdamW([p], max_norm=-1.0), "max_norm is -1.0"),
        (lambda: optim.AdamW([p], norm_type=-2), "norm_type is -2"),
        (lambda: optim.AdamW([p], differentiable=True), "differentiable is True"),
    ):
        with pytest.raises(OptimizerArgumentError, match=argument):
            call()


ADAMW_ARGUMENTS: dict[str, Callable[[Parameter], object]] = {
    "lr is -1.0, expected a number, 0 or more": lambda p: optim.AdamW([p], lr=-1.0),
    "lr is nan, expected a number, 0 or more": lambda p: optim.AdamW([p], lr=math.nan),
    "lr is None, expected a number, or a tensor of one": lambda p: optim.AdamW([p], lr=None),
    "lr is a Tensor of shape [2], expected a number": lambda p: optim.AdamW([p], lr=torch.ones(2)),
    "eps is '0', expected a number": lambda p: optim.AdamW([p], eps="0"),
    "weight_decay is -0.1, expected a number, 0 or more": lambda p: optim.AdamW([p], weight_decay=-0.1),
    "betas is 0.9, expected two numbers": lambda p: optim.AdamW([p], betas=0.9),
    "betas is (0.9, 0.9, 0.9), expected two numbers": lambda p: optim.AdamW([p], betas=(0.9,) * 3),
    "betas[1] is 1.0, expected a number from 0 up to, but not including, 1": lambda p: optim.AdamW(
        [p], betas=(0.9, 1.0)
    ),
    "params is [], expected a list of tensors, or of param groups, with one or more": lambda p: optim.AdamW(iter([])),
    "params is a Parameter of shape [3], expected a list of tensors, or of param groups": lambda p: optim.AdamW(p),
    "params is None, expected a list of tensors": lambda p: optim.AdamW(None),
    "params is {1}, expected a list of tensors, as the order in a set": lambda p: optim.AdamW([{"params": {1}}]),
    "params[1] is 3, expected a torch.Tensor": lambda p: optim.AdamW([p, 3]),
    "params[0] is None, expected a torch.Tensor": lambda p: optim.AdamW([("weight", None)]),
    "params[1] is a Tensor of shape [3], expected a leaf": lambda p: optim.AdamW([p, p * 2]),
    "a param group is {'lr': 1.0}, expected a dict": lambda p: optim.AdamW([{"lr": 1.0}]),
}


@pytest.mark.parametrize("sentence", ADAMW_ARGUMENTS)
def test_arguments_that_adamw_refuses_when_it_is_made(sentence: str) -> None:
    with pytest.raises(OptimizerArgumentError, match=re.escape(f"AdamW: {sentence}")):
        ADAMW_ARGUMENTS[sentence](_with(torch.ones(3)))


def test_parameters_that_get_no_gradient_may_be_of_any_type() -> None:
    """A model's own list holds its quantised weights too, which torch's optimisers take as well."""
    p, quantised = _with(torch.ones(3)), torch.arange(3)
    optimizer = optim.AdamW(iter([("p", p), ("quantised", quantised)]), lr=0.5)
    optimizer.step()
    assert (p < 1).all()
    assert torch.equal(quantised, torch.arange(3))


def test_a_result_that_retains_its_gradient_is_taken() -> None:
    result = 2 * Parameter(torch.ones(3))
    result.retain_grad()
    optimizer = optim.AdamW([result], lr=0.5)
    result.sum().backward()
    optimizer.step()
    assert (result < 2).all()


@pytest.mark.parametrize("norm", [np.float32(0.5), np.float16(0.5), np.int64(1), Fraction(1, 2)])
def test_a_bound_of_the_norm_is_any_number(norm: Real) -> None:
    expected, found = _with(torch.full((3,), 7.0)), _with(torch.full((3,), 7.0))
    torch.nn.utils.clip_grad_norm_(expected, float(norm))
    optim.clip_grad_norm_(found, norm)
    torch.testing.assert_close(found.grad, expected.grad)
    optim.AdamW([found], max_norm=norm).step()


@pytest.mark.parametrize("repeated", ["parameter", "state", "gradient"])
def test_elements_in_one_place_are_refused_before_anything_is_written(repeated: str) -> None:
    first, second = parameters([(3,), (2, 4)], F32, CPU)
    optimizer = trained(optim.AdamW, [first, second])
    gradients([first, second], 5)
    if repeated == "parameter":
        second.data = torch.ones(4).expand(2, 4)
    elif repeated == "state":
        optimizer.state[second]["exp_avg"] = torch.ones(4).expand(2, 4)
    else:
        second.grad = torch.ones(4).expand(2, 4)
    kept = copy.deepcopy((first.detach(), first.grad, optimizer.state[first]))
    if repeated == "gradient":
        with pytest.raises(
            OptimizerTensorError, match=r"gradient 1 has several elements in one place, .* clone\(\) it"
        ):
            optim.clip_grad_norm_([first, second], 1e-3)
    else:
        named = "" if repeated == "parameter" else "the state 'exp_avg' of "
        with pytest.raises(OptimizerTensorError, match=rf"AdamW.step: {named}.* has several elements in one place"):
            optimizer.step()
    assert torch.equal(first, kept[0])
    assert torch.equal(first.grad, kept[1])
    assert all(torch.equal(optimizer.state[first][key], kept[2][key]) for key in kept[2])
    if repeated == "gradient":
        optim.get_total_norm([first.grad, second.grad])
        optimizer.step()  # which only reads gradients


def test_stretches_of_memory_that_overlap() -> None:
    assert overlapping([], []) is None
    assert overlapping([0, 16, 32], [16, 16, 4]) is None
    assert overlapping([32, 0, 31], [4, 16, 2]) == (0, 2)
    assert overlapping([0, 8, 100], [200, 4, 4]) == (0, 1)
    assert overlapping([64, 64, 64], [0, 8, 0]) is None
    assert overlapping([64, 64], [8, 8]) == (0, 1)
    assert overlapping([0, 4, 50], [100, 0, 2]) == (0, 2)


def test_what_only_the_whole_optimiser_has() -> None:
    p = Parameter(torch.ones(3))
    with pytest.raises(OptimizerArgumentError, match="max_norm"):
        optim.AdamW([p], error_if_nonfinite=True)
    for key, flag in (("master_weights", 1), ("error_if_nonfinite", "yes")):
        with pytest.raises(OptimizerArgumentError, match=f"{key} .* True or False"):
            optim.AdamW([p], max_norm=1.0, **{key: flag})  # pyright: ignore[reportArgumentType]
    for key, value in (("max_norm", 1.0), ("master_weights", True), ("decoupled_weight_decay", False)):
        with pytest.raises(OptimizerArgumentError, match=key):
            optim.AdamW([{"params": [p], key: value}])


def test_a_master_that_steps_leave_behind_is_dropped() -> None:
    p = Parameter(torch.ones(3, dtype=BF16))
    first = trained(lambda ps: optim.AdamW(ps, master_weights=True), [p])
    second = optim.AdamW([p])
    second.load_state_dict(first.state_dict())
    trained(second, [p], first=3)
    assert "master" not in second.state[p]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", None, r"AdamW.step: lr of param_groups\[1\] is None, expected a number, or a tensor of one"),
        ("lr", torch.ones(2), r"lr of param_groups\[1\] is "),
        ("eps", "1e-8", r"eps of param_groups\[1\] is '1e-8'"),
        ("weight_decay", None, r"weight_decay of param_groups\[1\] is None"),
        ("betas", (0.9, None), r"betas\[1\] of param_groups\[1\] is None"),
        ("betas", 0.9, r"betas of param_groups\[1\] is 0.9, expected two numbers"),
    ],
)
def test_a_hyper_parameter_that_is_no_number_is_refused_before_anything_is_written(
    key: str, value: object, message: str
) -> None:
    tensors = parameters([(3,), (4,)], F32, CPU)
    optimizer = trained(lambda p: optim.AdamW([{"params": p[:1]}, {"params": p[1:]}]), tensors)
    kept = copy.deepcopy((tensors, optimizer.state_dict()["state"]))
    gradients(tensors, 5)
    optimizer.param_groups[1][key] = value
    with pytest.raises(OptimizerArgumentError, match=message):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept[0], strict=True))
    for k, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], kept[1][k][name]) for name in state)


def test_an_error_of_a_generator_of_parameters_is_the_callers_own() -> None:
    def faulty() -> Iterator[torch.Tensor]:
        yield torch.ones(3)
        raise TypeError("of the caller")

    for call in (lambda: optim.clip_grad_norm_(faulty(), 1.0), lambda: optim.get_total_norm(faulty())):
        with pytest.raises(TypeError, match="of the caller"):
            call()


def test_a_norm_of_a_tensor_that_is_listed_twice_counts_it_twice() -> None:
    g = torch.tensor([3.0, 4.0])
    for listed in ([g, g], [g, g[:1]], [g, g.view(2, 1)]):
        expected = torch.nn.utils.get_total_norm(listed)
        torch.testing.assert_close(optim.get_total_norm(listed), expected)


def test_placements_of_a_dim_that_a_tensor_lacks_are_refused() -> None:
    mesh = DeviceMesh([0])
    for tensor, dim in ((torch.ones(3), 1), (torch.ones(()), 0), (torch.ones(3, 4), -3)):
        message = rf"has {tensor.ndim} dims, expected a tensor that has dim {dim}, as its placements say"
        with pytest.raises(OptimizerTensorError, match=message):
            optim.get_total_norm([tensor], mesh=mesh, placements=Shard(dim))
        parameter = Parameter(tensor)
        parameter.grad = torch.ones_like(tensor)
        group = {"params": [parameter], "mesh": mesh, "placements": Shard(dim)}
        with pytest.raises(OptimizerTensorError, match=message):
            optim.AdamW([group], max_norm=1.0).step()
    assert optim.get_total_norm([torch.ones(3, 4)], mesh=mesh, placements=Shard(-2)).item() == pytest.approx(12**0.5)
