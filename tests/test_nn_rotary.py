"""RotaryEmbedding, plain and sharded, against torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from dtensor_cases import distribute, make_mesh
from module_cases import FLOATS, NARROW, ONE, check_module, each_rank
from nn_cases import S0, S1, S2, Here, Placements, R
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import Placement, Shard
from torch_answers import assert_beside
from torch_gradients import leaf

from shardfuse import DataType, DeviceMesh
from shardfuse.errors import ModuleArgumentError, ModuleInputError, PlacementError
from shardfuse.nn import RotaryEmbedding
from shardfuse.nn.placement import TensorPlacement
from shardfuse.nn.rotary_fusions import RotarySpec, rotary_op

SHAPE = (2, 4, 6, 16)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As models are written: cos and sin broadcast to x's first features, half as many."""
    rotary = 2 * cos.shape[-1]
    x, rest = x[..., :rotary], x[..., rotary:]
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        both = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = x.chunk(2, -1)
        both = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((both, rest), -1)


def check(
    here: Here,
    at: Placements,
    dtype: torch.dtype = torch.float64,
    *,
    shape: Sequence[int] = SHAPE,
    key_heads: int | None = 2,
    heads_dim: int = 1,
    positions: Tensor | None = None,
    tables: int = 0,
    **options: object,
) -> None:
    """``tables``: how often each angle is in cosines and sines that are handed over; 0 where none are."""
    module = RotaryEmbedding(shape[-1], heads_dim=heads_dim, mesh=here.mesh, input=at, **options)
    activations = {"query": here.sample(at, shape, dtype, 1)}
    if key_heads is not None:
        sizes = [*shape]
        sizes[heads_dim] = key_heads
        activations["key"] = here.sample(at, sizes, dtype, 2)
    length = shape[3 - heads_dim]
    table_dtype = torch.float64 if dtype == torch.float64 and not tables else torch.float32
    places = torch.arange(length, device=here.device) if positions is None else positions
    cos, sin = module.tables(places, table_dtype)
    given = {} if positions is None else {"positions": positions}
    if tables:
        layout = (lambda t: t.repeat_interleave(2, -1)) if module.interleaved else (lambda t: torch.cat((t, t), -1))
        given = {"cos": cos, "sin": sin} if tables == 1 else {"cos": layout(cos), "sin": layout(sin)}
    call = partial(module, **given, **({"unsharded": tuple(shape)} if here.mesh.size > 1 else {}))
    dims = (1, *cos.shape) if cos.ndim == 2 else cos.shape
    wide = [t.view(dims).unsqueeze(heads_dim) for t in (cos, sin)]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        c, s = (t.to(torch.promote_types(tensors[0].dtype, torch.float32)) for t in wide)
        return tuple(turned(x.to(c.dtype), c, s, module.interleaved).to(x.dtype) for x in tensors)

    upstream = [here.sample(at, t.full.shape, dtype, 5 + k) for k, t in enumerate(activations.values())]
    check_module(module, function, activations, {}, upstream, dtype, call=call)


PLAIN = {
    "halves": {},
    "interleaved": {"interleaved": True},
    "partial": {"rotary_dim": 6},
    "partial_interleaved": {"rotary_dim": 6, "interleaved": True},
    "sequence_first": {"shape": (2, 6, 4, 16), "heads_dim": 2},
    "no_key": {"key_heads": None},
    "positions": {"positions": torch.tensor([5, 1, 0, 7, 100_000, 3])},
    "positions_of_each_row": {"positions": torch.randint(99, (2, 6), generator=torch.Generator().manual_seed(0))},
    "tables": {"tables": 1},
    "tables_with_each_angle_twice": {"tables": 2},
    "interleaved_tables_with_each_angle_twice": {"tables": 2, "interleaved": True},
    "another_base": {"base": 500_000.0},
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str) -> None:
    for dtype in FLOATS:
        check(ONE, [R], dtype, **PLAIN[name])


