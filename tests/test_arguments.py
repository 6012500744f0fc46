"""What a caller hands to a fusion and gets back: autograd, results in place, tensors that are not plain ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch_answers import assert_beside

import shardfuse.compat.nvfuser_direct as nvfuser_direct
from benchmarks.roundings import assert_near
from shardfuse import DataType, DeviceMesh, FusionDefinition, NoGradientsWarning, ParallelType
from shardfuse.compat.nvfuser_direct.distributed import execute_with_dtensors
from shardfuse.errors import DefinitionError, InputError, NoKernelsError, OperandError
from shardfuse.nn import RMSNorm, Softmax, redistribute


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def normalised(mesh: DeviceMesh | None = None) -> FusionDefinition:
    """Rows of 8 over their norm; on a mesh the columns are sharded."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        fd.add_output(fd.ops.mul(x, fd.ops.rsqrt(fd.ops.sum(fd.ops.mul(x, x), [-1], keepdim=True))))
        if mesh is not None:
            x.set_device_mesh(mesh)
            x.outer_split(1, mesh.size)
            x.axis(1).parallelize(ParallelType.mesh_x)
    return fd


def normalised_by_torch(x: Tensor) -> Tensor:
    wide = x.detach().double()
    return (wide / wide.square().sum(-1, keepdim=True).sqrt()).float()


def compat_definition() -> nvfuser_direct.FusionDefinition:
    with nvfuser_direct.FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, 8], contiguity=True)
        fd.add_output(fd.ops.mul(x, fd.ops.rsqrt(fd.ops.sum(fd.ops.mul(x, x), [-1], keepdim=True))))
    return fd


def by_compat_cache(x: Tensor) -> Tensor:
    return nvfuser_direct.FusionExecutorCache(compat_definition().fusion).execute([x])[0]


ENTRIES: dict[str, Callable[[Tensor], Tensor]] = {
    "execute": lambda x: normalised().execute([x])[0],
    "executor": lambda x: normalised().fec.execute([x])[0],
    "compat": lambda x: compat_definition().execute([x])[0],
    "compat executor": by_compat_cache,
    "validate": lambda x: normalised().validate([x])[0],
}


# autograd


@pytest.mark.parametrize("entry", ENTRIES)
def test_results_carry_no_graph_and_the_input_is_named(entry: str) -> None:
    x = numbers(4, 8).requires_grad_()
    with pytest.warns(NoGradientsWarning, match=r"input 0, \w+, requires a gradient.*shardfuse\.nn") as told:
        y = ENTRIES[entry](x)
    assert told[0].filename == __file__  # the caller's line, not one of shardfuse
    assert not y.requires_grad
    assert y.grad_fn is None
    assert_beside(y, normalised_by_torch(x))
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()


def test_it_is_told_once_and_only_where_a_graph_is_missed() -> None:
    x, fd = numbers(4, 8).requires_grad_(), normalised()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fd.execute([x.detach()])
        with torch.no_grad():
            fd.execute([x])
        with torch.inference_mode():
            fd.execute([x])
    assert torch.is_grad_enabled()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fd.execute([x])
        fd.execute([x])
        fd.timeline([x])
    assert [w.category for w in told] == [NoGradientsWarning]
    assert torch.is_grad_enabled()
    with pytest.raises(InputError):
        fd.execute([x.double()])
    assert torch.is_grad_enabled()


def test_an_error_made_of_the_warning_comes_every_time() -> None:
    x, fd = numbers(4, 8).requires_grad_(), normalised()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoGradientsWarning)
        for _ in range(2):
            with pytest.raises(NoGradientsWarning):
                fd.execute([x])


def test_sharded_results_carry_no_graph() -> None:
    whole = numbers(4, 8)

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        x = mesh.shard_tensor(whole, 1).requires_grad_()
        (y,) = normalised(mesh).execute([x])
        assert not y.requires_grad
        assert_beside(y, mesh.shard_tensor(normalised_by_torch(whole), 1))

    with pytest.warns(NoGradientsWarning):
        run_ranks(2, run)


