"""Bad calls of every op and every public constructor: one error in one sentence, never a fault inside of shardfuse.

Each argument of a call that is right is replaced by each of many that are mostly wrong; what the definition takes is
run.  An error is shardfuse's own, or Python's where a call does not fit the signature.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfuse
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, Scalar, ShardfuseError, TensorView
from shardfuse.compat import nvfuser_direct
from shardfuse.errors import ModuleArgumentError, ModuleInputError
from shardfuse.nn import AddRMSNorm, BatchNorm1d, CrossEntropyLoss, LinearCrossEntropyLoss, RMSNorm, SwiGLU, functional
from shardfuse.ops.build import Ops
from shardfuse.ops.table import POINTWISE

PACKAGE = Path(shardfuse.__file__).parent
INPUTS: dict[str, tuple[list[int], torch.dtype]] = {
    "x": ([4, 6], torch.float32),
    "y": ([6, 4], torch.float32),
    "index": ([4], torch.int64),
    "table": ([4, 6], torch.int64),
    "flag": ([4, 6], torch.bool),
    "complex": ([4, 6], torch.complex64),
    "double": ([3], torch.float64),
    "single": ([], torch.float32),
    "empty": ([0, 6], torch.float32),
    "cube": ([2, 4, 6], torch.float32),
    "heads": ([2, 2, 4, 8], torch.float32),
}
"""Inputs of every fusion: some are right for an op, the others are wrong in rank, size or type."""

RIGHT: dict[str, Any] = {
    **dict.fromkeys(("x", "a", "b", "input", "gate"), "x"),
    **dict.fromkeys(("query", "key", "value", "grad_output", "output"), "heads"),
    "dims": [0],
    "dim": 0,
    "dim0": 0,
    "dim1": 1,
    "keepdim": True,
    "dtype": DataType.Float,
    "shape": [4, 6],
    "index": "index",
    "tensors": ["x", "x"],
    "is_broadcast_dim": [True, False, False],
    "broadcast_dims": [0, 1],
    "length": 4,
    "fill_value": 1.5,
    "p": 0.5,
    "weight": "x",
    "new_shape": [6, 4],
    "pad_widths": [1, 1],
    "start_indices": [0, 0],
    "end_indices": [2, 2],
    "stride_order": [0, 1],
    "k": 2,
    "src": "x",
    "correction": 1,
    "minval": 0.0,
    "maxval": 1.0,
    "mean": 0.0,
    "std": 1.0,
    "min": 0.0,
    "max": 1.0,
    "diagonal": 1,
    "dropout_p": 0.0,
    "is_causal": False,
    "philox_seed": "single",
    "philox_offset": "single",
    "logsumexp": "cube",
}
"""An argument by its name; a text is an input."""
OWN: dict[str, dict[str, Any]] = {
    "matmul": {"b": "y"},
    "gather": {"index": "table"},
    "take_along_axis": {"index": "table"},
    "scatter": {"index": "table"},
    "select": {"index": 1},
    "permute": {"dims": [1, 0]},
    "squeeze": {"dims": 0},
    "embedding": {"weight": "x"},
    "index_put_accumulate": {"value": "x"},
    "addcmul": {"value": 2.0},
    "pad": {"value": 0.0},
}
"""Arguments of single ops."""
FLAWS: tuple[Any, ...] = (
    *(None, True, -7, -1, 0, 1, 2, 99, 2**40, 2**70, -(2**63) - 1),
    *(1.5, -0.0, float("nan"), float("inf"), 2j, "x!", b"x", object, {}, {1: 2}, {0, 1}, range(2)),
    *(
        [],
        [0],
        [-1],
        [0, 0],
        [1, 0],
        [5],
        [-7],
        [2**70],
        [1.5],
        [None],
        ["a"],
        [[0]],
        [True],
        [0, 1, 2],
        (1, -1),
        [-1, -1],
    ),
    *(DataType.Half, DataType.Bool, DataType.ComplexFloat, DataType.Int, DataType.Float8_e4m3fn, torch.float32),
    *(torch.ones(2), ParallelType.mesh_x, int, len),
)
TENSORS = tuple(INPUTS)


class Call:
    """One definition: an op on inputs by name."""

    def __init__(self) -> None:
        self.fd = FusionDefinition(backend="torch")
        self.inputs: dict[str, TensorView] = {}

    def value(self, argument: Any) -> Any:
        if isinstance(argument, str) and argument in INPUTS:
            if argument not in self.inputs:
                shape, dtype = INPUTS[argument]
                self.inputs[argument] = self.fd.define_tensor(shape, dtype=DataType.from_torch(dtype))
            return self.inputs[argument]
        if isinstance(argument, str) and argument == "scalar":
            return self.fd.define_scalar(dtype=DataType.Double)
        return [self.value(v) for v in argument] if isinstance(argument, list) else argument

    def run(self, op: str, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        out = getattr(self.fd.ops, op)(*map(self.value, arguments), **{k: self.value(v) for k, v in named.items()})
        tensors = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, TensorView)]
        if not tensors:
            return
        for t in tensors:
            self.fd.add_output(t)
        if all(0 <= n < 10**4 for t in tensors for n in t.shape):
            used = [i.val for i in self.fd.fusion.inputs]
            values = [3.0 if isinstance(v, Scalar) else _tensor(v) for v in used]
            self.fd.execute(values)


def _tensor(tv: TensorView) -> torch.Tensor:
    return torch.zeros([n if n >= 0 else 4 for n in tv.shape]).to(tv.dtype.torch)


def complaint(call: Callable[[], object]) -> str | None:
    """What is wrong with how ``call`` ends; ``None`` where it succeeds, or fails as it should."""
    try:
        call()
    except ShardfuseError as error:
        sentence = str(error).partition("\n  at ")[0]
        is_one = 20 < len(sentence) < 600 and "\n" not in sentence and not getattr(error, "__notes__", None)
        return None if is_one else f"{type(error).__name__}: {error}"
    except TypeError as error:
        files = [Path(f.filename) for f in traceback.extract_tb(error.__traceback__)]
        own = [f for f in files if f.is_relative_to(PACKAGE) and f != PACKAGE / "arguments.py"]
        is_signature = "argument" in str(error) and not own
        is_nvfusers = re.fullmatch("define_tensor: sizes are .*, expected integers of 64 bits", str(error)) is not None
        return None if is_signature or is_nvfusers else _fault(error)
    except RuntimeError as error:  # what torch alone can know: integers over 0, and how much memory there is
        is_torchs = str(error) == "ZeroDivisionError" or "can't allocate memory" in str(error)
        return None if is_torchs else _fault(error)
    except Exception as error:  # noqa: BLE001 - what else there is, is what is looked for
        return _fault(error)
    return None


def _fault(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {str(error)[:150]}"


def calls_of(op: str) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """The right call, and each argument replaced by each flaw; too few, too many and unknown ones."""
    names = list(inspect.signature(getattr(Ops, op)).parameters.values())[1:]
    right = {p.name: OWN.get(op, {}).get(p.name, RIGHT.get(p.name)) for p in names if p.default is p.empty}
    right |= OWN.get(op, {})
    yield "the right call", [], dict(right)
    yield "no arguments", [], {}
    yield "too many", [*right.values(), *[1] * (len(names) + 1 - len(right))], {}
    yield "an unknown one", [], {**right, "nonsense": 1}
    for p in names:
        for flaw in (*FLAWS, *TENSORS, "scalar"):
            yield f"{p.name}={flaw!r}", [], {**right, p.name: flaw}


OPS = [name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("op", OPS)
def test_bad_calls_of_ops(op: str) -> None:
    complaints = []
    for name, arguments, named in calls_of(op):
        found = complaint(lambda args=arguments, named=named: Call().run(op, args, named))
        complaints += [f"{op}({name}): {found}"] if found else []
    assert not complaints, "\n".join(complaints)


def test_bad_calls_of_pointwise_ops() -> None:
    complaints = []
    for op, entry in POINTWISE.items():
        cases: list[list[Any]] = [["x"] * n for n in range(entry.arity + 2)]
        cases += [[flaw, *["x"] * (entry.arity - 1)] for flaw in (*FLAWS, *TENSORS, "scalar")]
        cases += [
            ["table", *[flaw] * (entry.arity - 1)] for flaw in (True, 2, 1.5, 2j, 2**70, "flag", "complex", "scalar")
        ]
        cases += [["flag"] * entry.arity, ["complex"] * entry.arity, ["scalar"] * entry.arity, ["table"] * entry.arity]
        for case in cases:
            found = complaint(lambda op=op, case=case: Call().run(op, case, {}))
            complaints += [f"{op}({', '.join(map(repr, case))}): {found}"] if found else []
    assert not complaints, "\n".join(complaints)


def methods() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public constructors and methods of a definition, with a right call of each."""

    def on_tensor(name: str) -> Callable[..., Any]:
        return lambda **named: getattr(FusionDefinition().define_tensor([4, 6]), name)(**named)

    def on_definition(name: str) -> Callable[..., Any]:
        return lambda **named: getattr(FusionDefinition(), name)(**named)

    def run(**named: Any) -> Any:
        with FusionDefinition(backend="torch") as fd:
            x, s = fd.define_tensor([-1, 6]), fd.define_scalar(dtype=DataType.Int)
            fd.add_output(fd.ops.add(fd.ops.mul(x, s), fd.define_tensor([-1])))
        return fd.execute(**named)

    def output(**named: Any) -> Any:
        fd = FusionDefinition()
        x = fd.define_tensor([4, 6])
        named = {k: x if v == "x" else v for k, v in named.items()}
        fd.add_output(**{"tv": fd.ops.neg(x), **named})

    def parallelize(**named: Any) -> None:
        FusionDefinition().define_tensor([4, 6]).axis(0).parallelize(**named)

    x = torch.ones(2, 6)
    mesh = DeviceMesh([0])
    return {
        "define_tensor": (
            on_definition("define_tensor"),
            {"shape": [4, 6], "contiguity": True, "dtype": DataType.Float, "stride_order": [1, 0], "is_cpu": False},
        ),
        "define_tensor like": (
            on_definition("define_tensor"), {"sizes": [4, 6], "strides": [6, 1], "static_sizes": True},
        ),
        "from_pytorch": (on_definition("from_pytorch"), {"tensor": x, "static_sizes": False}),
        "define_vector": (on_definition("define_vector"), {"size": 2}),
        "define_scalar": (on_definition("define_scalar"), {"value": 2.0, "dtype": DataType.Double}),
        "add_output": (output, {"alias_input": None, "stride_order": [1, 0]}),
        "add_output of": (output, {"tv": "x"}),
        "execute": (run, {"inputs": [x, 2, x[0]], "sizes": None, "device": None}),
        "execute one": (lambda first: run(inputs=[first, 2, x[0]]), {"first": x}),
        "execute a number": (lambda second: run(inputs=[x, second, x[0]]), {"second": 2}),
        "FusionDefinition": (FusionDefinition, {"backend": "torch"}),
        "DeviceMesh": (DeviceMesh, {"ranks": [[0, 1], [2, 3]], "dim_names": ("a", "b")}),
        "shard_tensor": (lambda tensor, axis: mesh.shard_tensor(tensor, axis), {"tensor": x, "axis": 0}),
        "axis": (on_tensor("axis"), {"index": 0}),
        "parallelize": (parallelize, {"parallel_type": ParallelType.mesh_x}),
        "split": (on_tensor("split"), {"axis": 0, "factor": 2, "inner_split": True}),
        "outer_split": (on_tensor("outer_split"), {"axis": 0, "factor": 2}),
        "merge": (on_tensor("merge"), {"outer": 0, "inner": 1}),
        "reorder": (on_tensor("reorder"), {"moves": {0: 1}}),
        "swizzle1d": (on_tensor("swizzle1d"), {"axis": 0, "parallel_type": ParallelType.mesh_x}),
        "set_device_mesh": (on_tensor("set_device_mesh"), {"mesh": mesh}),
        "set_allocation_domain": (on_tensor("set_allocation_domain"), {"axes": [], "contiguity": True}),
        "RMSNorm": (RMSNorm, {"hidden_size": 8, "eps": 1e-5, "mesh": None, "input": None, "output": None}),
        "AddRMSNorm": (AddRMSNorm, {"hidden_size": 8, "eps": 1e-5, "mesh": mesh, "residual": None}),
        "SwiGLU": (SwiGLU, {"bias": True, "features": 8, "mesh": mesh, "input": None}),
        "CrossEntropyLoss": (
            CrossEntropyLoss,
            {"reduction": "mean", "label_smoothing": 0.1, "ignore_index": -100, "mesh": mesh, "logits": None},
        ),
        "simulate": (lambda world_size: shardfuse.simulate(len, world_size, args=("a",)), {"world_size": 1}),
        "nvfuser define_tensor": (
            lambda **named: nvfuser_define(lambda fd: fd.define_tensor(**named)), {"shape": [4, 6], "contiguity": True},
        ),
    }  # fmt: skip


