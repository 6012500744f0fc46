"""``invariant="ranks"`` over GPUs: the bits that one of them makes by itself, with exchanges in kernels and without."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from fusion_check import local_arguments
from promise_cases import assert_pieces, define, inputs, sharded

from shardfuse import DataType
from shardfuse.nn import LayerNorm, RMSNorm, Softmax

if TYPE_CHECKING:
    from conftest import ProcessGroup

    from shardfuse.mesh import symmetric

pytestmark = [pytest.mark.mpi, pytest.mark.multi_gpu]

LENGTHS = {
    "rms_norm": (1024, 8192), "layer_norm": (8192, 3072), "add_norm": (8192,), "softmax": (8192, 11008, 65536),
    "cross_entropy": (4096, 3072, 32000, 128256), "rms_norm_backward": (8192,), "layer_norm_backward": (4096, 5120),
    "softmax_backward": (8192,),
}  # fmt: skip
"""Elements of rows that are added up in pairs, and of some that are cut into segments."""
SHARDED = [*((name, 1) for name in LENGTHS), *((name, 0) for name in ("softmax", "layer_norm_backward"))]


@pytest.mark.parametrize("exchange", ["auto", "nccl"])
@pytest.mark.parametrize(("name", "dim"), SHARDED)
def test_ranks_have_the_bits_of_one(
    name: str, dim: int, exchange: str, arena: symmetric.Arena, pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDFUSE_EXCHANGE", exchange)
    for n in LENGTHS[name]:
        alone, fd = define(name, n, DataType.BFloat16, "ranks"), sharded(name, n, DataType.BFloat16, pg.size, dim)
        for rows in (8, 512):
            given = inputs(alone, rows, n)
            whole = alone.execute([t.to(pg.device) for t in given])
            found = fd.execute([t.to(pg.device) for t in local_arguments(fd.fusion, given, pg.rank)])
            assert_pieces(fd, found, whole, f"{name} of {rows} x {n} over {pg.size} ranks")


@pytest.mark.parametrize("module", [RMSNorm, LayerNorm, Softmax])
def test_norms_of_two_ranks_are_one_kernel(module: type, arena: symmetric.Arena, pg: ProcessGroup) -> None:
    name = {RMSNorm: "rms_norm", LayerNorm: "layer_norm", Softmax: "softmax"}[module]
    fd, both = sharded(name, 8192, DataType.BFloat16, pg.size, 1), random.Random(5)
    for rows in (both.choice((1, 8, 64, 300)) for _ in range(20)):
        given = inputs(define(name, 8192, DataType.BFloat16, "ranks"), rows, 8192)
        fd.execute([t.to(pg.device) for t in local_arguments(fd.fusion, given, pg.rank)])
        assert pg.size > 2 or (fd.explain().kernels, len(fd.explain().collectives)) == (1, 0)