def test_dtensors_that_require_a_gradient_give_results_without_a_graph() -> None:
    whole = numbers(4, 8)

    def run(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (size,))
        fd = normalised()
        for placement in (Shard(0), Shard(1), Replicate()):
            x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
            of_graph = x * 1
            for given in (x, of_graph):
                (y,) = fd.execute([given])
                assert isinstance(y, DTensor)
                assert not y.requires_grad
                assert not y.to_local().requires_grad
                assert_beside(y.full_tensor(), normalised_by_torch(whole))
                y += 1

    with pytest.warns(NoGradientsWarning):
        run_ranks(2, run)


def test_compat_on_dtensors_carries_no_graph() -> None:
    whole = numbers(4, 8)

    def run(rank: int, size: int) -> None:
        x = distribute_tensor(whole, init_device_mesh("cpu", (size,)), [Replicate()]).requires_grad_()
        fd = compat_definition()
        native = fd.fusion.native.inputs[0].val
        native.set_device_mesh(DeviceMesh(list(range(size))))
        (y,) = execute_with_dtensors(fd, [x])
        assert not y.requires_grad
        assert_beside(y.full_tensor(), normalised_by_torch(whole))

    with pytest.warns(NoGradientsWarning):
        run_ranks(2, run)


def test_an_output_replaces_a_parameter() -> None:
    with FusionDefinition() as fd:
        p, g = fd.define_tensor([-1]), fd.define_tensor([-1])
        fd.add_output(fd.ops.sub(p, g), alias_input=p)
    weight, gradient = torch.nn.Parameter(numbers(6)), numbers(6)
    expected, version = weight.detach() - gradient, weight._version
    with pytest.warns(NoGradientsWarning):
        assert fd.execute([weight, gradient]) == []
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=0)
    assert weight._version > version  # a graph that has kept it will refuse to go back
    assert weight.is_leaf


# results in place


def many_kinds_of_results() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 8], contiguity=True)
        e = fd.ops.exp(x)
        fd.add_output(e)
        fd.add_output(fd.ops.reshape(e, [8, 4]))
        fd.add_output(fd.ops.permute(e, [1, 0]))
        fd.add_output(fd.ops.slice(e, [1, 0], [3, 8]))
        fd.add_output(fd.ops.sum(x, [1], keepdim=True))
        fd.add_output(fd.ops.expand(fd.ops.sum(x, [1], keepdim=True), [4, 8]))
        fd.add_output(fd.ops.cat([x, e], 0))
        fd.add_output(fd.ops.reshape(x, [8, 4]))
    return fd


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.filterwarnings("ignore::shardfuse.NoGradientsWarning")
def test_every_result_is_changed_in_place(requires_grad: bool) -> None:
    x, weight = numbers(4, 8).requires_grad_(requires_grad), torch.ones((), requires_grad=True)
    for k, y in enumerate(many_kinds_of_results().execute([x])):
        assert not y._is_view(), f"output {k}"
        if not y.is_contiguous():
            y = y.contiguous()
        before = y.clone()
        y += weight  # autograd records it
        torch.testing.assert_close(y.detach(), before + 1, rtol=0, atol=0)
        y.sum().backward()
    assert weight.grad is not None
    assert x.grad is None


def test_a_module_result_is_changed_in_place() -> None:
    x, module = numbers(2, 4, 8).requires_grad_(), RMSNorm(8)
    y = module(x)
    y += 1
    y.mul_(2).sum().backward()
    wide = x.detach().double().requires_grad_()
    (torch.nn.functional.rms_norm(wide, (8,), eps=module.eps).add(1) * 2).sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    assert_beside(x.grad, wide.grad.float())


