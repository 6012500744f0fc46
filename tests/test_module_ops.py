"""The modules of shardfuse.nn as ops of torch.library: one each way of a compiled graph, made again from its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch._functorch.config
from dtensor_cases import distribute, make_mesh, numbers
from functorch.compile import make_boxed_func
from module_ways import Trial, run
from ranks import run_ranks
from test_module_ways import SHAPE, TARGET, normal
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.autograd import forward_ad
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional

from shardfuse import DeviceMesh, FusionDefinition, nn
from shardfuse.errors import CompiledElsewhereError, ModuleInputError, SecondDerivativeError, TransformError
from shardfuse.nn import AddRMSNorm, CrossEntropyLoss, FusionTimer, Redistribution, RMSNorm, SwiGLU, library
from shardfuse.nn.settings import parsed

MESH = DeviceMesh([0])
SHARDED = {
    "rms_norm": (RMSNorm(32, mesh=MESH, input=Shard(1)), [SHAPE, (32,)]),
    "add_rms_norm": (
        AddRMSNorm(32, bias=True, mesh=MESH, input=Partial(), residual=Shard(1), output=Replicate()),
        [SHAPE, (32,), (32,), SHAPE],
    ),
    "swiglu": (SwiGLU(32, bias=True, mesh=MESH, input=Shard(-1)), [SHAPE, SHAPE, (32,), (32,)]),
    "cross_entropy": (CrossEntropyLoss(mesh=MESH, logits=Shard(-1), reduction="none"), [SHAPE]),
    "redistribute": (Redistribution(MESH, Replicate(), Shard(1), Replicate(), "bfloat16"), [SHAPE]),
    "layer_norm": (nn.LayerNorm((3, 32), mesh=MESH, input=Shard(0)), [(4, 96), (96,), (96,)]),
    "dropout_add_norm": (
        nn.DropoutAddNorm(32, mesh=MESH, input=Partial(), residual=Shard(1), norm="rms").eval(),
        [SHAPE, (32,), SHAPE],
    ),
    "group_norm": (nn.GroupNorm(4, 8, mesh=MESH, input=Shard(2)), [(3, 8, 2, 5), (8,), (8,)]),
    "batch_norm": (nn.BatchNorm1d(3, mesh=MESH, input=Shard(0)), [SHAPE, (3,), (3,)]),
    "log_softmax": (nn.LogSoftmax(mesh=MESH, input=Shard(-1)), [SHAPE]),
    "gelu": (nn.GELU(mesh=MESH, input=Shard(1)), [SHAPE]),
    "geglu": (nn.GeGLU(mesh=MESH, input=Shard(0)), [(4, 3, 2, 16)]),
    "rotary": (nn.RotaryEmbedding(8, mesh=MESH, input=Shard(2)), [(2, 4, 5, 8), (2, 2, 5, 8)]),
    "log_prob": (nn.LogProb(mesh=MESH, logits=Shard(-1), entropy=True), [SHAPE]),
}


@pytest.mark.parametrize("name", SHARDED)
def test_opcheck(name: str) -> None:
    module, shapes = SHARDED[name]
    tensors = [normal(*shape, seed=k).requires_grad_() for k, shape in enumerate(shapes)]
    if name in ("cross_entropy", "log_prob"):
        tensors.append(TARGET[..., None])
    if name == "rotary":
        tensors += [normal(1, 1, 5, 4, seed=k) for k in (2, 3)]
    torch.library.opcheck(module.library_op, (tensors, module.text, None))
    if name in ("rms_norm", "add_rms_norm", "swiglu", "cross_entropy", "redistribute"):
        torch.library.opcheck(module.library_op, (tensors, module.text, list(SHAPE)))


def on_mesh() -> dict[str, tuple[torch.nn.Module, tuple[int, ...], int]]:
    """Modules on a mesh of one rank, the shape of their arguments, and how many there are."""
    last, rows, image = {"mesh": MESH, "input": Shard(-1)}, {"mesh": MESH, "input": Shard(1)}, (3, 8, 2, 5)
    added = {"mesh": MESH, "input": Partial(), "residual": Shard(1), "output": Replicate()}
    return {
        "RMSNorm": (nn.RMSNorm(32, elementwise_affine=False, **last), SHAPE, 1),
        "RMSNorm, zero-centered": (nn.RMSNorm(32, zero_centered=True, **rows), SHAPE, 1),
        "LayerNorm": (nn.LayerNorm((3, 32), mesh=MESH, input=Shard(0)), SHAPE, 1),
        "AddLayerNorm": (nn.AddLayerNorm(32, input_bias=True, **added), SHAPE, 2),
        "DropoutAddNorm": (nn.DropoutAddNorm(32, p=0.2, **added), SHAPE, 2),
        "GroupNorm": (nn.GroupNorm(4, 8, activation="silu", mesh=MESH, input=Shard(2)), image, 1),
        "BatchNorm2d": (nn.BatchNorm2d(8, mesh=MESH, input=Shard(0)), image, 1),
        "BatchNorm2d, eval": (nn.BatchNorm2d(8, mesh=MESH, input=Shard(0)).eval(), image, 1),
        "Softmax": (nn.Softmax(scale=0.5, **last), SHAPE, 1),
        "LogSoftmax": (nn.LogSoftmax(1, **rows), SHAPE, 1),
        "GELU": (nn.GELU(**last), SHAPE, 1),
        "GeGLU": (nn.GeGLU("tanh", **last), SHAPE, 2),
        "SwiGLU, packed": (nn.SwiGLU(16, bias=True, mesh=MESH, input=Shard(0)), SHAPE, 1),
        "RotaryEmbedding": (nn.RotaryEmbedding(8, mesh=MESH, input=Shard(2)), (2, 4, 5, 8), 2),
        "LogProb": (nn.LogProb(entropy=True, temperature=0.7, mesh=MESH, logits=Shard(-1)), SHAPE, 1),
        "CrossEntropyLoss": (nn.CrossEntropyLoss(z_loss=0.1, temperature=2.0, mesh=MESH, logits=Shard(-1)), SHAPE, 1),
    }


@pytest.mark.parametrize("name", on_mesh())
def test_compiled_on_a_mesh(name: str) -> None:
    """The same bits as without a compiler, random numbers too; images may have their channels last."""
    module, shape, count = on_mesh()[name]
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_(normal(*p.shape, seed=10 + k))
    arguments = [normal(*shape, seed=k) for k in range(count)]
    target = [TARGET] if name in ("LogProb", "CrossEntropyLoss") else []
    torch._dynamo.reset()
    call = torch.compile(module, fullgraph=True, backend="aot_eager")
    for layout in (torch.contiguous_format, torch.channels_last) if len(shape) == 4 else (torch.contiguous_format,):
        given = [t.to(memory_format=layout) for t in arguments]
        with torch.no_grad():
            results = module(*given, *target)
        shapes = [t.shape for t in (results if isinstance(results, tuple) else (results,))]
        trial = Trial(module, [*given, *target], [normal(*s, seed=20 + k) for k, s in enumerate(shapes)])
        found = []
        for run_by in (None, call):
            torch.manual_seed(7)
            found.append(run(trial, run_by))
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("is_promised", [False, True])
def test_compiled_softmax_of_a_mask_with_a_gradient(is_promised: bool) -> None:
    module = nn.Softmax(scale=0.5) if is_promised else nn.Softmax(scale=0.5, mesh=MESH, input=Shard(0))
    if is_promised:
        module.promise(accumulate="float32")
    torch._dynamo.reset()
    trial = Trial(module, [normal(4, 8, seed=0), normal(8, seed=1)], [normal(4, 8, seed=2)])
    call = torch.compile(module, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(run(trial, call), run(trial), strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_dropout_on_plain_tensors() -> None:
    """Its numbers are torch's generator's: a seed repeats them; what is dropped has no gradient."""
    torch._dynamo.reset()
    module = nn.DropoutAddNorm(64, p=0.25)
    call = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, residual = normal(32, 64, seed=0).requires_grad_(), normal(32, 64, seed=1)
    seen = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        normed, total = call(x, residual)
        (gradient,) = torch.autograd.grad(total.sum(), x)
        is_kept = gradient != 0
        check = torch.where(is_kept, x.detach() / 0.75, 0.0)
        assert torch.allclose(total - residual, check, atol=1e-6)
        assert torch.allclose(normed, functional.layer_norm(total, (64,)), atol=1e-5)
        assert torch.allclose(gradient[is_kept], torch.tensor(1 / 0.75))
        seen.append(is_kept)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert 0.7 < seen[0].float().mean() < 0.8
    module.eval()
    assert torch.equal(call(x, residual)[1], residual + x)
    module.train()
    assert not torch.equal(call(x, residual)[1], residual + x)


def test_dropout_is_switched_off_and_on() -> None:
    """Without a compiler and as an op: by train() and eval() alone."""
    module = nn.DropoutAddNorm(64, p=0.25, mesh=MESH)
    x, residual = normal(32, 64, seed=0), normal(32, 64, seed=1)
    torch._dynamo.reset()
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        for is_training in (True, False, True):
            module.train(is_training)
            assert torch.equal(call(x, residual)[1], residual + x) is not is_training


def test_a_rotary_embedding_reads_views_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = normal(2, 6, 3, 4, 16, seed=0).permute(2, 0, 3, 1, 4)
    assert not q.is_contiguous()
    read: list[int] = []
    execute = FusionDefinition.execute

    def seen(fusion: FusionDefinition, tensors: list[torch.Tensor], **options: object) -> list[torch.Tensor]:
        read.extend(t.data_ptr() for t in tensors[:2])
        return execute(fusion, tensors, **options)

    monkeypatch.setattr(FusionDefinition, "execute", seen)
    nn.RotaryEmbedding(16)(q, k)
    assert read == [q.data_ptr(), k.data_ptr()]


@pytest.mark.parametrize("name", SHARDED)
def test_a_text_makes_the_module_again(name: str) -> None:
    module = SHARDED[name][0]
    arguments, rank = parsed(module.text)
    assert rank == 0
    assert type(module).made_again(arguments).text == module.text


def test_an_op_of_another_rank_is_refused() -> None:
    module, _ = SHARDED["rms_norm"]
    text = module.text.replace('"rank":0', '"rank":1')
    with pytest.raises(CompiledElsewhereError, match="rms_norm_v1 was compiled for rank 1 and called on rank 0"):
        module.library_op([normal(*SHAPE, seed=0), module.weight], text, None)


def test_an_op_is_not_differentiated_twice() -> None:
    module, _ = SHARDED["rms_norm"]
    x = normal(*SHAPE, seed=0).requires_grad_()
    result = module.library_op([x, module.weight], module.text, None)[0]
    (first,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="rms_norm_v1 has no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.ones(2, 9), "'x', 'shape (2, 9)', '8 along dim -1'"),
        (torch.ones(2, 8, dtype=torch.int32), "'x', 'dtype torch.int32', 'one of torch.float64"),
        (None, "'the first argument', 'type NoneType', 'a torch.Tensor'"),
    ],
    ids=["size", "dtype", "type"],
)
def test_a_bad_call_says_in_a_whole_graph_what_is_wrong(x: torch.Tensor | None, why: str) -> None:
    torch._dynamo.reset()  # sizes that changed before are symbols
    told = "ModuleInputError(" if torch.__version__.startswith("2.11") else f"ModuleInputError('RMSNorm', {why}"
    with pytest.raises(Unsupported, match=re.escape(told)):
        torch.compile(RMSNorm(8), backend="eager", fullgraph=True)(x)
    with pytest.raises(ModuleInputError, match="RMSNorm: x has"):
        torch.compile(RMSNorm(8), backend="eager")(x)


def test_a_compiled_graph_holds_one_op_each_way() -> None:
    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(
            [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "shardfuse" in str(n.target)]
        )
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    module, _ = SHARDED["add_rms_norm"]
    x, residual = (normal(*SHAPE, seed=k).requires_grad_() for k in range(2))
    timer = FusionTimer().watch(module)
    normed, total = torch.compile(module, fullgraph=True, backend=backend)(x, residual)
    (normed.sum() + total.sum()).backward()
    assert graphs == [["shardfuse.add_rms_norm_v1.default"], ["shardfuse.add_rms_norm_backward_v1.default"]]
    assert timer.seconds() > 0
    module.timer = None


def test_a_cached_graph_makes_its_module_again() -> None:
    """The op is found by its arguments alone: what this process knew of the module is forgotten in between."""
    module, _ = SHARDED["rms_norm"]
    x = normal(*SHAPE, seed=0).requires_grad_()
    hits = []
    caches = (
        torch._functorch.config.patch(enable_autograd_cache=True),
        torch._inductor.config.patch(fx_graph_cache=True),
    )
    with fresh_cache(), caches[0], caches[1]:
        for _ in range(2):
            torch._dynamo.reset()
            library._module.cache_clear()
            counters.clear()
            result = torch.compile(module, fullgraph=True)(x)
            result.sum().backward()
            assert torch.equal(result, module(x))
            hits.append([counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "bypass")])
    assert hits == [[0, 0], [1, 0]]


MODULES = {
    "norm": lambda x: nn.RMSNorm(8, device=x.device)(x),
    "sum": lambda x: nn.AddLayerNorm(8, device=x.device)(x, x)[1],
    "dropout": lambda x: nn.DropoutAddNorm(8, device=x.device)(x, x)[0],
    "groups": lambda x: nn.GroupNorm(2, 4, device=x.device)(x),
    "batch": lambda x: nn.BatchNorm1d(4, device=x.device)(x),
    "softmax": lambda x: nn.Softmax()(x, x > 0),
    "gate": lambda x: nn.SwiGLU()(x, x),
    "rotary": lambda x: nn.RotaryEmbedding(8)(x[:, :, None])[:, :, 0],
    "loss": lambda x: nn.CrossEntropyLoss(reduction="none")(
        x, torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    ),
    "function": lambda x: nn.functional.layer_norm(x, (8,)),
    "groups, a function": lambda x: nn.functional.group_norm(x, 2),
    "batch, a function": lambda x: nn.functional.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_on_the_meta_device(name: str) -> None:
    """Shapes, strides and dtypes of results and gradients, without data."""
    found = []
    for device in ("cpu", "meta"):
        x = torch.zeros(2, 4, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
        result = MODULES[name](x)
        result.float().sum().backward()
        found.append([(t.shape, t.stride(), t.dtype) for t in (result, x.grad)])
        assert result.device.type == x.grad.device.type == device
    assert found[0] == found[1]


def test_batched_gradients_and_transforms_are_refused_by_name() -> None:
    x = torch.randn(3, 4, 8, requires_grad=True)
    for call in (MODULES["norm"], MODULES["softmax"], MODULES["function"]):
        y = call(x)
        with pytest.raises(TransformError, match=r"shardfuse.nn does not run inside of .*is_grads_batched"):
            torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True, retain_graph=True)
        torch.autograd.grad(y, x, torch.ones_like(y))
        for transformed in (torch.func.grad(lambda x, call=call: call(x).sum()), torch.func.jacrev(call)):
            with pytest.raises(TransformError, match=r"shardfuse.nn does not run inside of torch.func"):
                transformed(x.detach())
        with forward_ad.dual_level():
            for primal in (x, x.detach()):
                with pytest.raises(TransformError, match=r"shardfuse.nn does not run inside of .*forward_ad"):
                    call(forward_ad.make_dual(primal, torch.ones_like(x)))
            assert torch.equal(call(x), y)


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], object]] = {
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}
OF_DTENSORS: dict[str, tuple[Callable[[DeviceMesh], torch.nn.Module], Sequence[int]]] = {
    "LayerNorm": (lambda m: nn.LayerNorm(8, mesh=m, input=Shard(-1)), (2, 4)),
    "RMSNorm": (lambda m: nn.RMSNorm(7, mesh=m, input=Shard(-1)), (2, 4)),  # of pieces that differ in size
    "GroupNorm": (lambda m: nn.GroupNorm(2, 8, mesh=m, input=Shard(1)), (2, 4)),
    "BatchNorm1d": (lambda m: nn.BatchNorm1d(8, mesh=m, input=Shard(0)), (3, 8)),
    "AddRMSNorm": (lambda m: nn.AddRMSNorm(8, mesh=m, input=Shard(0), residual=Shard(0)), (3, 8)),
}


@pytest.mark.parametrize("name", OF_DTENSORS)
def test_transforms_are_refused_by_name_where_parameters_are_dtensors(name: str) -> None:
    """And where the input is one, which torch's own error was about too."""
    make, shape = OF_DTENSORS[name]

    def refuse(rank: int, size: int) -> None:
        module = make(DeviceMesh(range(size)))
        x = numbers(shape if name != "RMSNorm" or rank == 0 else (2, 3), rank)

        def call(t: torch.Tensor) -> torch.Tensor:
            if name == "AddRMSNorm":
                return module(t, torch.zeros_like(t))[0]
            return module(t, unsharded=(2, 7)) if name == "RMSNorm" else module(t)

        for has_run in (False, True):
            for transformed in TRANSFORMS.values():
                with pytest.raises(TransformError, match=r"shardfuse\.nn does not run inside of torch\.func"):
                    transformed(call, x)
            if not has_run:
                call(x)

    run_ranks(2, refuse)


