"""Host scalars that are worked out in every call: arithmetic on scalar inputs, and seeds of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..ir.expr import BoundFusion, HostExpr
from ..ir.op import Cast, Pointwise, RngOffset, RngSeed
from ..ir.scalar import Number, Scalar, number_text
from ..mesh import current_rank
from ..ops.host import host_value, to_number
from . import collective_calls
from .launch import index_of
from .steps import Call, Rename, Step


def host_steps(fusion: BoundFusion, device: torch.device) -> list[Step]:
    """What a program works out in each call."""
    steps: list[Step] = []
    for k, expr in enumerate(fusion.host):
        made = expr.output.name
        match expr.op:
            case RngSeed():
                steps.append(
                    Call((made, f"{made}_offset"), "draw_seed", SeedSource(device, _ranks(fusion)), sends=True)
                )
            case RngOffset():
                steps.append(Rename(made, f"{expr.inputs[0].name}_offset"))
            case Pointwise() | Cast():
                given = tuple(map(scalar_text, expr.inputs))
                steps.append(Call((made,), f"host_{k}", _function(expr.op, expr), given))
    return steps


def host_values(fusion: BoundFusion, known: Mapping[Scalar, Number], device: torch.device) -> dict[Scalar, Number]:
    """The values of all host scalars that are worked out in every call, given those of the inputs."""
    values = dict(known)
    offsets: dict[Scalar, int] = {}
    for expr in fusion.host:
        match expr.op:
            case RngSeed():
                values[expr.output], offsets[expr.output] = SeedSource(device, _ranks(fusion))()
            case RngOffset():
                values[expr.output] = offsets[expr.inputs[0]]
            case Pointwise() | Cast():
                operands = [values[s] if s.value is None else s.value for s in expr.inputs]
                values[expr.output] = _function(expr.op, expr)(*operands)
    return values


def _function(op: Pointwise | Cast, expr: HostExpr) -> Callable[..., Number]:
    dtype, given = expr.output.dtype, [s.dtype for s in expr.inputs]

    def run(*values: Number) -> Number:
        """Numbers come in the types that were declared: an input of Double may have been passed True."""
        found = host_value(op, [to_number(v, t) for v, t in zip(values, given, strict=True)], dtype)
        for reader in expr.held:
            reader.check(expr.output, found)
        return found

    return run


def sample(scalar: Scalar) -> Number:
    """A value of the kind that ``scalar`` has."""
    if scalar.value is not None:
        return scalar.value
    return 0.5 if scalar.dtype.is_floating else 3


def scalar_text(scalar: Scalar) -> str:
    """The name of ``scalar`` in the program, or Python's text of its value."""
    return scalar.name if scalar.value is None else number_text(scalar.value)


def seeds_sent(fusion: BoundFusion) -> list[str]:
    """A line for each seed that the ranks of ``fusion`` draw, which the first of several gives to the others."""
    ranks = _ranks(fusion)
    if len(ranks) < 2:
        return []
    return [f"sends: {e.output.name}, and its offset, from rank {ranks[0]}" for e in fusion.host if e.op == RngSeed()]


def _ranks(fusion: BoundFusion) -> tuple[int, ...]:
    """Those of all meshes, ascending."""
    meshes = (t.domain.mesh for t in fusion.tensors())
    return tuple(sorted({r: None for mesh in meshes if mesh is not None for r in mesh.ranks}))


@dataclass(frozen=True)
class SeedSource:
    """Seed and offset of one draw from torch's default generator of ``device``, the same on all of ``ranks``.

    A CUDA generator's own seed and offset, which advances by one draw; a CPU generator has no offset: a number drawn
    from it is the seed.  Ranks that were seeded differently take the first rank's.
    """

    device: torch.device
    ranks: tuple[int, ...]
    """Ascending; none where the program is on no mesh."""

    def __call__(self) -> tuple[int, int]:
        seed, offset = self._draw()
        ranks = self.ranks
        if len(ranks) < 2 or current_rank() not in ranks:
            return seed, offset
        pair = torch.tensor([seed, offset], dtype=torch.int64, device=self.device)
        first = collective_calls.broadcast(pair, (2,), torch.int64, self.device, ranks[0], ranks)
        return int(first[0]), int(first[1])

    def _draw(self) -> tuple[int, int]:
        if self.device.type != "cuda":
            return int(torch.randint(0, 2**63 - 1, (), device="cpu").item()), 0
        generator = torch.cuda.default_generators[index_of(self.device)]
        offset = generator.get_offset()
        generator.set_offset(offset + _WORDS)
        seed = generator.initial_seed()
        return seed - 2**64 if seed >= 2**63 else seed, offset // _WORDS


_WORDS = 4
"""Random words that torch counts a draw of one element as; its offsets are multiples of this."""
