"""GELU, GeGLU, packed gates, Softmax and LogSoftmax, plain and sharded, against torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from activation_sweep import SWEEPS, check_sweep
from module_cases import FLOATS, NARROW, ONE, check_module, each_rank
from nn_cases import S0, S1, S2, Here, Placements, R, along, named
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.nn import functional
from torch_gradients import leaf

from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh
from shardfuse.errors import ModuleArgumentError, ModuleInputError, PlacementError
from shardfuse.nn import GELU, GeGLU, LogSoftmax, Softmax, SwiGLU
from shardfuse.nn.gated import GatedSpec, gated_op
from shardfuse.nn.placement import TensorPlacement

SHAPE = (2, 6, 16)


def whole(module: torch.nn.Module, here: Here, shape: Sequence[int]) -> Callable[..., Tensor]:
    return partial(module, unsharded=tuple(shape)) if here.mesh.size > 1 else module


def check_gelu(
    here: Here, at: Placements, approximate: str, dtype: torch.dtype = torch.float64, shape: Sequence[int] = SHAPE
) -> None:
    module = GELU(approximate, mesh=here.mesh, input=at)
    x, gradient = here.sample(at, shape, dtype, 1), here.sample(at, shape, dtype, 2)
    function = lambda x: (functional.gelu(x, approximate=approximate),)  # noqa: E731
    check_module(module, function, {"x": x}, {}, [gradient], dtype, call=whole(module, here, shape))


def check_geglu(
    here: Here, at: Placements, approximate: str, dtype: torch.dtype = torch.float64, shape: Sequence[int] = SHAPE
) -> None:
    module = GeGLU(approximate, mesh=here.mesh, input=named(at, len(shape) - 1))
    samples = {name: here.sample(at, shape, dtype, k) for k, name in enumerate(("gate", "up"))}
    function = lambda gate, up: (functional.gelu(gate, approximate=approximate) * up,)  # noqa: E731
    gradient = here.sample(at, shape, dtype, 2)
    check_module(module, function, samples, {}, [gradient], dtype, call=whole(module, here, shape))


def check_packed(
    here: Here,
    at: Placements,
    dtype: torch.dtype = torch.float64,
    shape: Sequence[int] = SHAPE,
    *,
    bias: bool = False,
    gelu: bool = False,
) -> None:
    """Gate and up handed over apart, and put together on each rank on the way."""
    last = len(shape) - 1
    where = {"mesh": here.mesh, "input": named(at, last)}
    module = GeGLU(**where) if gelu else SwiGLU(shape[-1], bias=bias, dtype=dtype, device=here.device, **where)
    samples = {name: here.sample(at, shape, dtype, k) for k, name in enumerate(("gate", "up"))}
    parameters = {
        name: here.sample(along(at, last), shape[-1:], dtype, 5 + k)
        for k, name in enumerate(("gate_bias", "up_bias"))
        if bias
    }

    def function(gate: Tensor, up: Tensor, gate_bias: Tensor | float = 0.0, up_bias: Tensor | float = 0.0) -> tuple:
        act = functional.gelu if gelu else functional.silu
        return (act(gate + gate_bias) * (up + up_bias),)

    def call(gate: Tensor, up: Tensor) -> Tensor:
        return whole(module, here, shape)(torch.cat((gate, up), -1))

    check_module(module, function, samples, parameters, [here.sample(at, shape, dtype, 2)], dtype, call=call)


def check_softmax(
    here: Here,
    at: Placements,
    dtype: torch.dtype = torch.float64,
    shape: Sequence[int] = SHAPE,
    *,
    log: bool = False,
    dim: int = -1,
    scale: float = 1.0,
    mask: str = "",
) -> None:
    module = (LogSoftmax if log else Softmax)(dim, scale, mesh=here.mesh, input=at)
    x, gradient = here.sample(at, shape, dtype, 1), here.sample(at, shape, dtype, 2)
    masks: list[Tensor] = []
    if mask:
        generator = torch.Generator().manual_seed(4)
        sizes = [1, *shape[1:-1], 1 if mask.endswith("column") else shape[-1]]
        mask = mask.removesuffix(" column")
        kept = torch.rand(sizes, generator=generator) < 0.7
        kept[..., 0] = True
        kept = kept.to(here.device)
        masks = [kept if mask == "bool" else torch.randn(sizes, generator=generator).to(here.device, dtype)]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        scores = scale * x
        if mask:
            scores = scores.masked_fill(~masks[0], -torch.inf) if mask == "bool" else scores + masks[0].to(x.dtype)
        result = functional.log_softmax(scores, dim) if log else functional.softmax(scores, dim)
        return (result.masked_fill(~masks[0], 0.0) if log and mask == "bool" else result,)

    at_mask = [R if isinstance(p, Shard) and masks and masks[0].shape[p.dim] == 1 else p for p in at]
    local = [here.cut(m, at_mask).clone() for m in masks]

    def call(x: Tensor) -> Tensor:
        result = whole(module, here, shape)(x, *local)
        if log and mask == "bool":  # of minus infinity no error can be told
            dropped = ~local[0].expand(result.shape)
            assert (result[dropped] == -torch.inf).all()
            result = result.masked_fill(dropped, 0.0)
        return result

    check_module(module, function, {"x": x}, {}, [gradient], dtype, call=call)


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain(dtype: torch.dtype) -> None:
    for shape in ((40,), (3, 40), (2, 3, 4, 5)):
        for approximate in ("none", "tanh"):
            check_gelu(ONE, [R], approximate, dtype, shape)
            check_geglu(ONE, [R], approximate, dtype, shape)
        check_packed(ONE, [R], dtype, shape)
        check_softmax(ONE, [R], dtype, shape, log=len(shape) == 2)
    check_packed(ONE, [R], dtype, bias=True)
    check_packed(ONE, [R], dtype, gelu=True)
    for log in (False, True):
        check_softmax(ONE, [R], dtype, log=log, dim=1, scale=0.3)
        check_softmax(ONE, [R], dtype, log=log, mask="bool")
        check_softmax(ONE, [R], dtype, log=log, mask="float", scale=0.5)


@pytest.mark.parametrize("name", SWEEPS)
def test_at_every_number(name: str) -> None:
    """The slope of GELU by tanh was off by 32 roundings at 4.9, where 1 - tanh^2 has lost its digits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_sweep(name, dtype, 128)


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_from_zero(name: str, dtype: torch.dtype) -> None:
    """The slope is 0 or 1 there, whatever its terms are: their products are beyond float32 from -1e13 on."""
    own, _, exact = SWEEPS[name]
    far = torch.tensor([1e3, 1e6, 1e9, 1e12, 1e13, 1e15, 1e17, 1e18], dtype=torch.float64)
    x = torch.cat((far, -far)).to(dtype)
    given = [x, torch.ones_like(x)][: 1 + ("glu" in name)]
    tensors = [t.clone().requires_grad_() for t in given]
    wide = [t.double().requires_grad_() for t in given]
    found, right = own(*tensors), exact(*wide)
    assert_near(found.detach(), right.detach(), signed=False, what=name)
    found.sum().backward()
    right.sum().backward()
    for mine, theirs in zip(tensors, wide, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert_near(mine.grad, theirs.grad, signed=False, what=f"a gradient of {name}")


def test_on_ranks() -> None:
    cases = {
        "gelu": partial(check_gelu, at=[S1], approximate="none"),
        "geglu": partial(check_geglu, at=[S2], approximate="tanh"),
        "geglu_uneven": partial(check_geglu, at=[S1], approximate="none", shape=(2, 5, 8)),
        "packed_columns": partial(check_packed, at=[S2], bias=True),
        "packed_uneven_columns": partial(check_packed, at=[S2], bias=True, shape=(2, 3, 9)),
        "packed_rows": partial(check_packed, at=[S0], bias=True, shape=(3, 2, 8)),
        "softmax_rows": partial(check_softmax, at=[S1], mask="bool"),
        "softmax_along": partial(check_softmax, at=[S2], mask="bool", scale=0.25),
        "softmax_along_uneven": partial(check_softmax, at=[S2], shape=(2, 3, 9), mask="float"),
        "softmax_of_one": partial(check_softmax, at=[S2], shape=(2, 3, 3), mask="float"),
        "softmax_of_one_bool": partial(check_softmax, at=[S2], shape=(2, 3, 3), mask="bool", log=True),
        "softmax_of_one_column": partial(check_softmax, at=[S2], shape=(2, 3, 3), mask="float column"),
        "softmax_of_two_columns": partial(check_softmax, at=[S2], shape=(2, 3, 4), mask="float column"),
        "softmax_batch": partial(check_softmax, at=[S0], mask="float"),
        "log_softmax_along": partial(check_softmax, at=[S1], dim=1, log=True, mask="bool"),
        **{f"packed_{dtype}": partial(check_packed, at=[S2], dtype=dtype) for dtype in NARROW},
        **{f"softmax_{dtype}": partial(check_softmax, at=[S2], dtype=dtype) for dtype in NARROW},
    }
    for name, at in (("rows", [S1]), ("along", [S2]), ("batch", [S0])):
        for sizes in ((), (1, 6, 16), (16,), (2, 1, 1)):
            cases[f"learned_{name}_{sizes}"] = partial(check_learned_mask, at=at, sizes=sizes)
        cases[f"nothing_{name}"] = partial(check_row_of_nothing, at=at)
    each_rank([2], cases)
    each_rank([2, 2], {"softmax": partial(check_softmax, at=[S0, S2]), "gate": partial(check_packed, at=[S0, S2])})


def test_what_takes_no_part_in_a_log_softmax_has_no_gradient() -> None:
    """Whatever gradient arrives there."""
    x, mask = torch.randn(3, 7, dtype=torch.float64), torch.arange(7) % 3 != 1
    gradient = torch.randn(3, 7, dtype=torch.float64)
    ours, theirs = leaf(x), leaf(x)
    LogSoftmax()(ours, mask).backward(gradient)
    theirs.masked_fill(~mask, -torch.inf).log_softmax(-1).backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert (ours.grad[:, ~mask] == 0).all()


def test_packed_gates_are_read_in_place() -> None:
    """One kernel forward, and one backward that writes one gradient."""

    x = torch.randn(3, 32, requires_grad=True)
    SwiGLU()(x).sum().backward()
    spec = GatedSpec(
        activation="silu", ndim=3, is_packed=True, mesh=None, placement=TensorPlacement(),
        dtype=DataType.Float, bias_dtype=None,
    )  # fmt: skip
    op = gated_op(spec)
    assert op.forward.explain().kernels == op.backward.explain().kernels == 1


def test_bad_arguments() -> None:
    for make in (GELU, GeGLU):
        with pytest.raises(ModuleArgumentError, match=rf"{make.__name__}\(approximate="):
            make("exact")
        with pytest.raises(PlacementError, match="whole values"):
            make(mesh=DeviceMesh([0]), input=Partial())
    with pytest.raises(ModuleArgumentError, match="scale="):
        Softmax(-1, float("inf"))
    with pytest.raises(ModuleArgumentError, match="dim="):
        LogSoftmax("last")
    with pytest.raises(PlacementError, match="no mesh"):
        Softmax(input=S0)


def check_learned_mask(here: Here, at: Placements, sizes: Sequence[int], dtype: torch.dtype = torch.float64) -> None:
    """The gradient of a mask that is added is summed over the dims in which it is broadcast, on all ranks."""
    x, gradient = here.sample(at, SHAPE, dtype, 1), here.sample(at, SHAPE, dtype, 2)
    given = torch.randn(tuple(sizes), generator=torch.Generator().manual_seed(3)).to(here.device, dtype)
    full = (1,) * (3 - len(sizes)) + tuple(sizes)
    cut = [R if isinstance(p, Shard) and full[p.dim] == 1 else p for p in at]
    for log in (False, True):
        placed = {"mask": cut} if here.mesh.size > 1 else {}  # of one sample a rank no shape tells
        module = (LogSoftmax if log else Softmax)(scale=0.5, mesh=here.mesh, input=at, **placed)
        mask = here.cut(given.view(full), cut).clone()
        ours, theirs = leaf(mask if here.mesh.size > 1 else mask.view(tuple(sizes))), leaf(given.double())
        for _ in range(2):  # bound, and looked up
            ours.grad = None
            values = leaf(x.local)
            module(values, ours).backward(gradient.local)
        wide = leaf(x.full)
        scores = 0.5 * wide + theirs
        (scores.log_softmax(-1) if log else scores.softmax(-1)).backward(gradient.full)
        off = {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(ours.grad.double().view(mask.shape), here.cut(theirs.grad.view(full), cut), **off)
        torch.testing.assert_close(values.grad.double(), here.cut(wide.grad, at), **off)


def check_row_of_nothing(here: Here, at: Placements) -> None:
    """Where nothing takes part results are NaN, and gradients 0, as of torch's masked_fill; a NaN in x is no mask."""
    x, gradient = here.sample(at, SHAPE, torch.float64, 1), here.sample(at, SHAPE, torch.float64, 2)
    mask = torch.rand(SHAPE, generator=torch.Generator().manual_seed(4)).to(here.device) < 0.7
    mask[0, 1], mask[1, :, 3] = False, True
    values = x.full.clone()
    values[1, 2, 3] = torch.nan
    for log in (False, True):
        module = (LogSoftmax if log else Softmax)(scale=0.5, mesh=here.mesh, input=at)
        ours, theirs = leaf(here.cut(values, at).clone()), leaf(values)
        found = module(ours, here.cut(mask, at).clone())
        found.backward(gradient.local)
        scores = (0.5 * theirs).masked_fill(~mask, -torch.inf)
        wanted = scores.log_softmax(-1) if log else scores.softmax(-1)
        wanted.backward(gradient.full)
        torch.testing.assert_close(found.detach(), here.cut(wanted.detach(), at), equal_nan=True)
        torch.testing.assert_close(ours.grad, here.cut(theirs.grad, at), equal_nan=True)


def test_masks_on_one_rank() -> None:
    check_row_of_nothing(ONE, [R])
    for sizes in ((), (16,), (1, 6, 16), (6, 1), SHAPE):
        check_learned_mask(ONE, [R], sizes)
    check_learned_mask(ONE, [R], (6, 16), torch.bfloat16)
    # compiled, with another setting, and where a mode takes ops
    x, mask = torch.randn(3, 4), leaf(torch.randn(1, 4))
    module = Softmax()
    torch._dynamo.reset()
    wanted = torch.autograd.grad(functional.softmax(x + mask, -1)[:, 0].sum(), mask)[0]
    fits = [module, torch.compile(module, backend="aot_eager", fullgraph=True)]
    for each in fits:
        torch.testing.assert_close(torch.autograd.grad(each(x, mask)[:, 0].sum(), mask)[0], wanted)
    module.scale = 0.0
    assert (torch.autograd.grad(module(x, mask)[:, 0].sum(), mask)[0] != wanted).any()
    kept = torch.utils.checkpoint.checkpoint(Softmax(), x, mask, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(kept[:, 0].sum(), mask)[0], wanted)


def test_along_a_dim_without_elements() -> None:
    for make, wanted in ((Softmax, functional.softmax), (LogSoftmax, functional.log_softmax)):
        for shape, dim in (((3, 0), -1), ((0, 3), 0), ((0, 3), 1)):
            x, y = leaf(torch.ones(shape)), leaf(torch.ones(shape))
            found = make(dim)(x, torch.ones(shape, dtype=torch.bool))
            assert found.shape == wanted(y, dim).shape
            found.sum().backward()
            assert x.grad.shape == x.shape
    with pytest.raises(ModuleInputError, match="x has dtype"):
        Softmax()(torch.ones(2, 0, dtype=torch.int32))


def test_bad_inputs() -> None:
    x = torch.ones(3, 4)
    for call, message in (
        (lambda: GELU()(x.int()), "GELU: x has dtype"),
        (lambda: GeGLU()(x, x[:2]), "GeGLU: up has shape"),
        (lambda: GeGLU()(x, x.double()), "GeGLU: up has dtype"),
        (lambda: GeGLU()(x[:, :3]), "GeGLU: gate has 3 features"),
        (lambda: SwiGLU(4, bias=True)(x), "SwiGLU: gate has shape"),
        (lambda: GeGLU()(torch.ones(())), "GeGLU: gate has no dims"),
        (lambda: Softmax(2)(x), "Softmax: x has 2 dims"),
        (lambda: Softmax()(x, torch.ones(2, 4)), "Softmax: mask has shape"),
        (lambda: Softmax()(x, torch.ones(4, dtype=torch.int32)), "Softmax: mask has dtype"),
    ):
        with pytest.raises(ModuleInputError, match=message):
            call()
