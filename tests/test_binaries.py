"""Compiled kernels on disk, and the cache that bound programs are found in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardfuse.config import read_compiler_settings
from shardfuse.executor import binaries
from shardfuse.executor.binaries import Asked, Binary, binary_of
from shardfuse.executor.cache import LRUCache

ASKED = Asked("the text", "kernel", (torch.float32, torch.float32), "ww", "dqq", (("num_warps", 4),), (9, 0))
IMAGE = b"\x00\n\xff cubin \n\n"


def by_triton(**other: object) -> Any:
    """What Triton gives; ``other``: of its metadata."""
    signature = {"x": "*fp32", "y": "*fp32", "s": "fp64", "k": "i64", "B": "constexpr", "n": "i32"}
    plain = {"name": "kernel", "shared": 512, "num_warps": 4, "num_ctas": 1, "launch_pdl": False}
    metadata = SimpleNamespace(**{**plain, "global_scratch_size": 0, "profile_scratch_size": 0, **other})
    return SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature=signature), asm={"cubin": IMAGE})


def never() -> Any:
    raise AssertionError("it is compiled again")


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    made = binary_of(ASKED, tmp_path, by_triton)
    assert made == Binary("kernel", "dqi", 128, 512, IMAGE)
    assert binary_of(ASKED, tmp_path, never) == made


@pytest.mark.parametrize("damage", [b"", b"no line", b"\n", None], ids=str)
def test_a_file_that_is_not_whole(tmp_path: Path, damage: bytes | None) -> None:
    made = binary_of(ASKED, tmp_path, by_triton)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] if damage is None else damage)
    assert binary_of(ASKED, tmp_path, by_triton) == made
    assert file.read_bytes() == whole


def test_what_tells_kernels_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary_of(ASKED, tmp_path, by_triton)
    changed = {
        "text": "another",
        "pointers": (torch.float32, torch.float16),
        "alignments": "we",
        "options": (("num_warps", 8),),
        "capability": (10, 0),
    }
    for field, value in changed.items():
        binary_of(Asked(**{**vars(ASKED), field: value}), tmp_path, by_triton)
    assert len(list(tmp_path.iterdir())) == 1 + len(changed)
    monkeypatch.setattr(binaries, "read_compiler_settings", lambda: ("TRITON_DISABLE_LINE_INFO=1",))
    with pytest.raises(AssertionError, match="compiled again"):
        binary_of(ASKED, tmp_path, never)
    monkeypatch.undo()
    monkeypatch.setattr(binaries, "installed_triton", lambda: "another Triton")
    with pytest.raises(AssertionError, match="compiled again"):
        binary_of(ASKED, tmp_path, never)


@pytest.mark.parametrize("other", [{"global_scratch_size": 128}, {"launch_pdl": True}, {"num_ctas": 2}], ids=str)
def test_what_only_triton_launches(tmp_path: Path, other: dict[str, object]) -> None:
    assert binary_of(ASKED, tmp_path, lambda: by_triton(**other)) is None
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert binary_of(ASKED, tmp_path / "file", by_triton) == Binary("kernel", "dqi", 128, 512, IMAGE)


def test_settings_of_the_compiler() -> None:
    environment = {"TRITON_B": "1", "TRITON_CACHE_DIR": "/here", "MLIR_A": "2", "HOME": "/", "LLVM_C": "3"}
    assert read_compiler_settings(environment) == ("LLVM_C=3", "MLIR_A=2", "TRITON_B=1")


def test_the_assembler_that_inductor_names_when_it_compiles_is_no_setting() -> None:
    """A process that finds its graphs compiled does not name it, and looks for the same kernels."""
    of_torch = Path(torch.__file__).parent / "bin" / "ptxas"
    assert read_compiler_settings({"TRITON_PTXAS_PATH": str(of_torch)}) == ()
    assert read_compiler_settings({"TRITON_PTXAS_PATH": "/my/ptxas"}) == ("TRITON_PTXAS_PATH=/my/ptxas",)


def test_the_half_that_was_used_last_stays() -> None:
    cache: LRUCache[int, str] = LRUCache(8)
    for k in range(100):
        cache.put(k, str(k))
        assert cache.get(0) == "0", "it is used all the time"
        assert len(cache) <= 8
    assert [cache.get(k) for k in (97, 98, 99)] == ["97", "98", "99"]
    assert cache.get(50) is None
    cache.put(99, "again")
    assert cache.get(99) == "again"