def nvfuser_define(write: Callable[[Any], object]) -> None:
    fd = nvfuser_direct.FusionDefinition()
    with fd:
        write(fd)


@pytest.mark.parametrize("name", methods())
def test_bad_calls_of_constructors_and_methods(name: str) -> None:
    function, right = methods()[name]
    assert complaint(lambda: function(**right)) is None
    complaints = []
    for argument in right:
        for flaw in FLAWS:
            if name == "simulate" and type(flaw) is int and flaw > 9:
                continue  # it would start as many threads
            found = complaint(lambda argument=argument, flaw=flaw: function(**{**right, argument: flaw}))
            complaints += [f"{name}({argument}={flaw!r}): {found}"] if found else []
    assert not complaints, "\n".join(complaints)


def rows(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


PARAMETERS: dict[str, Any] = {"normalized_shape": (4,), "weight": rows(4), "bias": rows(4), "eps": 1e-5}
RMS = {name: value for name, value in PARAMETERS.items() if name != "bias"}
LOSS: dict[str, Any] = {
    "label_smoothing": 0.1,
    "z_loss": 0.1,
    "temperature": 1.0,
    "reduction": "mean",
    "ignore_index": -1,
}
TARGET = torch.tensor([1, 2, 0])
HEADS = rows(2, 2, 3, 4)
FUNCTIONS: dict[str, dict[str, Any]] = {
    "rms_norm": {"input": rows(3, 4), **RMS},
    "layer_norm": {"input": rows(3, 4), **PARAMETERS},
    "add_rms_norm": {"input": rows(3, 4), "residual": rows(3, 4), **RMS},
    "add_layer_norm": {"input": rows(3, 4), "residual": rows(3, 4), **PARAMETERS},
    "dropout_add_norm": {
        "input": rows(3, 4), "residual": rows(3, 4), **PARAMETERS, "p": 0.1, "training": True, "norm": "layer",
        "input_bias": rows(4),
    },
    "group_norm": {
        "input": rows(3, 4, 2), "num_groups": 2, "weight": rows(4), "bias": rows(4), "eps": 1e-5, "activation": "silu",
    },
    "batch_norm": {
        "input": rows(3, 4, 2), "running_mean": rows(4), "running_var": rows(4), "weight": rows(4), "bias": rows(4),
        "training": False, "momentum": 0.1, "eps": 1e-5,
    },
    "softmax": {"input": rows(3, 4), "dim": -1, "dtype": torch.float64, "scale": 2.0, "mask": rows(3, 4)},
    "log_softmax": {"input": rows(3, 4), "dim": -1, "dtype": None, "scale": 2.0, "mask": None},
    "gelu": {"input": rows(3, 4), "approximate": "tanh"},
    "geglu": {"gate": rows(3, 4), "up": rows(3, 4), "approximate": "none"},
    "swiglu": {"gate": rows(3, 4), "up": rows(3, 4)},
    "rotary_embedding": {
        "query": HEADS, "key": HEADS, "cos": rows(3, 2), "sin": rows(3, 2), "interleaved": False, "heads_dim": 1,
    },
    "cross_entropy": {"input": rows(3, 4), "target": TARGET, **LOSS, "weight": None, "reduce": None},
    "log_prob": {"input": rows(3, 4), "target": TARGET, "temperature": 1.0, "ignore_index": -100},
    "linear_cross_entropy": {
        "input": rows(3, 4), "weight": rows(5, 4), "target": TARGET, "bias": rows(5), "chunk_rows": 2, **LOSS,
    },
}  # fmt: skip
"""A right call of each function; linear and embedding are torch's, whose errors are theirs."""
TENSOR_FLAWS = (
    rows(3, 5), rows(2, 2, 3, 4).to(torch.int64), rows(3, 4).to(torch.complex64), rows(3, 4) > 0, rows(3, 4).to("meta"),
    rows(3, 4).numpy(), rows(1)[0], rows(4).double(), rows(4).to(torch.float8_e4m3fn), [rows(3, 4)],
)  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bad_calls_of_functions(name: str) -> None:
    function, right = getattr(functional, name), FUNCTIONS[name]
    assert complaint(lambda: function(**right)) is None
    complaints = []
    for argument in right:
        for flaw in (*FLAWS, *TENSOR_FLAWS):
            found = complaint(lambda argument=argument, flaw=flaw: function(**{**right, argument: flaw}))
            complaints += [f"{name}({argument}={flaw!r}): {found}"] if found else []
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("argument", ["weight", "size_average", "reduce"])
def test_options_of_torchs_losses_are_refused_by_name(argument: str) -> None:
    """None is taken, as a caller of torch's may hand it over."""
    value: Any = rows(4) if argument == "weight" else True
    for call in (
        lambda **named: CrossEntropyLoss(**named)(rows(3, 4), TARGET),
        lambda **named: functional.cross_entropy(rows(3, 4), TARGET, **named),
    ):
        call(**{argument: None})
        with pytest.raises(ModuleArgumentError, match=rf"\({argument}=.*\): expected None"):
            call(**{argument: value})


def test_tensors_on_several_devices_are_named() -> None:
    meta = rows(3, 4).to("meta")
    for call, named in (
        (lambda: functional.add_rms_norm(rows(3, 4), meta, (4,)), "add_rms_norm: residual has its elements on meta"),
        (lambda: functional.softmax(rows(3, 4), mask=meta), "^softmax: mask has its elements on meta"),
        (lambda: AddRMSNorm(4)(rows(3, 4), meta), "AddRMSNorm: residual has its elements on meta"),
        (lambda: SwiGLU()(rows(3, 4), meta), "SwiGLU: up has its elements on meta"),
        (
            lambda: AddRMSNorm(4).to("meta")(rows(3, 4), rows(3, 4)),
            "weight has its elements on meta, .* move the module",
        ),
        (lambda: BatchNorm1d(4).to("meta")(rows(3, 4)), "BatchNorm1d: weight has its elements on meta, expected cpu"),
    ):
        with pytest.raises(ModuleInputError, match=named):
            call()
    with pytest.raises(ModuleInputError, match="LinearCrossEntropyLoss: x has type NoneType"):
        LinearCrossEntropyLoss()(None, rows(5, 4), TARGET)