@pytest.mark.parametrize("packed", [None, (2, 1)])
def test_angles_of_float64_are_computed_in_float64(packed: tuple[int, int] | None) -> None:
    """float32's angle at position 100,000 is off by thousandths."""
    places = torch.tensor([0, 3, 100_000, 5])
    angles = places.double()[:, None] * 10_000.0 ** -(torch.arange(0, 8, 2).double() / 8)
    module, x = RotaryEmbedding(8, packed=packed), leaf(torch.randn(1, 4, 4, 8, dtype=torch.float64))
    by_head = x if packed is None else x.transpose(1, 2)  # what is packed has the sequence before the heads
    wanted = turned(by_head, angles.cos(), angles.sin(), False)
    if packed is None:
        found = module(x, positions=places)
    else:
        query, key, _ = module(x.flatten(2), positions=places)
        found, wanted = torch.cat((query, key), 1), wanted[:, :3]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    upstream = torch.randn(found.shape, dtype=torch.float64)
    own, right = (torch.autograd.grad(t, x, upstream)[0] for t in (found, wanted))
    torch.testing.assert_close(own, right, rtol=0, atol=1e-10)
    again = module.tables(places, torch.float64)
    torch.testing.assert_close(again, (angles.cos(), angles.sin()), rtol=0, atol=1e-10)
    assert module.tables(places)[0].dtype == torch.float32
    with pytest.raises(ModuleInputError, match=r"dtype .*torch\.float16, expected torch\.float32 or torch\.float64"):
        module.tables(places, torch.float16)


def test_on_ranks() -> None:
    cases = {
        "batch": partial(check, at=[S0]),
        "heads": partial(check, at=[S1]),
        "sequence": partial(check, at=[S2], interleaved=True),
        "sequence_first": partial(check, at=[S1], shape=(2, 6, 4, 16), heads_dim=2),
        "uneven_sequence": partial(check, at=[S2], shape=(2, 4, 5, 16)),
        "uneven_batch": partial(check, at=[S0], shape=(3, 4, 5, 16), rotary_dim=8),
        "replicated": partial(check, at=[R]),
        **{f"heads_{dtype}": partial(check, at=[S1], dtype=dtype) for dtype in NARROW},
    }
    each_rank([2], cases)
    each_rank([2, 2], {"batch_and_sequence": partial(check, at=[S0, S2]), "heads": partial(check, at=[S1, R])})


def test_ranks_with_one_position_or_sample_beside_others() -> None:
    """Cosines and sines of one row are that rank's own, not those of every row."""

    def check_uneven(here: Here, batch: int, sequence: int, dim: int, table_batch: int) -> None:
        module = RotaryEmbedding(4, mesh=here.mesh, input=Shard(dim))
        query = here.sample([R], (batch, 2, sequence, 4), torch.float64, 1).full
        positions = torch.arange(table_batch * sequence).view(table_batch, sequence) % 7
        wanted = RotaryEmbedding(4)(query, positions=positions)
        own = positions
        if dim == 2:
            own = here.mesh.shard_tensor(positions, 1)
        elif table_batch > 1:
            own = here.mesh.shard_tensor(positions, 0)
        cut = here.mesh.shard_tensor(query, dim)
        for named in ({"positions": own}, dict(zip(("cos", "sin"), module.tables(own, query.dtype), strict=True))):
            found = module(cut, **named, unsharded=query.shape)
            assert_beside(found, here.mesh.shard_tensor(wanted, dim))

    shapes = ((2, 3, 2, 1), (2, 3, 2, 2), (2, 1, 2, 1), (3, 2, 0, 1), (3, 2, 0, 3), (1, 2, 0, 1), (5, 3, 0, 1))
    each_rank(
        [2],
        {
            str(sizes): partial(check_uneven, batch=sizes[0], sequence=sizes[1], dim=sizes[2], table_batch=sizes[3])
            for sizes in shapes
        },
    )


def test_views_of_one_projection_are_read_where_they_are() -> None:
    projected = leaf(torch.randn(2, 6, 3, 4, 16))
    expected = leaf(projected)
    module = RotaryEmbedding(16)
    results = []
    for given in (projected, expected):
        q, k, v = given.permute(2, 0, 3, 1, 4)
        if given is expected:
            cos, sin = module.tables(torch.arange(6))
            q, k = turned(q, cos, sin, False), turned(k, cos, sin, False)
        else:
            q, k = module(q, k)
        sum((n * t.square()).sum() for n, t in enumerate((q, k, v), 1)).backward()
        results.append((q, k))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(projected.grad, expected.grad)


