"""Features: what schedules are chosen by, against what can be read off the segments by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kernel_cases import group_norm_silu, layer_norm_backward, softmax
from segments import Builder, rms_norm

from shardfuse import DataType
from shardfuse.device import H200
from shardfuse.schedulers import kernels_of, proposed
from shardfuse.schedulers.features import Features, features, features_or_refusal

HALF, FLOAT, DOUBLE = DataType.Half, DataType.Float, DataType.Double


def test_rows() -> None:
    found = features(rms_norm(6, 1300, HALF), H200)
    assert (found.kept, found.reduced, found.phases, found.is_inner) == (6, 1300, 2, True)
    assert (len(found.streamed), len(found.beside)) == (1, 1)
    assert found.row_bytes == 2 * 1300
    assert found.width == 4  # 1300 elements of 16 bits keep each row aligned to 8 bytes
    assert (found.narrowest_load(1300), found.narrowest_load(1301), found.narrowest_load(1304)) == (8, 2, 16)
    assert found.held == 1
    assert found.is_narrow
    assert not any((found.has_windows, found.draws, found.is_by_sample, found.is_chain, found.is_cut_short))
    assert (found.beside_again, found.why_no_exchange) == (0, None)


@pytest.mark.parametrize(("columns", "dtype", "is_odd"), [(1301, HALF, True), (1302, HALF, True), (1304, HALF, False)])
def test_rows_that_are_read_in_aligned_words(columns: int, dtype: DataType, is_odd: bool) -> None:
    assert features(rms_norm(6, columns, dtype), H200).may_align_down() == is_odd
    assert not features(rms_norm(1, columns, dtype), H200).may_align_down()


def test_programs_cannot_exchange_sums_of_64_bits() -> None:
    b = Builder()
    x = b.input(DOUBLE, b.axis(6), b.axis(1300))
    found = features(b.segment(b.op("sub", x, b.reduce("sum", x, [1], keepdim=True))), H200)
    assert "64 bits" in str(found.why_no_exchange)


def test_short_runs_are_walked_as_columns() -> None:
    """4 groups of 4 channels of 16 bits, channels-last: 8 bytes of each pixel."""
    found = features(group_norm_silu(1, 16, 12, 12, 4, HALF, (0, 2, 3, 1)), H200)
    assert (found.grouped, found.is_inner, found.run) == (0, True, 4)
    columns = found.in_columns
    assert isinstance(columns, Features)
    assert (columns.grouped, columns.is_inner, columns.kept, columns.reduced) == (4, False, 16, 144)
    assert columns.columns == (16, 16)
    assert columns.in_columns is columns


def test_statistics_are_joined() -> None:
    found = features(softmax(12, 130, FLOAT), H200)
    assert (found.phases, found.joined.phases) == (3, 2)
    assert found.joined.joined is found.joined
    assert not found.takes_one_walk


def test_they_are_worked_out_once_for_each_device() -> None:
    segment = rms_norm(6, 1300, HALF)
    found = features(segment, H200)
    assert found is features(segment, H200)
    other = replace(H200, multiprocessors=8)
    assert features(segment, other).device is other
    refusal = features_or_refusal(layer_norm_backward((32, 96), FLOAT), H200)
    assert isinstance(refusal, str)


def test_a_plan_has_its_segment_and_device_from_its_features() -> None:
    segment = layer_norm_backward((32, 96), FLOAT)
    (whole,) = kernels_of("mix_order", segment, H200, proposed("mix_order", segment, H200))
    assert len(whole.stages) == 2
    assert whole.segment is whole.space.segment
    assert set(whole.segment.exprs) == {e for stage in whole.stages for e in stage.segment.exprs}
    assert whole.device is H200
