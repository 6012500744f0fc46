# pyright: reportUnknownMemberType=false
"""``shardfuse::rank_region_v1``: a region with collectives in it, as one functional op.

    rank_region_v1(str program, Tensor[] inputs, SymInt[] sizes, str group) -> Tensor[]

As ``region_v1``, for a local definition (``aten_collectives``).  ``group``: the name of the process group, from which
every process makes the mesh: neither ranks nor their number are in generated code that torch keeps on disk, unless the
graph itself has them in a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..mesh import DeviceMesh
from ..mesh.groups import ranks_of_group, world_key
from .ledger import note_cached_text
from .rank_axis import MeshDefinition, on_mesh
from .region_op import Program, define_op, fake_region, program_of


@dataclass(frozen=True)
class RankProgram:
    """``local``: what its text says.  ``made``: the fusion over ``mesh``."""

    local: Program
    mesh: DeviceMesh
    made: MeshDefinition

    def run(self, inputs: Sequence[torch.Tensor], scalars: Sequence[int]) -> list[torch.Tensor]:
        """Local tensors to local tensors."""
        given = [x.unsqueeze(0) if is_part else x for x, is_part in zip(inputs, self.made.input_parts, strict=True)]
        found = self.made.fd.execute([*given, *scalars])
        return [y.squeeze(0) if is_part else y for y, is_part in zip(found, self.made.output_parts, strict=True)]


_made: dict[tuple[tuple[int, int], str, str], RankProgram] = {}


def rank_program_of(text: str, group: str) -> RankProgram:
    """The program of a text over the ranks of the process group of that name, made at first.

    Raises ``UnknownGroupError``, ``UntranslatableError`` and ``GroupSizeError``.
    """
    key = world_key(), group, text
    found = _made.get(key)
    if found is None:
        local, mesh = program_of(text), DeviceMesh(ranks_of_group(group))
        found = _made.setdefault(key, RankProgram(local, mesh, on_mesh(local.fd, mesh)))
    return found


def run_rank_region(program: str, inputs: list[torch.Tensor], sizes: list[int], group: str) -> list[torch.Tensor]:
    """Run the fusion: every rank of the group calls it, as it would the collectives."""
    found = rank_program_of(program, group)
    note_cached_text(program)
    return found.run(inputs, sizes[found.local.size_count :])


def fake_rank_region(
    program: str, inputs: list[torch.Tensor], sizes: list[int | torch.SymInt], group: str
) -> list[torch.Tensor]:
    return fake_region(program, inputs, sizes)


def has_collectives(*arguments: object) -> bool:
    """Of calls of the op, for ``mesh/inductor_order.py``."""
    return True


_PARAMETERS = "str program, Tensor[] inputs, SymInt[] sizes, str group"
define_op("rank_region_v1", _PARAMETERS, run_rank_region, fake_rank_region)

RANK_REGION = torch.ops.shardfuse.rank_region_v1.default