def test_one_kernel_for_each_tensor_and_no_copies() -> None:
    spec = RotarySpec(
        ndim=4, heads=(4, 2), heads_dim=1, head_dim=16, rotary_dim=16, interleaved=False, table=(1, 1, -1, 8),
        mesh=None, placement=TensorPlacement(), dtype=DataType.Float, table_dtype=DataType.Float,
    )  # fmt: skip
    op = rotary_op(spec)
    q, k, _ = torch.randn(2, 6, 3, 4, 16, requires_grad=True).permute(2, 0, 3, 1, 4)
    out = op.apply(None, None, q, k[:, :2], *(torch.randn(1, 1, 6, 8) for _ in range(2)))
    sum(t.sum() for t in out).backward()
    for fusion, bytes_moved in ((op.forward, 2), (op.backward, 2)):
        assert fusion.explain().kernels == bytes_moved


def test_bad_arguments() -> None:
    for arguments in ({"head_dim": 1}, {"head_dim": 8, "rotary_dim": 3}, {"head_dim": 8, "rotary_dim": 10},
                      {"head_dim": 8, "base": 0.0}, {"head_dim": 8, "heads_dim": 0}):  # fmt: skip
        with pytest.raises(ModuleArgumentError, match=rf"RotaryEmbedding\({[*arguments][-1]}="):
            RotaryEmbedding(**arguments)
    with pytest.raises(PlacementError, match="no mesh"):
        RotaryEmbedding(8, input=S0)


def test_bad_inputs() -> None:
    module, q = RotaryEmbedding(8), torch.ones(2, 3, 5, 8)
    cos = torch.ones(5, 4)
    for call, named in (
        (lambda: module(q[0]), "query has 3 dims"),
        (lambda: module(q[..., :4]), "query has shape"),
        (lambda: module(q, q[:1]), "key has shape"),
        (lambda: module(q, q.double()), "key has dtype"),
        (lambda: module(q.int()), "query has dtype"),
        (lambda: module(q, q, cos), "cos or sin alone"),
        (lambda: module(q, q, cos, cos, positions=torch.arange(5)), "not both"),
        (lambda: module(q, q, cos[:4], cos[:4]), "cos has shape"),
        (lambda: module(q, q, cos, torch.ones(5, 3)), "sin has shape"),
        (lambda: module(q, positions=torch.arange(4)), r"positions has shape \[4\], expected \["),
        (lambda: module(q, positions=torch.zeros(7, q.shape[1])), r"positions has shape \[7, "),
        (lambda: module(q, positions=torch.zeros(1, 1, 1)), r"positions has shape \[1, 1, 1\]"),
        (lambda: module(q, positions=torch.arange(5) + 0j), "positions has dtype torch.complex64"),
        (lambda: module.tables([0, 1, 2, 3, 4]), "positions has type list"),
    ):
        with pytest.raises(ModuleInputError, match=named):
            call()
    with pytest.raises(PlacementError, match="pairs of features"):
        RotaryEmbedding(8, mesh=DeviceMesh([0]), input=[torch.distributed.tensor.Shard(3)])(q)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("packed", "options"),
    [
        ((4, 4), {}),
        ((4, 2), {"interleaved": True}),
        ((3, 1), {"rotary_dim": 8}),
        ((4, 2), {"batch_first": False}),
    ],
)
@pytest.mark.parametrize("positions", [torch.arange(5), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 0, 1]])])
def test_packed_heads(
    packed: tuple[int, int], options: dict[str, Any], dtype: torch.dtype, positions: torch.Tensor
) -> None:
    """What one matmul makes of queries, keys and values: the three as attention takes them, and one gradient."""
    heads, keys = packed
    batch_first, others = options.get("batch_first", True), {k: v for k, v in options.items() if k != "batch_first"}
    module, apart = RotaryEmbedding(16, packed=packed, **options), RotaryEmbedding(16, heads_dim=2, **others)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, (heads + 2 * keys) * 16, generator=generator, dtype=torch.float64).to(dtype)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    cos, sin = module.tables(positions, torch.float64 if dtype == torch.float64 else torch.float32)
    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    results = module(found, cos=cos, sin=sin)
    by_batch = wanted if batch_first else wanted.transpose(0, 1)
    query, key, value = by_batch.unflatten(-1, (-1, 16)).split([heads, keys, keys], 2)
    expected = [t.transpose(1, 2) for t in (*apart(query, key, cos, sin), value)]
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result, right)
    gradients = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(dtype) for r in expected]
    torch.autograd.backward(results, gradients)
    torch.autograd.backward(expected, gradients)
    assert torch.equal(found.grad, wanted.grad)
    with torch.no_grad():
        for result, right in zip(module(x, positions=positions), expected, strict=True):
            assert torch.equal(result, right)
    torch.compiler.reset()  # each of these modules is compiled anew
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)(x, cos=cos, sin=sin)
    for result, right in zip(compiled, expected, strict=True):
        assert torch.equal(result, right)
    results[0].mul_(2)  # a result is the caller's


