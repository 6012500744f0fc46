"""The models of the suite ``models``, tiny, on the CPU: regions are found and taken, and losses are as eager torch's.

Graphs are handed to the pass as Inductor hands them, but run op by op: no code of Inductor's is compiled.  Where a
model has dropout, whose masks a graph draws by other means, losses are as those of the same graph without
the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from functorch.compile import make_boxed_func
from torch.fx import GraphModule

from shardfuse.compile import report
from shardfuse.compile.graph_pass import PostGradPass, Take

from .model_cases import ModelCase, chosen, model_cases
from .model_steps import losses, step_of
from .report import columns

CPU = torch.device("cpu")
STEPS = 3
ROUNDING = 2.0**-8
"""Of bfloat16, relatively."""


@dataclass(frozen=True)
class DryModel:
    """``breaks``: of the graph.  ``regions``: by their graph.  ``losses``, ``expected``: step by step."""

    name: str
    breaks: int
    regions: dict[str, int]
    ops: int
    losses: tuple[float, ...]
    expected: tuple[float, ...]

    def why_wrong(self) -> str:
        if not self.regions.get("forward") or not self.regions.get("backward") or self.breaks:
            return f"{self.regions} regions, {self.breaks} breaks"
        near = all(abs(a - b) <= 2 * ROUNDING * abs(b) for a, b in zip(self.losses, self.expected, strict=True))
        return "" if near else "other losses"


def by_ops(graph: GraphModule, inputs: Sequence[torch.Tensor], take: Take = "all") -> Callable[..., object]:
    """A backend of torch.compile that runs what the pass leaves as torch does, op by op."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def run(part: GraphModule, given: Sequence[torch.Tensor]) -> Callable[..., object]:
        PostGradPass(take)(part.graph)
        part.recompile()
        return make_boxed_func(part.forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run, decompositions=select_decomp_table())(graph, inputs)


def dry(case: ModelCase) -> DryModel:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    report(clear=True)
    found = losses(step_of(case, CPU, by_ops), STEPS)
    expected = losses(step_of(case, CPU, partial(by_ops, take="none") if case.dropout else None), STEPS)
    taken = report(clear=True).taken
    regions = {kind: sum(r.graph == kind for r in taken) for kind in ("forward", "backward")}
    ops = sum(n for r in taken for _, n in r.ops)
    return DryModel(case.name, sum(counters["graph_break"].values()), regions, ops, tuple(found), tuple(expected))


def dry_all(only: Sequence[str]) -> Iterator[DryModel]:
    cases = model_cases(tiny=True)
    for name in chosen(only, cases):
        yield dry(cases[name])


def dry_models(only: Sequence[str]) -> int:
    """Prints a line a model; code 1 where one is wrong."""
    found = list(dry_all(only))
    rows = [("model", "regions forward", "backward", "ops", "breaks", "losses", "expected", "wrong")]
    for m in found:
        sides = (str(m.regions["forward"]), str(m.regions["backward"]))
        said = (" ".join(f"{x:.4f}" for x in values) for values in (m.losses, m.expected))
        rows.append((m.name, *sides, str(m.ops), str(m.breaks), *said, m.why_wrong()))
    print("\n".join(columns(rows)))
    return 1 if any(m.why_wrong() for m in found) else 0
