"""What is no tensor, module or dtype that modules and functions of shardfuse.nn take is one error that names it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfuse import DeviceMesh, ShardfuseError, nn
from shardfuse.errors import ArgumentError, ModuleArgumentError, ModuleInputError, PlacementError, TransformError
from shardfuse.nn import functional, quantized

X, TARGET = torch.ones(3, 6), torch.zeros(3, dtype=torch.int64)
ARRAY = np.ones((3, 6), np.float32)
SPARSE, NESTED = X.to_sparse(), torch.nested.nested_tensor([torch.ones(3, 6), torch.ones(2, 6)])
CALLS: dict[str, Callable[[], object]] = {
    "RMSNorm: x has type NoneType, expected a torch.Tensor": lambda: nn.RMSNorm(6)(None),
    "RMSNorm: x has type list, ": lambda: nn.RMSNorm(6)([1.0]),
    "RMSNorm: x has type numpy.ndarray, ": lambda: nn.RMSNorm(6)(ARRAY),
    "LayerNorm: x has type NoneType": lambda: nn.LayerNorm(6)(None),
    "AddRMSNorm: residual has type int": lambda: nn.AddRMSNorm(6)(X, 3),
    "GroupNorm: x has type NoneType": lambda: nn.GroupNorm(2, 6)(None),
    "BatchNorm1d: x has type NoneType": lambda: nn.BatchNorm1d(6)(None),
    "Softmax: x has type NoneType": lambda: nn.Softmax()(None),
    "Softmax: mask has type bool, expected a torch.Tensor or None": lambda: nn.Softmax()(X, True),
    "GELU: x has type NoneType": lambda: nn.GELU()(None),
    "SwiGLU: up has type int": lambda: nn.SwiGLU()(X, 3),
    "RotaryEmbedding: ": lambda: nn.RotaryEmbedding(8)(None),
    "CrossEntropyLoss: target has type NoneType": lambda: nn.CrossEntropyLoss()(X, None),
    "cross_entropy: target has type int": lambda: functional.cross_entropy(X, 1),
    "rms_norm: input has type NoneType": lambda: functional.rms_norm(None, (6,)),
    "rms_norm: weight has type numpy.ndarray": lambda: functional.rms_norm(X, (6,), ARRAY[0]),
    "layer_norm: input has type str": lambda: functional.layer_norm("x", (6,)),
    "layer_norm: weight has type float": lambda: functional.layer_norm(X, (6,), 1.0),
    "add_rms_norm: residual has type int": lambda: functional.add_rms_norm(X, 3, (6,)),
    "group_norm: input has type NoneType": lambda: functional.group_norm(None, 2),
    "group_norm: weight has type numpy.ndarray": lambda: functional.group_norm(X, 2, ARRAY[0]),
    "batch_norm: input has type numpy.ndarray": lambda: functional.batch_norm(ARRAY, None, None, training=True),
    "batch_norm: running_mean has type int": lambda: functional.batch_norm(X, 1, X[0]),
    "rms_norm: input has type int": lambda: quantized.rms_norm(3, (6,)),
    "swiglu: gate has type NoneType": lambda: quantized.swiglu(None),
    "geglu: up has type int": lambda: quantized.geglu(X, 2),
    "quantize: input has type NoneType": lambda: quantized.quantize(None),
    "gelu: input has type NoneType, expected a torch.Tensor": lambda: functional.gelu(None),
    "quantize: scales has its elements on meta": lambda: quantized.quantize(X, scales=torch.ones(1, device="meta")),
    "rms_norm: weight has its elements on meta": lambda: quantized.rms_norm(X, (6,), X[0].to("meta")),
    "quantize: input has layout torch.sparse_coo, expected torch.strided: ": lambda: quantized.quantize(SPARSE),
    "swiglu: gate has elements of a nested tensor": lambda: quantized.swiglu(NESTED, NESTED),
    "rms_norm: input has layout torch.sparse_coo": lambda: functional.rms_norm(SPARSE, (6,)),
    "layer_norm: weight has layout torch.sparse_coo": lambda: functional.layer_norm(X, (6,), SPARSE[0]),
    "group_norm: input has layout torch.sparse_coo": lambda: functional.group_norm(SPARSE, 2),
    "cross_entropy: input has layout torch.sparse_coo": lambda: functional.cross_entropy(SPARSE, TARGET),
    "RMSNorm: x has layout torch.sparse_coo": lambda: nn.RMSNorm(6)(SPARSE),
    "LayerNorm: x has elements of a nested tensor": lambda: nn.LayerNorm(6)(NESTED),
}


OPTIONS: dict[str, Callable[[], object]] = {
    "rms_norm(eps='1'): expected a number or None": lambda: quantized.rms_norm(X, (6,), eps="1"),
    "add_rms_norm(eps=-1.0): expected 0 or more": lambda: quantized.add_rms_norm(X, X, (6,), eps=-1.0),
    "layer_norm(eps=nan): expected 0 or more": lambda: quantized.layer_norm(X, (6,), eps=float("nan")),
    "layer_norm(eps=None): expected a number": lambda: quantized.layer_norm(X, (6,), eps=None),
    "quantize(scales=array([1., 1., 1., 1., 1., 1.], dtype=float32)): ": lambda: quantized.quantize(X, scales=ARRAY[0]),
    "rms_norm(normalized_shape='6'): expected a list": lambda: quantized.rms_norm(X, "6"),
    'GatedMLP(activation=\'relu\'): expected "silu", "gelu" or "gelu_tanh"': lambda: gated_mlp(activation="relu"),
    'GatedMLP(activation=None): expected "silu"': lambda: gated_mlp(activation=None),
    "GatedMLP(gate_proj=None): expected a Module": lambda: gated_mlp(gate_proj=None),
    "GatedMLP(up_proj=1): ": lambda: gated_mlp(up_proj=1),
    "GatedMLP(down_proj=": lambda: gated_mlp(down_proj=torch.nn.functional.relu),
    "CrossEntropyLoss(reduction='avg'): expected \"mean\", ": lambda: assigned(nn.CrossEntropyLoss(), reduction="avg"),
    "GroupNorm(activation='relu'): expected \"silu\" or None": lambda: assigned(nn.GroupNorm(2, 6), activation="relu"),
}


def gated_mlp(**changed: object) -> nn.GatedMLP:
    layers = {f"{name}_proj": torch.nn.Linear(4, 4) for name in ("gate", "up", "down")}
    return nn.GatedMLP(**{**layers, **changed})


def assigned(module: torch.nn.Module, **settings: object) -> torch.nn.Module:
    for name, value in settings.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("sentence", OPTIONS)
def test_options(sentence: str) -> None:
    with pytest.raises(ModuleArgumentError) as refused:
        OPTIONS[sentence]()
    assert str(refused.value).startswith(sentence)


SETTINGS: dict[str, Callable[[], tuple[torch.nn.Module, str, object]]] = {
    "DropoutAddNorm(p=2.0): expected a probability from 0 to 1": lambda: (nn.DropoutAddNorm(6), "p", 2.0),
    "DropoutAddNorm(p=-0.5): expected a probability from 0 to 1": lambda: (nn.DropoutAddNorm(6), "p", -0.5),
    "DropoutAddNorm(p=None): expected a number": lambda: (nn.DropoutAddNorm(6).eval(), "p", None),
    "DropoutAddNorm(norm='x'): ": lambda: (nn.DropoutAddNorm(6), "norm", "x"),
    "LayerNorm(eps=-1.0): expected 0 or more": lambda: (nn.LayerNorm(6), "eps", -1.0),
    "RMSNorm(eps=nan): expected 0 or more": lambda: (nn.RMSNorm(6), "eps", float("nan")),
    "GroupNorm(num_channels=6): expected a multiple of 4": lambda: (nn.GroupNorm(2, 6), "num_groups", 4),
    "CrossEntropyLoss(reduction='avg'): ": lambda: (nn.CrossEntropyLoss(), "reduction", "avg"),
    "CrossEntropyLoss(reduction=None): ": lambda: (nn.CrossEntropyLoss(), "reduction", None),
    "CrossEntropyLoss(label_smoothing=2.0): ": lambda: (nn.CrossEntropyLoss(), "label_smoothing", 2.0),
    "LogProb(temperature=0.0): ": lambda: (nn.LogProb(), "temperature", 0.0),
    "Softmax(dim=None): ": lambda: (nn.Softmax(), "dim", None),
    "BatchNorm2d(momentum=7): expected None, or a number from 0 to 1": lambda: (nn.BatchNorm2d(6), "momentum", 7),
    "BatchNorm1d(momentum='x'): ": lambda: (nn.BatchNorm1d(6), "momentum", "x"),
}


@pytest.mark.parametrize("sentence", SETTINGS)
def test_a_setting_that_no_module_is_made_with_is_refused(sentence: str) -> None:
    module, name, value = SETTINGS[sentence]()
    before = getattr(module, name)
    with pytest.raises(ModuleArgumentError) as refused:
        setattr(module, name, value)
    assert str(refused.value).startswith(sentence)
    assert getattr(module, name) == before


def test_a_placement_in_words_is_shown_as_such() -> None:
    mesh = DeviceMesh([0])
    for given in ("Shard(0)", ["Shard(0)"]):
        with pytest.raises(PlacementError, match=r"^input='Shard\(0\)' does not fit a placement: "):
            nn.RMSNorm(6, mesh=mesh, input=given)


def test_torchs_mesh_is_named_as_torchs() -> None:
    """Its class has the name of the one that is taken."""

    def run(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (size,))
        gives = r"a shardfuse\.DeviceMesh \(shardfuse\.DeviceMesh\.from_torch\(mesh\) gives it\)"
        for call, sentence in (
            (lambda: nn.LayerNorm(6, mesh=mesh, input=Shard(-1)), rf"LayerNorm\(mesh=torch's .*: expected {gives} or"),
            (lambda: assigned(nn.GELU(), mesh=mesh), rf"GELU\(mesh=torch's DeviceMesh\(.*: expected {gives} or None"),
            (lambda: nn.redistribute(X, mesh, Shard(0), Shard(1)), rf"redistribute\(mesh=torch's .*: expected {gives}"),
        ):
            with pytest.raises(ModuleArgumentError, match=sentence):
                call()
        assert nn.LayerNorm(6, mesh=DeviceMesh.from_torch(mesh), input=Shard(-1)).mesh == DeviceMesh(range(size))

    run_ranks(2, run)


W, TABLE, INDEX = torch.ones(4, 6), torch.ones(5, 2), torch.tensor([0, 3])
LEFT_TO_TORCH: dict[str, Callable[[], object]] = {
    "linear: input has shape (3, 6), expected [..., 5], as weight has (4, 5)": lambda: functional.linear(X, W[:, :5]),
    "linear: input has shape (), expected [..., 6], as ": lambda: functional.linear(X[0, 0], W),
    "linear: input has shape (3, 6), expected [..., 1], as weight has (4, 1)": lambda: nn.Linear(1, 4)(X),
    "linear: weight has shape (1, 4, 6), expected [out_features, in_features]": lambda: functional.linear(X, W[None]),
    "linear: bias has shape (6,), expected (4,), as weight has (4, 6)": lambda: functional.linear(X, W, X[0]),
    "linear: bias has shape (1, 1, 4), expected (4,), ": lambda: functional.linear(X.bfloat16(), W, W[None, :1, :4]),
    "linear: weight has dtype torch.float32, expected torch.int64": lambda: functional.linear(X.long(), W),
    "linear: input has shape (3, 6), expected [..., 5], ": lambda: functional.linear(X.bfloat16(), W[:, :5]),
    "embedding: weight has shape (2,), expected [rows, width]": lambda: functional.embedding(INDEX, TABLE[0]),
    "embedding: input has dtype torch.float32, expected torch.int64 or torch.int32": lambda: functional.embedding(X, W),
    "embedding: index input holds 7, expected 0 to 4: ": lambda: functional.embedding(INDEX + 4, TABLE),
    "embedding: index input holds -1, expected 0 to 4": lambda: functional.embedding(INDEX - 1, TABLE, torch.bfloat16),
    "embedding(padding_idx=5): expected None, or -5 to 4": lambda: functional.embedding(INDEX, TABLE, padding_idx=5),
}


@pytest.mark.parametrize("sentence", LEFT_TO_TORCH)
def test_what_torch_refuses(sentence: str) -> None:
    """Whatever torch has allocated for the call is free again."""
    with pytest.raises(ShardfuseError) as refused:
        LEFT_TO_TORCH[sentence]()
    assert str(refused.value).startswith(sentence)
    assert refused.value.__cause__ is None


def test_what_torch_takes() -> None:
    linear = torch.nn.functional.linear
    for given in ((X, W[0]), (X[0], W), (X, W, W[:3, :4]), (X, W, W[0, 0]), (X, W, W[:1, 0])):
        assert torch.equal(functional.linear(*given), linear(*given))
    with pytest.raises(RuntimeError, match="not implemented for 'Bool'"):
        functional.linear(X.bool(), W.bool())


@pytest.mark.parametrize("sentence", CALLS)
def test_what_is_no_tensor(sentence: str) -> None:
    with pytest.raises(ModuleInputError) as refused:
        CALLS[sentence]()
    assert str(refused.value).startswith(sentence)
    assert refused.value.__cause__ is None


def test_other_errors_stay_what_they_are() -> None:
    """Those of hooks, and of calls that nothing but Python refuses."""
    norm = nn.RMSNorm(6)
    norm.register_forward_hook(lambda *_: [][0])
    with pytest.raises(IndexError):
        norm(X)
    with pytest.raises(TypeError, match="takes 2 positional arguments"):
        nn.RMSNorm(6)(X, X)
    with pytest.raises(ModuleInputError, match="6 along dim -1"):
        nn.RMSNorm(6)(X.T)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_of_parameters(dtype: torch.dtype) -> None:
    for make in (
        lambda: nn.RMSNorm(6, dtype=dtype),
        lambda: nn.LayerNorm(6, dtype=dtype),
        lambda: nn.GroupNorm(2, 6, dtype=dtype),
        lambda: nn.BatchNorm1d(6, affine=False, dtype=dtype),
    ):
        with pytest.raises(
            ModuleArgumentError, match=rf"Norm.*\(dtype={dtype}\): expected None, or one of torch.float64"
        ):
            make()


def test_models_and_shapes() -> None:
    for call, sentence in (
        (lambda: nn.convert("x"), "convert: model is 'x', expected a torch.nn.Module"),
        (lambda: nn.promise(None, invariant="batch"), "promise: model is None, "),
        (lambda: nn.bucket_gradients([nn.RMSNorm(6)]), "bucket_gradients: model is "),
        (lambda: functional.rms_norm(X, 6), "rms_norm: normalized_shape is 6, expected a list of sizes"),
    ):
        with pytest.raises(ArgumentError) as refused:
            call()
        assert str(refused.value).startswith(sentence)


def test_under_torch_compile() -> None:
    """The same sentence, whatever torch.compile makes of the error."""
    with pytest.raises(Exception, match=r"x has type NoneType, expected a torch\.Tensor") as refused:
        torch.compile(nn.RMSNorm(6), backend="eager")(None)
    assert isinstance(refused.value, ShardfuseError) or "ModuleInputError" in str(refused.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: functional.gelu(None),
        lambda: functional.softmax(X, "rows"),
        lambda: functional.softmax(X, 2),
        lambda: functional.log_softmax(X, scale="1"),
        lambda: functional.rms_norm(X, (5,)),
        lambda: functional.rms_norm(X, 6),
        lambda: functional.layer_norm(X, (6,), weight=[1.0] * 6),
        lambda: functional.cross_entropy(X, 1),
        lambda: functional.swiglu(X, up=3),
        lambda: functional.batch_norm(X, None, None),
        lambda: functional.batch_norm(X, X[0], None, training=True),
    ],
    ids=[
        "gelu",
        "softmax",
        "no dim",
        "scale",
        "rms_norm",
        "sizes",
        "weight",
        "cross_entropy",
        "swiglu",
        "batch_norm",
        "one statistic",
    ],
)
def test_functions_under_torch_compile(call: Callable[[], object]) -> None:
    """A compiled call of a function ends by the error of one that is not compiled."""
    torch._dynamo.reset()
    with pytest.raises(ShardfuseError) as wanted:
        call()
    with pytest.raises(type(wanted.value)) as refused:
        torch.compile(call, backend="eager")()
    assert str(refused.value) == str(wanted.value)


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_one_running_statistic_without_the_other_is_refused(name: str) -> None:
    """In training too, where the one that is given would stay what it was."""
    given = {"running_mean": torch.zeros(6), "running_var": torch.zeros(6), name: None}
    with pytest.raises(ModuleArgumentError, match=rf"batch_norm\({name}=None\): expected a tensor, as the other"):
        functional.batch_norm(X, **given, training=True)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize(
    "make", [lambda: nn.RMSNorm(6), nn.GELU, nn.Softmax, nn.SwiGLU], ids=["norm", "gelu", "softmax", "swiglu"]
)
def test_a_trace_is_refused(make: Callable[[], torch.nn.Module]) -> None:
    """Also where the module has run before; it keeps no result of the trace."""
    module = make()
    before = module(X)
    with pytest.raises(TransformError, match=r"does not run inside of torch\.jit\.trace"):
        torch.jit.trace(module, X)
    assert torch.equal(module(X), before)


OF_VECTORS: dict[str, Callable[[], torch.nn.Module]] = {
    "RMSNorm": lambda: nn.RMSNorm(6),
    "LayerNorm": lambda: nn.LayerNorm(6),
    "AddRMSNorm": lambda: nn.AddRMSNorm(6),
    "DropoutAddNorm": lambda: nn.DropoutAddNorm(6, input_bias=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
    "BatchNorm1d, eval()": lambda: nn.BatchNorm1d(6).eval(),
    "SwiGLU": lambda: nn.SwiGLU(6, bias=True),
}
OF_TWO = ("AddRMSNorm", "DropoutAddNorm", "SwiGLU")


@pytest.mark.parametrize("name", OF_VECTORS)
def test_a_vector_of_another_size_in_a_parameters_place_is_named(name: str) -> None:
    """And nothing is written: of two running statistics that fit, and one that does not, none is."""
    given = (X, X) if name in OF_TWO else (X,)
    fresh = OF_VECTORS[name]()
    vectors = [n for n, t in (*fresh.named_parameters(), *fresh.named_buffers()) if t.ndim]
    assert vectors
    for vector in vectors:
        for size in ((5,), (1,), (6, 1)):
            module = OF_VECTORS[name]()
            value = torch.zeros(size)
            setattr(module, vector, torch.nn.Parameter(value) if vector in module._parameters else value)
            before = {n: t.clone() for n, t in module.state_dict().items()}
            with pytest.raises(ModuleInputError) as refused:
                module(*given)
            assert str(refused.value).startswith(f"{name.partition(',')[0]}: {vector} has shape {size}, expected (6,)")
            assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_biases_of_two_dtypes_are_refused() -> None:
    module = nn.SwiGLU(6, bias=True)
    module.up_bias = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
    with pytest.raises(ModuleInputError, match=r"SwiGLU: up_bias has dtype torch\.bfloat16, expected"):
        module(X, X)


def test_packed_halves_of_another_size_are_refused() -> None:
    with pytest.raises(ModuleInputError, match=r"SwiGLU: gate has shape \(3, 8\), expected 12 along dim -1"):
        nn.SwiGLU(6, bias=True)(torch.ones(3, 8))
    with pytest.raises(ModuleInputError, match=r"SwiGLU: gate has shape \(3, 8\), expected 12 along dim -1"):
        nn.SwiGLU(6)(torch.ones(3, 8))