@pytest.mark.parametrize("target", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("source", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_a_redistributed_tensor_is_changed_in_place_and_its_source_stays(source: object, target: object) -> None:
    whole = numbers(4, 8)

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        local = mesh.shard_tensor(whole, source.dim) if isinstance(source, Shard) else whole.clone()
        before = local.clone()
        x = local.requires_grad_()
        y = redistribute(x, mesh, source, target)
        y += 1
        torch.testing.assert_close(x.detach(), before, rtol=0, atol=0)
        y.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.ones_like(x), rtol=0, atol=0)

    run_ranks(2, run)


def test_a_dtensor_of_a_module_is_changed_in_place() -> None:
    whole = numbers(2, 4, 8)

    def run(rank: int, size: int) -> None:
        torch_mesh = init_device_mesh("cpu", (size,))
        x = distribute_tensor(whole, torch_mesh, [Shard(1)]).requires_grad_()
        y = RMSNorm(8, mesh=DeviceMesh.from_torch(torch_mesh), input=Shard(1))(x)
        y += 1
        y.sum().backward()
        wide = whole.double().requires_grad_()
        torch.nn.functional.rms_norm(wide, (8,), eps=1e-6).add(1).sum().backward()
        assert_beside(x.grad.full_tensor(), wide.grad.float())

    run_ranks(2, run)


# tensors that a collective still fills


def arriving(mesh: object, whole: Tensor) -> DTensor:
    """Rows of ``whole`` as a DTensor that holds an AsyncCollectiveTensor."""
    summand = whole / 2  # exact, of two ranks
    x = DTensor.from_local(summand, mesh, [Partial()]).redistribute(mesh, [Shard(0)], async_op=True)
    assert isinstance(x._local_tensor, AsyncCollectiveTensor)
    return x


def test_fusions_wait_for_tensors_that_a_collective_still_fills() -> None:
    whole = numbers(4, 8)

    def run(rank: int, size: int) -> None:
        torch_mesh = init_device_mesh("cpu", (size,))
        expected = normalised_by_torch(whole)
        fd = normalised()
        (y,) = fd.execute([arriving(torch_mesh, whole)])
        assert_beside(y.full_tensor(), expected)
        plain = normalised()
        rows = expected.chunk(size)[rank]
        for run_plain in (plain.execute, plain.fec.execute, compat_definition().execute):
            for _ in range(2):  # made, and found
                (z,) = run_plain([arriving(torch_mesh, whole).to_local()])
                assert type(z) is Tensor
                assert_beside(z, rows)
        plain.timeline([arriving(torch_mesh, whole).to_local()])
        moved = redistribute(
            arriving(torch_mesh, whole).to_local(), DeviceMesh.from_torch(torch_mesh), Shard(0), Replicate()
        )
        torch.testing.assert_close(moved, whole, rtol=0, atol=0)

    run_ranks(2, run)


@pytest.mark.parametrize("rows", [4, 3], ids=["even", "uneven"])
def test_modules_wait_for_tensors_that_a_collective_still_fills(rows: int) -> None:
    whole = numbers(rows, 8)

    def run(rank: int, size: int) -> None:
        torch_mesh = init_device_mesh("cpu", (size,))
        module = RMSNorm(8, mesh=DeviceMesh.from_torch(torch_mesh), input=Shard(0))
        summand = DTensor.from_local(whole / 2, torch_mesh, [Partial()], run_check=False).requires_grad_()
        x = summand.redistribute(torch_mesh, [Shard(0)], async_op=True)
        assert isinstance(x._local_tensor, AsyncCollectiveTensor)
        y = module(x).redistribute(torch_mesh, [Replicate()], async_op=True)
        wide = whole.double().requires_grad_()
        expected = torch.nn.functional.rms_norm(wide, (8,), eps=module.eps)
        assert_beside(y.to_local().detach() + 0, expected.float().detach())
        y.to_local().pow(3).sum().backward()  # of squares it would be 0 but for eps
        expected.pow(3).sum().backward()
        assert_beside(summand.grad.full_tensor(), wide.grad.float())

    run_ranks(2, run)


# other tensors


class Tagged(Tensor):
    """A subclass that adds nothing to the data."""


def test_a_subclass_without_data_of_its_own_is_taken_as_the_tensor_that_it_is() -> None:
    x = numbers(4, 8)
    (y,) = normalised().execute([x.as_subclass(Tagged)])
    assert type(y) is Tensor
    assert_beside(y, normalised_by_torch(x))


def test_tensors_without_plain_data_are_refused_in_one_sentence() -> None:
    x = numbers(4, 8)
    fake_mode = torch._subclasses.FakeTensorMode()
    fd, numpy_fd = normalised(), normalised()
    fd.execute([x])  # what was made for a plain tensor is not run on another one
    cases = [
        (fake_mode.from_tensor(x), InputError, r"input 0, T0, .*a FakeTensor"),
        (x.to("meta"), DefinitionError, r"input 0, T0 on meta"),
        (x.to_sparse(), InputError, r"input 0, T0, .*torch\.sparse_coo.*to_dense"),
        (x.to_sparse_csr(), InputError, r"input 0, T0, .*torch\.sparse_csr"),
        (torch.nested.nested_tensor([x, x[:2]]), InputError, r"input 0, T0, .*nested"),
        (torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), InputError, r"input 0, T0, .*NestedTensor"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), InputError, r"input 0, T0, .*qint8"),
        (torch.nn.parameter.UninitializedParameter(), InputError, r"input 0, T0, .*initialise the lazy module"),
        (x.numpy(), InputError, r"input 0, T0, .*ndarray.*torch\.from_numpy"),
        (x.tolist(), InputError, r"input 0, T0, .*list"),
        (None, InputError, r"input 0, T0, .*None"),
    ]
    for given, kind, said in cases:
        for definition in (fd, numpy_fd):
            with torch.no_grad(), pytest.raises(kind, match=said) as raised:
                definition.execute([given])
            sentence = str(raised.value).partition("\n  at ")[0]  # below it stand the lines that made the input
            assert "\n" not in sentence
            assert len(sentence) < 400
    assert_beside(fd.execute([x])[0], normalised_by_torch(x))


