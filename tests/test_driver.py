"""What a launch hands to the CUDA driver, seen by a driver that runs nothing."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from shardfuse.errors import KernelLaunchError
from shardfuse.executor import driver as driver_module
from shardfuse.executor.driver import Driver, open_driver
from shardfuse.secure_files import sealed

COMPILER = shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


class Fake:
    """The library and the module that is connected to it; ``fake["last_grid"]`` reads a variable of the former."""

    def __init__(self, directory: Path) -> None:
        library = directory / "libfake.so"
        source = Path(__file__).with_name("fake_driver.c")
        command = [str(COMPILER), "-shared", "-fPIC", "-w", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self.file = str(library)
        self.symbols = ctypes.CDLL(self.file)
        found = open_driver(directory, self.file)
        assert found is not None
        self.driver: Driver = found
        self.otherwise: list[tuple[object, ...]] = []

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.symbols, name).value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.symbols, name).value = value

    def slots(self, count: int) -> list[int]:
        return list((ctypes.c_uint64 * 16).in_dll(self.symbols, "last_slots")[:count])

    def launcher(self, alignments: str, types: str = "", fixed_types: str = "", fixed: tuple[int, ...] = (),
                 cooperative: bool = False) -> Callable[..., None]:  # fmt: skip
        def otherwise(*given: object) -> None:
            self.otherwise.append(given)

        def failed(message: str) -> NoReturn:
            raise KernelLaunchError("kernel", message, 7, 128, 64)

        ctypes.c_uint64.in_dll(self.symbols, "wanted_slots").value = len(alignments) + len(types) + len(fixed) + 2
        return self.driver.launcher(
            4096, 3, 7, 128, 64, cooperative, alignments, types, fixed_types, fixed, otherwise, failed
        )


@pytest.fixture(scope="module")
def module_fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return Fake(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def fake(module_fake: Fake) -> Fake:
    module_fake.otherwise.clear()
    module_fake["status"] = 0
    return module_fake


def aligned(offset: int = 0) -> torch.Tensor:
    """Of bytes, ``offset`` bytes behind an address that 16 divides."""
    memory = torch.zeros(64, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 16 + offset :]


def test_what_a_launch_hands_over(fake: Fake) -> None:
    a, b = aligned(), aligned()
    launch = fake.launcher("ww", "dqi", "qi", (1 << 40, 5))
    before = fake["launches"]
    launch(0x1234, a, b, 2.5, -3, -7)
    assert fake["launches"] == before + 1
    (half,) = struct.unpack("<Q", struct.pack("<d", 2.5))
    minus = struct.unpack("<2Q", struct.pack("<2q", -3, -7))
    assert fake.slots(9) == [a.data_ptr(), b.data_ptr(), half, *minus, 1 << 40, 5, 0, 0]
    names = ("last_grid", "last_threads", "last_shared", "last_stream", "last_function", "last_attributes")
    assert [fake[name] for name in names] == [7, 128, 64, 0x1234, 4096, 0]
    assert not fake.otherwise
    launch(0, b.data_ptr(), a, 2, True, 1)  # an address for a tensor, numbers of other kinds that hold the same
    assert fake.slots(5) == [b.data_ptr(), a.data_ptr(), struct.unpack("<Q", struct.pack("<d", 2.0))[0], 1, 1]


def test_programs_that_wait_for_each_other_are_launched_together(fake: Fake) -> None:
    fake.launcher("w", cooperative=True)(0, aligned())
    assert (fake["last_attributes"], fake["last_attribute"], fake["last_value"]) == (1, 2, 1)
    fake["status"] = 720
    with pytest.raises(KernelLaunchError, match=r"7 programs .* too many blocks in cooperative launch"):
        fake.launcher("w", cooperative=True)(0, aligned())


@pytest.mark.parametrize("stream", [0, None])
def test_what_goes_through_tritons_own_entry(fake: Fake, stream: int | None) -> None:
    launch, before = fake.launcher("ww", "q"), fake["launches"]
    given = (aligned(), aligned(8 if stream == 0 else 0), 4)
    launch(stream, *given)
    assert fake.otherwise == [given]
    assert fake["launches"] == before


def test_one_number_may_lie_anywhere(fake: Fake) -> None:
    launch, before = fake.launcher("we"), fake["launches"]
    given = (aligned(), aligned(8))
    launch(0, *given)
    assert (fake.otherwise, fake["launches"]) == ([], before + 1)
    assert fake.slots(2) == [x.data_ptr() for x in given]
    launch(0, *reversed(given))
    assert fake.otherwise == [given[::-1]]


def test_numbers_that_do_not_fit(fake: Fake) -> None:
    launch, before = fake.launcher("w", "i"), fake["launches"]
    for number, error in ((1 << 31, OverflowError), (1.5, TypeError)):
        with pytest.raises(error):
            launch(0, aligned(), number)
    with pytest.raises(TypeError, match="takes 3 arguments, not 2"):
        launch(0, aligned())
    with pytest.raises(AttributeError):
        launch(0, 0.5, 5)
    with pytest.raises(OverflowError):
        launch(0, -16, 5)
    with pytest.raises(ValueError, match="a type for each number"):
        fake.launcher("w", "", "q", (1, 2))
    assert fake["launches"] == before


def test_a_thread_without_a_context_gets_one(fake: Fake) -> None:
    fake.symbols.leave()
    entered = fake["entered"]
    fake.launcher("w")(0, aligned())
    assert fake["entered"] == entered + 1


def test_threads_launch_at_once(fake: Fake) -> None:
    launch, before, errors = fake.launcher("w", "q"), fake["launches"], list[BaseException]()

    def run() -> None:
        try:
            for k in range(2000):
                launch(0, a, k)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    a = aligned()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert fake["launches"] > before
    assert fake.slots(1) == [a.data_ptr()]


def test_a_kernel_is_loaded(fake: Fake) -> None:
    assert fake.driver.load(b"an image\0", "kernel", 0, 128, 1 << 10) == 4096
    assert ctypes.string_at(ctypes.addressof((ctypes.c_char * 64).in_dll(fake.symbols, "loaded"))) == b"an image"
    fake.driver.load(b"an image\0", "kernel", 0, 128, 200 << 10)
    assert fake["dynamic_shared"] == 232448 - 1024
    for name, threads, shared in (("other", 128, 0), ("kernel", 2048, 0), ("kernel", 128, 230 << 10)):
        with pytest.raises(RuntimeError, match="it is refused"):
            fake.driver.load(b"an image\0", name, 0, threads, shared)


def test_how_many_programs_run_at_once(fake: Fake) -> None:
    assert fake.driver.resident(4096, 0, 128, 100 << 10) == 2 * 132
    with pytest.raises(RuntimeError, match="it is refused"):
        fake.driver.resident(4096, 0, 2048, 1 << 10)


def test_the_module_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="Triton's own entry"):
        assert open_driver(tmp_path, str(tmp_path / "libmissing.so")) is None
    (made,) = tmp_path.iterdir()
    stamp = made.stat().st_mtime_ns
    monkeypatch.setattr(driver_module, "read_c_compiler", lambda: "/nowhere/cc")
    open_driver.cache_clear()
    with pytest.warns(UserWarning, match="libmissing"):
        open_driver(tmp_path, str(tmp_path / "libmissing.so"))
    assert made.stat().st_mtime_ns == stamp
    with pytest.warns(UserWarning, match="nowhere"):
        assert open_driver(tmp_path / "empty") is None


def damages(whole: bytes) -> Iterator[bytes]:
    yield b""
    yield whole[: len(whole) // 2]
    yield whole[:-1]
    yield whole[:4096] + bytes(len(whole) - 4096)
    yield whole + b"\0"
    for at in range(100, len(whole), len(whole) // 60):
        yield whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]


def test_a_module_that_is_not_whole_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    """Loading half of a library is no error of Python's, but the end of the process."""
    assert open_driver(tmp_path, fake.file) is not None
    (made,) = tmp_path.iterdir()
    whole, builds = made.read_bytes(), []

    def build(name: str) -> bytes:
        builds.append(name)
        return whole[:-65]  # what it was compiled to, without the authentication code

    monkeypatch.setattr(driver_module, "build_driver", build)
    monkeypatch.setattr(driver_module, "_load", lambda name, content: module_of(content == whole[:-65]))
    for count, damaged in enumerate(damages(whole), 1):
        made.write_bytes(damaged)
        open_driver.cache_clear()
        assert open_driver(tmp_path, fake.file) is not None
        assert (len(builds), made.read_bytes()) == (count, whole)
    assert count > 60


