"""Which collectives of a graph become part of a region, and as what: graphs of one rank, whose group is fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from compile_graphs import graph_of, regions_in
from rank_graphs import DIM, all_reduce, cases
from test_exchange_plans import FakeMesh
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardfuse import DeviceMesh
from shardfuse.compile import graph_pass, rank_regions, report
from shardfuse.compile.compile_errors import GroupSizeError, UntranslatableError
from shardfuse.compile.graph_pass import PostGradPass, hand_over
from shardfuse.compile.ledger import RegionReport
from shardfuse.compile.node_facts import nominal
from shardfuse.compile.program_text import printed, rebuilt
from shardfuse.compile.rank_axis import on_mesh
from shardfuse.compile.rank_region_op import RANK_REGION, rank_program_of
from shardfuse.compile.translation import hinted
from shardfuse.device import A100
from shardfuse.executor import symmetric_slots
from shardfuse.rank_errors import UnknownGroupError

F = torch.nn.functional
RANKS = 4
Function = Callable[..., object]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def name_of(group: dist.ProcessGroup | None = None) -> str:
    return (group or dist.group.WORLD).group_name


def sum_over(x: torch.Tensor, group: str | None = None, reduce: str = "sum") -> torch.Tensor:
    return all_reduce(x, group or name_of(), reduce)


def taken(f: Function, inputs: Sequence[object], *, symbolic: bool = False) -> tuple[GraphModule, list[RegionReport]]:
    gm = graph_of(f, inputs, symbolic=symbolic)
    return gm, regions_in(gm)


def rank_calls(gm: GraphModule) -> list[torch.fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=RANK_REGION)


def remaining(gm: GraphModule) -> list[str]:
    """Collectives that the graph still has."""
    names = [str(n.target) for n in gm.graph.nodes]
    return [n.split(".")[1] for n in names if n.startswith("_c10d") and "wait" not in n]


def said(found: Sequence[RegionReport]) -> str:
    return "\n".join(line for r in found for line in r.collectives)


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_a_norm_and_its_collectives_are_one_op(name: str) -> None:
    case = cases(RANKS)[name]
    gm, found = taken(case.run, [x[0] for x in case.inputs(RANKS, torch.bfloat16)])
    (call,) = rank_calls(gm)
    assert not remaining(gm), "all of them are inside"
    program, _, _, group = call.args
    assert group == name_of(), "the group is named"
    assert "DeviceMesh" not in str(program), "who is in it is not in what torch keeps on disk"
    for collective in case.collectives:
        assert f"{collective}" in said(found)
    assert printed(rebuilt(str(program))) == program, "it is read as it was printed"
    made = rank_program_of(str(program), str(group))
    assert made.mesh == DeviceMesh(range(RANKS))
    results = gm.graph.output_node().args[0]
    want = case.run(*(x[0] for x in case.inputs(RANKS, torch.bfloat16)))
    assert [r.meta["val"].shape for r in results] == [w.shape for w in want]


def test_the_number_of_ranks_is_no_part_of_an_all_reduce() -> None:
    """torch's cache may give a graph of 4 ranks to 2."""
    pair = dist.new_group([0, 3])
    case = cases(RANKS)["all_reduce"]
    gm, _ = taken(case.run, [x[0] for x in case.inputs(RANKS, torch.float32)])
    (call,) = rank_calls(gm)
    made = rank_program_of(str(call.args[0]), name_of(pair))
    assert made.mesh == DeviceMesh([0, 3])
    assert all(i.val.shape[0] == 2 for i in made.made.fd.fusion.inputs)


def test_a_gather_of_other_ranks_than_its_group_has_is_refused() -> None:
    case = cases(RANKS)["reduce_scatter"]
    gm, _ = taken(case.run, [x[0] for x in case.inputs(RANKS, torch.float32)])
    program = str(rank_calls(gm)[0].args[0])
    with pytest.raises(GroupSizeError, match="over 4 ranks, and its process group has 2"):
        rank_program_of(program, name_of(dist.new_group([0, 2])))
    with pytest.raises(UnknownGroupError, match="no process group named 'elsewhere'"):
        rank_program_of(program, "elsewhere")


def test_rows_may_be_any_number() -> None:
    case = cases(RANKS)["all_reduce"]
    gm, _ = taken(case.run, [x[0] for x in case.inputs(RANKS, torch.float32)], symbolic=True)
    (call,) = rank_calls(gm)
    assert "shape=[-1, " in str(call.args[0])
    assert not remaining(gm)


