"""Generated kernels compiled for sm_90 without a GPU: no spill, and 128-bit loads and stores where rows are aligned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kernel_cases import GOLDEN, SM90

from shardfuse.schedulers.limits import H200

TESTS = Path(__file__).parent
UNALIGNED = {"swiglu of odd rows", "cross_entropy 50257"}
"""Neither 128-bit nor 64-bit accesses: rows, or everything, of an odd number of elements."""
BY_64_BITS = {
    "layer_norm 5140", "rms_norm 5140", "add_rms_norm 5140", "rms_norm_dw 5140", "softmax 1000", "rms_norm 65540",
    "layer_norm_backward 5140", "rms_norm_backward 5120",
}  # fmt: skip
STREAMS = ("persistent", "looped", "pointwise", "reduction", "mix_order", "transpose")
"""First words of the names of kernels that read what is large."""
QUICK = [
    *GOLDEN, "layer_norm 768", "layer_norm 5140", "rms_norm 20480", "rms_norm 65536", "rms_norm_dw 5140",
    "swiglu past 32 bits", "layer_norm_backward 5140", "rms_norm_backward 384", "transpose_add",
]  # fmt: skip


def compiled(names: Sequence[str]) -> list[dict[str, int | str]]:
    """A record for each kernel of the named fusions, from a process in which Triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    found = subprocess.run(
        [sys.executable, str(TESTS / "compile_sm90.py"), *names],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def check(records: list[dict[str, int | str]]) -> None:
    for record in records:
        assert record["spills"] == 0, record
        assert record["stack"] == 0, record
        assert int(record["shared"]) <= H200.shared_bytes, record
        streams = str(record["kernel"]).startswith(STREAMS)
        if streams and record["case"] not in UNALIGNED | {"total of few"}:
            assert int(record["loads_64"]) + int(record["loads_128"]) > 0, record
            assert int(record["loads_128"]) > 0 or record["case"] in BY_64_BITS, record


def test_representative_kernels() -> None:
    records = compiled(QUICK)
    assert {r["case"] for r in records} == set(QUICK)
    check(records)
    by_case = {r["case"]: r for r in records}
    # Whole rows, four chunks: everything by 128 bits, no barrier but those of one reduction.
    rows = by_case["rms_norm"]
    assert (rows["loads_128"], rows["stores_128"], rows["loads_32"], rows["stores_32"]) == (8, 4, 0, 0)
    assert int(rows["registers"]) <= 64
    # A warp to a row: no barrier at all.
    assert by_case["layer_norm 768"]["barriers"] == 0
    # Two programs a multiprocessor.
    assert int(by_case["rms_norm 20480"]["registers"]) <= 64


@pytest.mark.slow
def test_every_kernel() -> None:
    records = compiled(list(SM90))
    assert {r["case"] for r in records} == set(SM90)
    check(records)