def test_transforms_of_functions_are_refused() -> None:
    x, fd = numbers(4, 8), normalised()
    fd.execute([x])
    with pytest.raises(InputError, match=r"torch\.func"):
        torch.func.grad(lambda t: fd.execute([t])[0].sum())(x)
    with pytest.raises(InputError, match=r"torch\.func"):
        torch.func.vmap(lambda t: fd.execute([t])[0])(x[None])
    with pytest.raises(InputError, match=r"torch\.func"):
        torch.func.jvp(lambda t: fd.execute([t])[0], (x,), (x,))


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_what_a_transform_has_not_made_is_a_constant_of_it(transform: str) -> None:
    """As for torch's own ops: of a batch of data, say, where parameters are differentiated."""
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.exp(fd.define_tensor([-1])))
    x, w = torch.linspace(-1, 1, 4), torch.tensor([2.0, 3.0])
    softmax = Softmax()

    def scaled(w: torch.Tensor) -> torch.Tensor:
        return (fd.execute([x])[0] * softmax(x)).sum() * w

    factor = (x.double().exp() * x.double().softmax(0)).sum()
    for _ in range(2):  # the second time by what was bound
        if transform == "grad":
            found, expected = torch.func.grad(lambda w: scaled(w).sum())(w), factor.expand(2)
        elif transform == "jvp":
            found, expected = torch.func.jvp(scaled, (w,), (w,))[1], factor * w
        else:
            found, expected = torch.func.vmap(scaled)(w), factor * w
        assert_near(found, expected, n=4)
    spans = []
    torch.func.grad(lambda w: (spans.extend(fd.timeline([x]).spans), w.sum())[1])(w)
    assert [span.name for span in spans] == [span.name for span in fd.timeline([x]).spans]