def test_a_dtensor_in_a_transform_is_refused_by_name() -> None:
    def refuse(rank: int, size: int) -> None:
        mesh = make_mesh([size])
        frozen = nn.LayerNorm(7, mesh=DeviceMesh.from_torch(mesh), input=Shard(-1)).requires_grad_(requires_grad=False)
        x = distribute(numbers((2, 7), 0), mesh, [Shard(1)])
        with pytest.raises(TransformError, match=r"shardfuse\.nn does not run inside of torch\.func"):
            torch.func.grad(lambda t: t.sum() * frozen(x).to_local().sum())(torch.ones(3))

    run_ranks(2, refuse)


@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 5), (8, 4, 3, 2)], ids=str)
def test_a_batch_norm_in_training_is_exported_for_batches_of_any_size(shape: Sequence[int]) -> None:
    """As torch's; the variance that it keeps is that of the batch which the program is called with."""
    name = ("BatchNorm1d", "BatchNorm2d")[len(shape) == 4]
    module, theirs = getattr(nn, name)(4), getattr(torch.nn, name)(4)
    sizes = ({0: torch.export.Dim("b", min=2, max=64)},)
    program = torch.export.export(module, (torch.randn(shape),), dynamic_shapes=sizes).module()
    for rows in (8, 3):
        x = torch.randn(rows, *shape[1:])
        torch.testing.assert_close(program(x), theirs(x))
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(program.state_dict()[key], tensor)
