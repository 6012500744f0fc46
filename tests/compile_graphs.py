"""Graphs as Inductor hands them to the pass, without its code generation: traced, decomposed, run after the pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from functorch.compile import make_boxed_func
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.roundings import assert_near
from shardfuse.compile import report
from shardfuse.compile.graph_pass import hand_over
from shardfuse.compile.ledger import RegionReport
from shardfuse.compile.region_op import REGION

Function = Callable[..., object]


def listed(values: object) -> list[torch.Tensor]:
    return [values] if isinstance(values, torch.Tensor) else [v for v in values if isinstance(v, torch.Tensor)]


def graph_of(f: Function, inputs: Sequence[object], *, symbolic: bool = False) -> GraphModule:
    """The aten graph of ``f`` with Inductor's decompositions; its nodes know shapes, strides and dtypes."""
    from torch._inductor.decomposition import select_decomp_table

    mode = "symbolic" if symbolic else "fake"
    with torch.no_grad():
        gm = make_fx(lambda *given: f(*given), decomposition_table=select_decomp_table(), tracing_mode=mode)(*inputs)
    gm.graph.eliminate_dead_code()
    return gm


def regions_in(gm: GraphModule) -> list[RegionReport]:
    """What the pass does to ``gm``, with every region taken."""
    report(clear=True)
    hand_over(gm.graph, "all")
    gm.graph.lint()
    gm.recompile()
    return list(report(clear=True).regions)


def calls_in(gm: GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=REGION))


def widened(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def check(
    f: Function,
    inputs: Sequence[object],
    *,
    n: float = 2,
    signed: bool = True,
    rows: int | None = -1,
    relative: bool = False,
    regions: int = 1,
    terms: bool = False,
    what: str = "",
) -> list[RegionReport]:
    """``f`` with its regions handed over, element by element against eager torch and float64."""
    gm = graph_of(f, inputs)
    found = regions_in(gm)
    assert calls_in(gm) == regions, f"{what}: {calls_in(gm)} regions\n" + "\n".join(map(str, found))
    with torch.no_grad():
        results = listed(gm(*inputs))
        eager = listed(f(*inputs))
        wide = listed(f(*map(widened, inputs)))
    assert len(results) == len(eager)
    for k, (mine, own, right) in enumerate(zip(results, eager, wide, strict=True)):
        assert mine.stride() == own.stride(), f"{what}, result {k}: {mine.stride()}, expected {own.stride()}"
        right = right if own.is_floating_point() else own
        assert_near(mine, right, own, n=n, rows=rows, relative=relative, signed=signed, what=f"{what}, result {k}")
    storages = [r.untyped_storage().data_ptr() for r in results]
    given = [x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)]
    assert not set(storages) & set(given), f"{what}: a result shares storage with an input"
    return found


def graph_backend(gm: GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
    """As the backend with every region taken, but graphs run op by op: no code of Inductor's is compiled."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    def run(graph: GraphModule, given: Sequence[torch.Tensor]) -> Callable[..., object]:
        with V.set_fake_mode(torch._guards.detect_fake_mode(given)):
            replace_random_passes(graph)
        hand_over(graph.graph, "all")
        graph.recompile()
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run, decompositions=select_decomp_table())(gm, inputs)
