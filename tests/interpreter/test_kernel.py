"""From text to a launch: the cache directory, whatever state it is in."""

from __future__ import annotations

import gc
import linecache
from pathlib import Path

import pytest
import torch
from segments import kernels_of, rms_norm
from torch_answers import assert_beside, assert_like

from shardfuse import FusionDefinition
from shardfuse.codegen import KernelSource
from shardfuse.config import read_cache_directory
from shardfuse.executor.kernel import KERNELS, Kernel, load_function
from shardfuse.ir.dtype import DataType


@pytest.fixture
def source() -> KernelSource:
    (found,) = kernels_of(rms_norm(5, 40, DataType.Float))
    return found


def check(source: KernelSource, directory: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 40, generator=generator), torch.randn(40, generator=generator)
    out = torch.empty_like(x)
    Kernel(source, directory, interpret=True).launcher()(None, x, w, out)
    assert_like(out, lambda x, w: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * w, x, w)


def test_the_source_is_kept_in_the_directory(tmp_path: Path, source: KernelSource) -> None:
    check(source, tmp_path / "new" / "cache")
    (file,) = (tmp_path / "new" / "cache").iterdir()
    assert file.read_text() == source.text


def test_a_file_in_the_way_is_no_matter(tmp_path: Path, source: KernelSource) -> None:
    (tmp_path / "cache").write_text("not a directory")
    check(source, tmp_path / "cache")


def test_a_corrupt_file_is_not_loaded(tmp_path: Path, source: KernelSource) -> None:
    check(source, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("raise RuntimeError('this is not what was generated')")
    load_function.cache_clear()
    check(source, tmp_path)
    assert file.read_text() == source.text


def test_one_text_is_one_function(tmp_path: Path, source: KernelSource) -> None:
    first = load_function(source.text, source.name, tmp_path)
    assert load_function(source.text, source.name, tmp_path) is first


def test_where_kernels_are_kept(tmp_path: Path) -> None:
    assert read_cache_directory({"SHARDFUSE_CACHE_DIR": str(tmp_path)}) == tmp_path
    assert read_cache_directory({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "shardfuse"
    for environment in ({}, {"HOME": str(tmp_path / "missing")}):
        assert "shardfuse" in read_cache_directory(environment).name


def test_kernels_go_with_the_programs_that_had_them() -> None:
    """Neither shardfuse nor Triton keeps what is no longer in the table of kernels, whose size is bounded."""
    before = set(linecache.cache)
    for n in range(2, 12):
        with FusionDefinition(backend="triton") as fd:
            x = fd.define_tensor([2, n])
            fd.add_output(fd.ops.sum(fd.ops.exp(x), [1]))
        given = torch.full((2, n), 0.5)
        assert_beside(fd.execute([given])[0], given.exp().sum(1))
    made = {path for path in set(linecache.cache) - before if path.endswith(".py") and "reduction_T2_" in path}
    assert len(made) == 10
    assert load_function.cache_info().maxsize == KERNELS
    load_function.cache_clear()
    assert_beside(fd.execute([given])[0], given.exp().sum(1))  # the program has its own
    assert load_function.cache_info().misses == 0
    del fd, x
    gc.collect()
    assert not made & set(linecache.cache)
