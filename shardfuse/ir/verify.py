"""Rules that hold after every pass; a failure names the rule and the tensor, and means a bug in shardfuse."""

from __future__ import annotations

from .digits import cut_out, overlaps
from .expr import BoundFusion, BoundTensor


def verify(fusion: BoundFusion, stage: str) -> None:
    """Raises ``AssertionError``."""
    for rule in (names_are_unique, definitions_come_first, indices_are_not_repeated, mesh_digits_are_held):
        broken = rule(fusion)
        assert broken is None, f"after {stage}: {rule.__name__}: {broken}"


def names_are_unique(fusion: BoundFusion) -> str | None:
    seen: dict[str, BoundTensor] = {}
    for t in fusion.tensors():
        if t.name in seen:
            return f"two tensors are called {t.name}"
        seen[t.name] = t
    return None


def definitions_come_first(fusion: BoundFusion) -> str | None:
    known = dict.fromkeys(v for v in fusion.inputs if isinstance(v, BoundTensor))
    for expr in fusion.exprs:
        for t in expr.tensors:
            if t not in known:
                return f"{expr.op.name} of {expr.output} reads {t} before it is made"
        for t in expr.outputs:
            if t in known:
                return f"{t} is made twice"
            known[t] = None
    missing = [t.name for t in fusion.outputs if t not in known]
    return f"outputs {missing} are never made" if missing else None


def indices_are_not_repeated(fusion: BoundFusion) -> str | None:
    return next(
        (f"{t} holds an index twice: {t.domain.logical}" for t in fusion.tensors() if overlaps(t.domain.logical)), None
    )


def mesh_digits_are_held(fusion: BoundFusion) -> str | None:
    for t in fusion.tensors():
        for parallel_type, digits in t.domain.sharding:
            for d in digits:
                if not any(cut_out(axis, d) is not None for axis in t.domain.logical):
                    return f"{t} is sharded on {parallel_type} by {d}, which none of {t.domain.logical} holds"
    return None
