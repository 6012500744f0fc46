"""What is loaded is what this user wrote: owners, modes, links, keys, and everything that can happen to a file."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardfuse.config import LaunchConfig
from shardfuse.errors import RendezvousError, UnsafeFolderError
from shardfuse.mesh.rendezvous import open_job_store
from shardfuse.secure_files import keep_text, read_private, read_sealed, sealed, write_private, write_sealed
from shardfuse.secure_files.folder import open_folder

OTHER, ANOTHER = 54321, 54322
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
UNTIL_THEN = "until then this process keeps kernels for itself alone"


def forget() -> None:
    """What a process knows is known no more, as in the next process."""
    for cached in (sealed._key, sealed._choose):
        cached.cache_clear()
    sealed._warned.clear()


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for the key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    forget()
    yield tmp_path / "configuration" / "shardfuse"
    forget()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir(0o700)
    return tmp_path / "cache"


@pytest.fixture
def open_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that any user can make files in and, as in the temporary directory, nobody else can remove."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def as_user(number: int, home: Path | None, work: Callable[[], None]) -> None:
    """In a process of that user, who has this home or none."""

    def run() -> None:
        os.setgid(number)
        os.setuid(number)
        os.environ.pop("XDG_CONFIG_HOME", None)
        os.environ.pop("HOME", None)
        if home is not None:
            os.environ["HOME"] = str(home)
        forget()
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0


# folders


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        write_sealed(tmp_path / "a" / "b", "sub/name", b"content")
    finally:
        os.umask(previous)
    assert mode(tmp_path / "a" / "b") == 0o700
    assert mode(tmp_path / "a" / "b" / "sub" / "name") == 0o600
    assert read_sealed(tmp_path / "a" / "b", "sub/name") == b"content"


@pytest.mark.parametrize("access", [0o777, 0o770, 0o720, 0o702, 0o1777, 0o755, 0o750, 0o711])
def test_a_folder_that_others_can_enter_is_refused(place: Path, access: int) -> None:
    write_sealed(place, "name", b"before")
    place.chmod(access)
    forget()
    said = rf"folder {place} is refused: it belongs to user {os.geteuid()} .* has mode {access:04o}, expected .* 0700: "
    with pytest.warns(UserWarning, match=rf"{said}run `chmod 700 {place}`, or name another .*; {UNTIL_THEN}"):
        assert read_sealed(place, "name") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        write_sealed(place, "name", b"after")
        assert read_sealed(place, "name") == b"after", "the process keeps its own"
    assert [path.name for path in place.iterdir()] == ["name"]
    place.chmod(0o700)
    forget()
    assert read_sealed(place, "name") == b"before"


@pytest.mark.parametrize("access", [0o755, 0o711, 0o2750])
def test_the_default_folder_that_others_could_only_read_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: int
) -> None:
    monkeypatch.delenv("SHARDFUSE_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    default = tmp_path / ".cache" / "shardfuse"
    default.mkdir(parents=True)
    default.chmod(access)
    write_sealed(default, "name", b"content")
    assert mode(default) & 0o077 == 0
    forget()
    assert read_sealed(default, "name") == b"content"
    default.chmod(0o775)
    forget()
    with pytest.warns(UserWarning, match="mode 0775"):
        assert read_sealed(default, "name") is None


@needs_root
def test_a_folder_of_another_user_is_refused(place: Path) -> None:
    write_sealed(place, "name", b"before")
    os.chown(place, OTHER, OTHER)
    forget()
    with pytest.warns(
        UserWarning, match=rf"{place} is refused: it belongs to user {OTHER} and has mode 0700.*: remove it, or"
    ):
        assert read_sealed(place, "name") is None
    os.chown(place, 0, 0)
    forget()
    os.chown(place / "name", OTHER, OTHER)
    assert read_sealed(place, "name") is None, "a file of another user"


@needs_root
def test_links(place: Path, tmp_path: Path) -> None:
    write_sealed(place, "name", b"content")
    own, others = tmp_path / "own", tmp_path / "others"
    own.symlink_to(place)
    others.symlink_to(place)
    os.lchown(others, OTHER, OTHER)
    assert read_sealed(own, "name") == b"content", "a home is often a link to a larger disk"
    with pytest.warns(UserWarning, match=f"others is refused: it is a symbolic link that user {OTHER} made"):
        assert read_sealed(others, "name") is None
    (place / "again").symlink_to(place / "name")
    assert read_sealed(place, "again") is None
    (place / "again").unlink()
    os.mkfifo(place / "again")
    assert read_sealed(place, "again") is None, "nobody waits for a writer of a pipe"


@needs_root
def test_users_who_share_a_temporary_directory(open_place: Path) -> None:
    """One makes the other's folder before he comes, and what he would load in there."""
    target = open_place / f"shardfuse-{ANOTHER}"

    def plant() -> None:
        target.mkdir()
        target.chmod(0o777)
        (target / "name").write_bytes(b"planted" + b"\n" + b"0" * 64)
        write_sealed(target, "other", b"sealed by his own key")

    def come() -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert read_sealed(target, "name") is None
            assert read_sealed(target, "other") is None
            write_sealed(target, "name", b"own")
            assert read_sealed(target, "name") == b"own"
        assert sum(f"belongs to user {OTHER} and has mode 0777" in str(w.message) for w in said) == 1
        with pytest.raises(UnsafeFolderError, match="set MASTER_ADDR and MASTER_PORT"):
            write_private(target / "rendezvous", b"", "set MASTER_ADDR and MASTER_PORT")
        with pytest.raises(UnsafeFolderError, match=re.escape(str(target))):
            read_private(target / "rendezvous", "")

    as_user(OTHER, None, plant)
    as_user(ANOTHER, None, come)
    assert (target / "name").read_bytes().startswith(b"planted")