def module_of(is_whole: bool) -> SimpleNamespace:
    assert is_whole, "damaged bytes are loaded"
    return SimpleNamespace(connect=lambda library: None)


def test_a_module_of_another_user_is_not_loaded(tmp_path: Path, fake: Fake) -> None:
    """In a folder that was open to others, under the very name that is looked for."""
    assert open_driver(tmp_path, fake.file) is not None
    (made,) = tmp_path.iterdir()
    marker, planted = tmp_path / "ran", tmp_path / "planted.c"
    planted.write_text(
        f'#include <fcntl.h>\n__attribute__((constructor)) void run(void) {{ creat("{marker}", 0600); }}\n'
    )
    for mode in (0o700, 0o777):
        subprocess.run([str(COMPILER), "-shared", "-fPIC", str(planted), "-o", str(made)], check=True)
        tmp_path.chmod(mode)
        open_driver.cache_clear()
        sealed._choose.cache_clear()
        with nullcontext() if mode == 0o700 else pytest.warns(UserWarning, match="is refused"):
            assert open_driver(tmp_path, fake.file) is not None
        assert not marker.exists()
    ctypes.CDLL(str(made))
    assert marker.exists(), "loading it runs it"
    sealed._choose.cache_clear()
    tmp_path.chmod(0o700)


