"""Triton's key is made once for an installation, and read by every process after; whose cache Triton uses."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from shardfuse.executor.triton_cache import keep_triton_private
from shardfuse.executor.triton_key import remember_triton_key

cache = pytest.importorskip("triton.runtime.cache")
knobs = pytest.importorskip("triton.knobs")


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
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b"\n", b""), whole + b"0", b"\x00\xff"):
        file.write_bytes(damaged)
        monkeypatch.setattr(cache, "triton_key", lambda: made)
        remember_triton_key.cache_clear()
        remember_triton_key(tmp_path)
        assert file.read_bytes() == whole
    remember_triton_key.cache_clear()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    made = cache.triton_key()
    remember_triton_key(tmp_path / "file")
    assert cache.triton_key() == made


@pytest.mark.parametrize("access", [None, 0o700, 0o755])
def test_a_cache_that_only_this_user_writes_is_tritons(tmp_path: Path, access: int | None) -> None:
    place = tmp_path / "above" / "triton"
    if access is not None:
        place.mkdir(parents=True)
        place.chmod(access)
    with knobs.cache.scope(), warnings.catch_warnings():
        warnings.simplefilter("error")
        knobs.cache.dir = str(place)
        keep_triton_private()
        assert knobs.cache.dir == str(place)
    assert place.stat().st_mode & 0o777 == (access or 0o700)


def test_a_cache_that_others_write_is_not_tritons(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        with pytest.warns(UserWarning, match=rf"{tmp_path} is refused: .* mode 0777, .* TRITON_CACHE_DIR; until then"):
            keep_triton_private()
        assert os.stat(knobs.cache.dir).st_mode & 0o777 == 0o700
        assert not list(Path(knobs.cache.dir).iterdir())
        knobs.cache.dir = "/proc/none"
        keep_triton_private()
        assert os.stat(knobs.cache.dir).st_mode & 0o777 == 0o700
    tmp_path.chmod(0o700)