def test_packed_heads_that_promise_are_turned_by_an_op() -> None:
    """Where they are compiled; torch's own ops promise nothing."""
    torch._dynamo.reset()
    graphs: list[str] = []

    def seen(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    module, x = RotaryEmbedding(16, packed=(4, 2)).promise(accumulate="float32"), torch.randn(2, 5, 128)
    for got, want in zip(torch.compile(module, fullgraph=True, backend=seen)(x), module(x), strict=True):
        assert torch.equal(got, want)
    assert "shardfuse.rotary_v1" in graphs[0]


def test_packed_heads_that_are_refused() -> None:
    with pytest.raises(ModuleArgumentError, match="packed"):
        RotaryEmbedding(16, packed=(4,))
    with pytest.raises(ModuleArgumentError, match="heads_dim=2"):
        RotaryEmbedding(16, packed=(4, 2), heads_dim=2)
    with pytest.raises(ModuleArgumentError, match="batch_first"):
        RotaryEmbedding(16, batch_first=False)
    module = RotaryEmbedding(16, packed=(4, 2))
    with pytest.raises(ModuleInputError, match=r"\[batch, sequence, 8 \* 16\]"):
        module(torch.ones(2, 5, 6 * 16))
    with pytest.raises(ModuleInputError, match=r"\[sequence, batch, 8 \* 16\]"):
        RotaryEmbedding(16, packed=(4, 2), batch_first=False)(torch.ones(5, 2, 6 * 16))
    with pytest.raises(ModuleInputError, match="as the query holds all heads"):
        module(torch.ones(2, 5, 8 * 16), torch.ones(2, 5, 16))


def test_tables_that_require_a_gradient_are_refused() -> None:
    """A gradient that is never computed would be one of zeros for whoever learns the angles."""
    query, tables = torch.randn(1, 2, 5, 8), RotaryEmbedding(8).tables(torch.arange(5))
    for name in ("cos", "sin"):
        cos, sin = (t.clone().requires_grad_(which == name) for which, t in zip(("cos", "sin"), tables, strict=True))
        for module, x in ((RotaryEmbedding(8), query), (RotaryEmbedding(8, packed=(2, 1)), torch.randn(1, 5, 32))):
            with pytest.raises(ModuleInputError, match=f"{name} has a gradient that is wanted"):
                module(x, None, cos, sin)
            with torch.no_grad():
                module(x, None, cos, sin)


@pytest.mark.parametrize("at", [S1, S2, R], ids=str)
@pytest.mark.parametrize("plain", ["query", "key"])
def test_one_dtensor_beside_this_ranks_part_of_the_other(plain: str, at: Placement) -> None:
    wholes = {
        name: torch.randn(2, heads, 6, 16, generator=torch.Generator().manual_seed(heads), dtype=torch.float64)
        for name, heads in (("query", 4), ("key", 2))
    }
    alone = RotaryEmbedding(16)
    expected = dict(zip(wholes, alone(*wholes.values()), strict=True))

    def run(rank: int, size: int) -> None:
        mesh = make_mesh((2,))
        module = RotaryEmbedding(16, mesh=DeviceMesh.from_torch(mesh), input=at)
        given = {name: distribute(x, mesh, [at]) for name, x in wholes.items()}
        given[plain] = given[plain].to_local()
        for name, found in zip(given, module(*given.values()), strict=True):
            assert found.shape == wholes[name].shape
            assert_beside(found.full_tensor(), expected[name])

    run_ranks(2, run)