@pytest.mark.parametrize("number", [1.5, float("inf")])
def test_a_script_has_pythons_own_numbers_for_those_of_numpy(number: float) -> None:
    """``execute`` takes both, and what NumPy prints needs an import that a script does not have."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        factor, power = (fd.define_scalar(dtype=dtype) for dtype in (DataType.Double, DataType.Int))
        fd.add_output(fd.ops.mul(fd.ops.mul(x, factor), power))
    given = [numbers(3), np.float64(number), np.int64(2)]
    fd.execute(given, save_repro_inputs=True)
    expected = fd.repro_script_for([given[0], number, 2])
    assert fd.repro_script_for(given) == fd.last_repro_script() == expected


def test_results_carry_no_tangent() -> None:
    x, fd = numbers(4, 8), normalised()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.warns(NoGradientsWarning, match="has a tangent"):
            (y,) = fd.execute([dual])
        assert torch.autograd.forward_ad.unpack_dual(y).tangent is None


def test_a_dtensor_at_the_executor_is_refused() -> None:
    def run(rank: int, size: int) -> None:
        x = distribute_tensor(numbers(4, 8), init_device_mesh("cpu", (size,)), [Shard(0)])
        with pytest.raises(InputError, match=r"a DTensor.*FusionDefinition"):
            normalised().fec.execute([x])

    run_ranks(2, run)


def test_what_is_made_in_inference_mode_is_run_outside_of_it() -> None:
    whole = numbers(4, 8)

    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        x, fd = mesh.shard_tensor(whole, 1), normalised(mesh)
        with torch.inference_mode():
            fd.execute([x])
        (y,) = fd.execute([x])
        y += 1
        assert_beside(y, mesh.shard_tensor(normalised_by_torch(whole), 1) + 1)

    run_ranks(2, run)


def test_an_input_of_inference_mode_is_taken() -> None:
    with torch.inference_mode():
        x = numbers(4, 8)
    (y,) = normalised().execute([x])
    y += 1
    assert_beside(y, normalised_by_torch(x) + 1)


def test_a_scalar_says_what_it_was_given() -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1]), fd.define_scalar(dtype=DataType.Double)
        fd.add_output(fd.ops.mul(x, s))
    with pytest.raises(InputError, match=r"input 1, S0, .*Double scalar.*Tensor"):
        fd.execute([numbers(3), torch.tensor(2.0)])
    with pytest.raises(InputError, match=r"input 1, S0, .*NoneType"):
        fd.execute([numbers(3), None])


def test_torch_compile_calls_fusions_as_they_are() -> None:
    x, fd, module = numbers(4, 8), normalised(), RMSNorm(8)

    def model(t: Tensor) -> Tensor:
        (y,) = fd.execute([t * 2])
        return module(t) + y

    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        traced.append(graph.code)
        return graph.forward

    leaf = x.clone().requires_grad_()
    with pytest.warns(NoGradientsWarning):
        y = torch.compile(model, backend=backend)(leaf)
    wide = x.double().requires_grad_()
    expected = torch.nn.functional.rms_norm(wide, (8,), eps=module.eps) + normalised_by_torch(x * 2)
    assert_beside(y, expected.float())
    y.pow(3).sum().backward()  # of squares it would be 0 but for eps
    expected.pow(3).sum().backward()
    assert_beside(leaf.grad, wide.grad.float())
    assert not any("empty_strided" in text for text in traced), traced
    assert sum(text.count("rsqrt(") for text in traced) == 1, "torch's ops stand for the module alone"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda fd, x: fd.ops.pad(x, widths=[1, 1]), r"pad: widths is \[1, 1\].*names x, pad_widths, value"),
        (lambda fd, x: fd.ops.pad(x), "pad: pad_widths is missing"),
        (lambda fd, x: fd.ops.sum(x, [0], False, DataType.Float, 3), "sum: argument 5 is 3.*no more than x, dims"),
        (lambda fd, x: fd.ops.pad(x, [1, 1], x=x), "pad: x is .*each argument once"),
    ],
)
def test_arguments_that_an_op_does_not_have(call: Callable[..., object], message: str) -> None:
    """Not Python's error, which names a class that nobody calls."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 5])
        with pytest.raises(OperandError, match=message):
            call(fd, x)


def test_kernels_without_a_gpu() -> None:
    with FusionDefinition(backend="triton") as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([4, 5])))
    with pytest.raises(NoKernelsError, match=r"tensors on 'cpu'.*TRITON_INTERPRET=1.*leave backend out"):
        fd.execute([torch.ones(4, 5)])