def test_a_cache_that_cannot_be_written(tmp_path: Path, fake: Fake) -> None:
    (tmp_path / "file").write_text("in the way")
    assert open_driver(tmp_path / "file", fake.file) is not None


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "read_c_compiler", lambda: "false")
    with pytest.warns(UserWarning, match="Triton's own entry"):
        assert open_driver(tmp_path) is None
    monkeypatch.setattr(driver_module, "read_c_compiler", lambda: None)
    open_driver.cache_clear()
    with pytest.warns(UserWarning, match="CC"):
        assert open_driver(tmp_path) is None


# several at once


class Pair:
    """Two launches, of two tensors and of a tensor and a number, and the batch of both."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.launches = (fake.launcher("ww"), fake.launcher("w", "q"))
        self.launch = fake.driver.batch(self.launches)
        (ctypes.c_uint64 * 8).in_dll(fake.symbols, "wanted_of_node")[:2] = [4, 4]

    def handed_over(self) -> list[list[int]]:
        rows = (ctypes.c_uint64 * 8 * 8).in_dll(self.fake.symbols, "graph_slots")
        return [list(rows[k][:4]) for k in range(2)]

    def counts(self) -> list[int]:
        return [self.fake[name] for name in ("launches", "graphs", "graph_launches", "sets")]


def since(before: list[int], now: list[int]) -> list[int]:
    return [b - a for a, b in zip(before, now, strict=True)]


@pytest.fixture
def pair(fake: Fake) -> Pair:
    for name in ("capturing", "graph_status", "set_status"):
        fake[name] = 0
    return Pair(fake)


def test_a_batch_is_one_graph(pair: Pair) -> None:
    a, b, c, before = aligned(), aligned(), aligned(), pair.counts()
    pair.launch(0x77, a, b, b, 5)
    assert since(before, pair.counts()) == [0, 1, 1, 0]
    assert pair.handed_over() == [[a.data_ptr(), b.data_ptr(), 0, 0], [b.data_ptr(), 5, 0, 0]]
    names = ("chained", "nodes", "last_grid", "last_threads", "last_shared", "last_stream")
    assert [pair.fake[name] for name in names] == [1, 2, 7, 128, 64, 0x77]
    pair.launch(0, a, b, b, 5)
    assert since(before, pair.counts()) == [0, 1, 2, 0]
    pair.launch(0, a, b, c.data_ptr(), 6)  # only the second differs
    assert since(before, pair.counts()) == [0, 1, 3, 1]
    assert pair.handed_over() == [[a.data_ptr(), b.data_ptr(), 0, 0], [c.data_ptr(), 6, 0, 0]]


def test_a_batch_one_by_one(pair: Pair) -> None:
    a, b = aligned(), aligned()
    pair.launch(0, a, b, b, 5)
    before = pair.counts()
    pair.fake["capturing"] = 1
    pair.launch(0, b, b, b, 5)
    assert since(before, pair.counts()) == [2, 0, 0, 0]
    pair.fake["capturing"] = 0
    pair.launch(0, b, b, b, 5)
    assert since(before, pair.counts()) == [2, 0, 1, 1], "what was captured is not what the graph hands over"
    assert pair.handed_over()[0] == [b.data_ptr(), b.data_ptr(), 0, 0]
    odd = aligned(8)
    pair.launch(0, a, b, odd, 5)
    assert since(before, pair.counts()) == [3, 0, 1, 1]
    pair.launch(None, a, b, b, 7)
    assert pair.fake.otherwise == [(odd, 5), (a, b), (b, 7)]


@pytest.mark.parametrize("name", ["graph_status", "set_status"])
def test_a_graph_that_is_refused(pair: Pair, name: str) -> None:
    a, b, before = aligned(), aligned(), pair.counts()
    if name == "set_status":
        pair.launch(0, a, a, a, 1)
    pair.fake[name] = 999
    pair.launch(0, a, b, b, 5)
    pair.fake[name] = 0
    pair.launch(0, a, b, b, 5)
    assert since(before, pair.counts())[0] == 4, "what a graph hands over is not known after an error"
    assert pair.fake.slots(2) == [b.data_ptr(), 5]


def test_errors_of_a_batch(pair: Pair) -> None:
    a = aligned()
    with pytest.raises(TypeError, match="takes 5 arguments, not 3"):
        pair.launch(0, a, a)
    with pytest.raises(TypeError):
        pair.launch(0, a, a, a, 0.5)
    pair.fake["status"] = 5
    with pytest.raises(KernelLaunchError, match="it is refused"):
        pair.launch(0, a, a, a, 1)
    for wrong in (print, pair.launch, pair.fake.launcher("w", cooperative=True)):
        with pytest.raises(TypeError, match="no launch that a batch may hold"):
            pair.fake.driver.batch((pair.launches[0], wrong))


def test_a_batch_on_a_thread_without_a_context_and_its_end(pair: Pair) -> None:
    a, destroyed = aligned(), pair.fake["destroyed"]
    pair.fake.symbols.leave()
    pair.launch(0, a, a, a, 1)
    assert pair.counts()[2] > 0
    del pair.launch
    assert pair.fake["destroyed"] == destroyed + 2