@needs_root
def test_a_folder_that_is_exchanged_under_the_process(open_place: Path) -> None:
    """The folder above it is somebody else's, who puts his own in its place."""
    above = open_place / "above"
    above.mkdir()
    above.chmod(0o777)
    os.chown(above, OTHER, OTHER)
    place = above / "cache"
    write_sealed(place, "name", b"own")
    place.rename(above / "aside")
    place.mkdir(0o700)
    (place / "name").write_bytes((above / "aside" / "name").read_bytes())
    os.chown(place, OTHER, OTHER)
    assert read_sealed(place, "name") is None
    with pytest.warns(UserWarning, match=f"nothing can be kept in {place}: the folder {place} is refused"):
        write_sealed(place, "name", b"later")
    assert b"later" not in (place / "name").read_bytes()


@needs_root
def test_a_cache_that_cannot_be_written_is_read(open_place: Path) -> None:
    def work() -> None:
        home = open_place / "home"
        home.mkdir(0o700)
        place = home / "cache"
        write_sealed(place, "name", b"content")
        place.chmod(0o500)
        home.chmod(0o500)
        forget()
        missing = home / "missing"
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                write_sealed(place, "another", b"content")
                assert (read_sealed(place, "name"), read_sealed(place, "another")) == (b"content", None)
                assert keep_text(place, "text.py", "text") == place / "text.py"
                write_sealed(missing, "name", b"content")
                assert read_sealed(missing, "name") == b"content", "for this process"
        remedy = "Permission denied: make it a folder of yours with room in it, or name another by SHARDFUSE_CACHE_DIR"
        assert [str(w.message) for w in warned] == [
            f"nothing can be kept in {place}: {remedy}; each process compiles it again",
            f"{missing} cannot be opened: {remedy}; {UNTIL_THEN}",
        ]
        home.chmod(0o700)

    as_user(OTHER, open_place / "home", work)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_do_not_meet_where_others_can_write(open_place: Path, rank: int) -> None:
    """A port that somebody else says would be his store."""
    folder = open_place / f"shardfuse-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    launch = LaunchConfig(rank, 2, rank, 2, "mpirun", "job")
    said = rf"{folder} is refused: .* mode 0777, .*, or set MASTER_ADDR and MASTER_PORT"
    with pytest.raises(UnsafeFolderError, match=said):
        open_job_store(launch, 20.0)
    assert not list(folder.iterdir())
    folder.chmod(0o755)
    with pytest.raises(RendezvousError):
        open_job_store(launch, 0.2)
    assert mode(folder) == 0o700


# the key


def test_the_key_is_the_users(place: Path, configuration: Path) -> None:
    write_sealed(place, "name", b"content")
    key = configuration / "key"
    assert (mode(configuration), mode(key), key.stat().st_size) == (0o700, 0o600, 32)
    forget()
    assert read_sealed(place, "name") == b"content"
    key.unlink()
    forget()
    assert read_sealed(place, "name") is None