def norm_of_sum(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(sum_over(x) + r, (DIM,))


def a_matmul_between(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    started = torch.ops._c10d_functional.all_reduce(x, "sum", name_of())
    product = r @ r.t()
    total = torch.ops._c10d_functional.wait_tensor(started)
    return F.rms_norm(total + r, (DIM,)) + product.sum()


def a_matmul_behind(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(sum_over(x) + r, (DIM,)) + (r @ r.t()).sum()


def test_a_collective_beside_a_matmul_stays_by_itself() -> None:
    """A region would start it and wait for it at once."""
    x, r = torch.randn(8, DIM), torch.randn(8, DIM)
    gm, found = taken(a_matmul_between, [x, r])
    assert not rank_calls(gm)
    assert remaining(gm) == ["all_reduce"]
    assert "by itself, aten.mm.default runs beside it" in said(found)
    order = [str(n.target) for n in gm.graph.nodes]
    assert order.index("aten.mm.default") < order.index("_c10d_functional.wait_tensor.default"), order


def test_where_inductor_moves_waits_any_independent_matmul_may_run_beside() -> None:
    x, r = torch.randn(8, DIM), torch.randn(8, DIM)
    assert len(rank_calls(taken(a_matmul_behind, [x, r])[0])) == 1
    with config.patch(reorder_for_compute_comm_overlap=True):
        assert not rank_calls(taken(a_matmul_behind, [x, r])[0])
        assert len(rank_calls(taken(norm_of_sum, [x, r])[0])) == 1


def test_two_process_groups_are_two_regions_at_least() -> None:
    pair = name_of(dist.new_group([0, 1]))

    def f(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(sum_over(sum_over(x) + r, pair) + r, (DIM,))

    gm, _ = taken(f, [torch.randn(8, DIM)] * 2)
    assert len(rank_calls(gm)) + len(remaining(gm)) >= 2
    assert all(call.args[3] in (name_of(), pair) for call in rank_calls(gm))


def columns_of_a_rank(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm of which each rank has some columns, perhaps more than another."""
    squares = sum_over(x.square().sum(-1, keepdim=True))
    normed = x * torch.rsqrt(squares / 100 + 1e-6)
    return normed, normed.sum(-1)


def words_of_a_rank(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """An embedding of which each rank has some rows: where they begin is another number on each."""
    start = 16
    is_mine = (tokens >= start) & (tokens < start + 16)
    found = table[(tokens - start).clamp(0, 15)] * is_mine[..., None]
    return F.rms_norm(sum_over(found), (DIM,))


def averaged(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(sum_over(x, reduce="avg"), (DIM,))


@pytest.mark.parametrize(
    ("f", "inputs", "is_inside", "why"),
    [
        (columns_of_a_rank, [torch.zeros(8, 25)], False, "ranks may have more or less of"),
        (words_of_a_rank, [torch.zeros(8, dtype=torch.int64), torch.zeros(16, DIM)], True, ""),
        (averaged, [torch.zeros(8, DIM)], False, "by itself"),
    ],
    ids=["columns", "words", "average"],
)
def test_what_ranks_may_have_otherwise_is_outside(
    f: Function, inputs: Sequence[torch.Tensor], is_inside: bool, why: str
) -> None:
    gm, found = taken(f, inputs)
    calls = rank_calls(gm)
    assert bool(calls) is is_inside, str(found)
    assert why in said(found)
    for call in calls:
        assert "16" not in str(call.args[0]), "nothing of where this rank's words begin"


def test_collectives_keep_their_order() -> None:
    """All ranks start them alike, whatever the region's other inputs wait for."""

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        residual = z.exp()
        first = sum_over(x @ x.t())
        second = F.rms_norm(sum_over(y) + residual, (DIM,))
        return first, second, sum_over(z)

    gm, _ = taken(f, [torch.randn(8, DIM) for _ in range(3)])
    names = [str(n.target) for n in gm.graph.nodes]
    order = [n.split(".")[1] for n in names if "all_reduce" in n or "rank_region" in n]
    assert order == ["all_reduce", "rank_region_v1", "all_reduce"], names


def test_on_a_cpu_nothing_is_taken_by_itself() -> None:
    gm = graph_of(norm_of_sum, [torch.randn(8, DIM)] * 2)
    report(clear=True)
    hand_over(gm.graph, "auto")
    assert remaining(gm) == ["all_reduce"]
    assert "all_reduce(sum) of float32 [8, 64] over group" in str(report(clear=True))


def written_out(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = sum_over(x) + r
    wide = total.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w, total


def on_gpus(f: Function, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> GraphModule:
    """The graph of GPUs that are not there."""
    with FakeTensorMode(), torch.no_grad():
        inputs = [torch.empty(s, dtype=dtype, device="cuda") for s in shapes]
        return make_fx(f, decomposition_table=select_decomp_table())(*inputs)


@pytest.mark.parametrize(
    ("exchange", "rows", "is_inside", "why"),
    [
        ("symmetric", 8, True, "inside"),
        ("auto", 8, True, "inside"),
        ("nccl", 8, False, "by itself, kernels exchange nothing, SHARDFUSE_EXCHANGE is nccl"),
        ("symmetric", 1 << 17, False, "by itself, no kernel of it exchanges what ranks add up"),
    ],
)
def test_on_gpus_a_kernel_that_exchanges_is_a_gain(
    exchange: str, rows: int, is_inside: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDFUSE_EXCHANGE", exchange)
    mesh = FakeMesh(1 << 20)
    mesh.arena.hosts = dict.fromkeys(range(4), "here")
    monkeypatch.setattr(symmetric_slots, "arena", lambda: mesh.arena)
    gm = on_gpus(written_out, [(rows, DIM), (rows, DIM), (DIM,)], torch.bfloat16)
    report(clear=True)
    hand_over(gm.graph, "auto")
    assert bool(rank_calls(gm)) is is_inside, str(report())
    assert why in said(report(clear=True).regions)


def test_what_decisions_follow_from_is_part_of_the_identity_in_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's caches keep what was decided about each collective: a job of more ranks, under the same name of a group,
    finds nothing that one rank decided, while ranks without a cache would decide anew.
    """
    found = [PostGradPass().uuid()]
    with monkeypatch.context() as patch:
        patch.setenv("SHARDFUSE_EXCHANGE", "symmetric")
        found.append(PostGradPass().uuid())
    with monkeypatch.context() as patch:
        mesh = FakeMesh(1 << 20)
        mesh.arena.hosts = dict.fromkeys(range(RANKS), "here")
        patch.setattr(symmetric_slots, "arena", lambda: mesh.arena)
        found.append(PostGradPass().uuid())
    with monkeypatch.context() as patch:
        patch.setattr(rank_regions, "device_here", lambda: A100)
        found.append(PostGradPass().uuid())
    assert PostGradPass().uuid() == found[0]
    dist.new_group([0, 1])
    found.append(PostGradPass().uuid())
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    found.append(PostGradPass().uuid())
    assert len(set(map(str, found))) == len(found)


def rows_of(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(sum_over(x) + r, (DIM,)) * 2


def test_the_sizes_of_a_call_decide_nothing_about_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be planned at this rank's sizes is missing from its report alone."""
    planned: list[object] = []

    def plan(fd: object, region: object, leading: object = (), size: object = hinted) -> object:
        planned.append(size)
        if size is hinted:
            raise UntranslatableError("a plan", "of these sizes", "another")
        return explained(fd, region, leading, size)

    explained = graph_pass._plan
    monkeypatch.setattr(graph_pass, "_plan", plan)
    gm, (region,) = taken(rows_of, [torch.randn(8, DIM)] * 2, symbolic=True)
    assert planned == [nominal, hinted]
    assert len(rank_calls(gm)) == 1
    assert not remaining(gm)
    assert region.taken
    assert region.bytes is None


def masked_by_words(x: torch.Tensor, r: torch.Tensor, word: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The mask has fewer bytes than the word that it is made of where there are fewer than 4 rows."""
    mask = F.embedding(word, table) > r
    return F.rms_norm(sum_over(x) * mask, (DIM,))


def test_what_a_region_holds_beside_a_collective_does_not_follow_from_the_sizes_of_a_call() -> None:
    programs: list[str] = []
    for rows in (2, 12):
        inputs = [torch.randn(rows, DIM), torch.randn(rows, DIM), torch.zeros(1, dtype=torch.int64), torch.ones(9, DIM)]
        (region,) = [r for r in taken(masked_by_words, inputs, symbolic=True)[1] if r.taken]
        programs.append(region.program)
    assert programs[0] == programs[1]


@pytest.mark.parametrize(
    ("strides", "is_inside"),
    [((DIM, 1), True), ((1, 12), True), ((2 * DIM, 1), False), ((1, 100), False)],
    ids=["rows", "columns", "padded rows", "padded columns"],
)
def test_only_an_order_in_memory_that_no_size_changes_is_inside(strides: tuple[int, ...], is_inside: bool) -> None:
    """Whether rows or columns are inner may follow from the numbers that symbols stand for, which ranks have not alike.

    Of 12 rows, which are a symbol, a stride of 12 is that symbol, and one of 128 or 100 is another.
    """
    r = torch.empty_strided((12, DIM), strides).normal_()
    gm, found = taken(norm_of_sum, [torch.randn(12, DIM), r], symbolic=True)
    assert bool(rank_calls(gm)) is is_inside, said(found)


def test_an_op_without_a_form_for_ranks_is_named() -> None:
    text = (
        "def nvfuser_fusion(fd : FusionDefinition) -> None :\n"
        "    T0 = fd.define_tensor(shape=[4, 8], dtype=DataType.Float, is_cpu=False)\n"
        "    T1 = fd.ops.all_reduce_sum(T0)\n"
        "    T2 = fd.ops.flip(T0, dims=[0])\n"
        "    fd.add_output(T1)\n    fd.add_output(T2)\n"
    )
    with pytest.raises(UntranslatableError, match="flip"):
        on_mesh(rebuilt(text), DeviceMesh(range(2)))
