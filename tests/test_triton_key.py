"""Triton's key is made once for an installation, and read by every process after."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardfuse.executor.triton_key import remember_triton_key

cache = pytest.importorskip("triton.runtime.cache")


def never() -> str:
    raise AssertionError("the key is made anew")


def test_the_key_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cache.triton_key()
    monkeypatch.setattr(cache, "triton_key", cache.triton_key)  # put back at the end
    remember_triton_key(tmp_path)
    assert cache.triton_key() == made
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr(cache, "triton_key", never)
    remember_triton_key.cache_clear()
    remember_triton_key(tmp_path)
    assert cache.triton_key() == made
    whole = file.read_text()
    for damaged in ("", whole[:-1], whole.replace("\n", ""), whole + "0", "\x00\xff"):
        file.write_text(damaged)
        monkeypatch.setattr(cache, "triton_key", lambda: made)
        remember_triton_key.cache_clear()
        remember_triton_key(tmp_path)
        assert file.read_text() == whole
    remember_triton_key.cache_clear()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    made = cache.triton_key()
    remember_triton_key(tmp_path / "file")
    assert cache.triton_key() == made