@pytest.mark.parametrize("damage", ["short", "long", "writable", "owner", "folder"])
def test_a_key_that_is_not_safe_is_made_anew(place: Path, configuration: Path, damage: str) -> None:
    write_sealed(place, "name", b"content")
    key = configuration / "key"
    before = key.read_bytes()
    match damage:
        case "short":
            key.write_bytes(before[:-1])
        case "long":
            key.write_bytes(before + b"0")
        case "writable":
            key.chmod(0o620)
        case "owner":
            if os.geteuid():
                pytest.skip("only root can be somebody else")
            os.chown(key, OTHER, OTHER)
        case _:
            configuration.chmod(0o755)  # closed: nobody else could write, and the key has a mode of its own
    forget()
    assert read_sealed(place, "name") == (b"content" if damage == "folder" else None)
    assert mode(configuration) == 0o700
    assert (mode(key), key.stat().st_uid, key.stat().st_size) == (0o600, os.geteuid(), 32)
    assert (key.read_bytes() == before) == (damage == "folder")


def test_a_key_that_cannot_be_kept(place: Path, configuration: Path) -> None:
    write_sealed(place, "name", b"by the key that was")
    configuration.chmod(0o770)
    for value in (b"first", b"second"):
        forget()
        with pytest.warns(UserWarning, match=rf"key that vouches .* {configuration} is refused: .* XDG_CONFIG_HOME"):
            assert read_sealed(place, "name") is None, "nothing vouches for what another process left"
        write_sealed(place, "name", value)
        assert read_sealed(place, "name") == value
    assert [path.name for path in configuration.iterdir()] == ["key"]


# what happens to files


def damages(whole: bytes, other: bytes, generator: random.Random) -> Iterator[bytes]:
    """Without end."""
    while True:
        at = generator.randrange(len(whole))
        flipped = bytearray(whole)
        flipped[at] ^= 1 << generator.randrange(8)
        yield bytes(flipped)
        yield whole[:at]
        yield whole[:at] + b"\0" * (len(whole) - at)
        yield whole[:at] + generator.randbytes(1) + whole[at:]
        yield whole[at:] + whole[:at] if at else b""
        yield other
        yield whole + whole


def test_nothing_that_was_damaged_is_loaded(place: Path) -> None:
    generator = random.Random(0)
    tried = 0
    for content in (b"", b"x", generator.randbytes(1 << 14), b"line\n" * 99):
        write_sealed(place, "name", content)
        write_sealed(place, "other", content + b"other")
        whole, other = (place / "name").read_bytes(), (place / "other").read_bytes()
        for damaged, _ in zip(damages(whole, other, generator), range(70), strict=False):
            if damaged != whole:
                (place / "name").write_bytes(damaged)
                assert read_sealed(place, "name") is None
                tried += 1
        write_sealed(place, "name", content)
        assert read_sealed(place, "name") == content
    assert tried >= 200


def test_a_file_under_another_name_is_not_loaded(place: Path) -> None:
    write_sealed(place, "name", b"content")
    shutil.copy(place / "name", place / "another")
    assert read_sealed(place, "another") is None


def _write(place: str, own: int) -> None:
    forget()
    for k in range(50):
        for name in ("shared", f"own{own}"):
            write_sealed(Path(place), name, b"%d" % own * (1 + k * 100))
            found = read_sealed(Path(place), name)
            assert found is not None
            assert len(set(found)) == 1, "of one writer, whole"


def test_many_writers(place: Path, configuration: Path) -> None:
    """They begin without a key, and all get the same."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(str(place), k)) for k in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert sorted(path.name for path in place.iterdir()) == sorted(["shared", *(f"own{k}" for k in range(8))])
    assert [path.name for path in configuration.iterdir()] == ["key"]
    for k in range(8):
        assert read_sealed(place, f"own{k}") == b"%d" % k * 4901


def test_a_folder_is_left_open_no_longer_than_needed(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        write_sealed(place, "name", b"content")
        read_sealed(place, "name")
        place.chmod(0o777)
        with pytest.raises(UnsafeFolderError), open_folder(place, ""):
            pass
        place.chmod(0o700)
    assert len(os.listdir("/proc/self/fd")) == before
