"""Memory that processes of a host share: let go of with a world, and never shared with a process that was forked."""

from __future__ import annotations

import ctypes
import os

from shardfuse.mesh import host_memory

SIZE = 1 << 16


def mapped() -> int:
    """How many mappings of such memory this process has."""
    with open("/proc/self/maps") as file:
        return sum("memfd:shardfuse" in line for line in file)


def word_at(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def test_what_was_opened_is_let_go_of() -> None:
    own = host_memory.allocate(0, SIZE)
    before = mapped()
    for k in range(3):
        address = host_memory.opened(host_memory.exported(own))
        word_at(own).value = k + 1
        assert word_at(address).value == k + 1, "one memory"
        assert mapped() == before + 1
        host_memory.close(address)
        assert mapped() == before
    assert host_memory.allocate(0, SIZE) == own, "the same in the next world"


def test_a_forked_process_has_memory_of_its_own() -> None:
    """It may form a world of its own, beside that of the process that it was forked from."""
    own = host_memory.allocate(0, SIZE)
    word_at(own).value = 7
    child = os.fork()
    if child == 0:
        address = host_memory.allocate(0, SIZE)
        was = word_at(address).value
        word_at(address).value = 9
        os._exit(0 if was == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert word_at(own).value == 7
