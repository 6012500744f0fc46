"""Memory of one GPU that processes of other GPUs write to: allocated, exported, and opened by the CUDA driver.

It is what NCCL does between processes of a host (CUDA's inter-process communication).  torch's symmetric memory does as
much behind a private interface, and its first allocation took 2.5 s on 2 x H200 (torch 2.11, 2026-11-23).

Which capture of a CUDA graph a stream is part of, torch does not tell either, nor has it events that replays of graphs
wait for and record.

The context of the current device has to be that of this thread, as it is once torch has used the GPU; a thread that has
none gets that one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

import torch

_HANDLE_BYTES = 64
"""``CU_IPC_HANDLE_SIZE``.  Source: ``cuda.h``."""
_ENABLE_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``.  Source: ``cuda.h``."""
_ATOMICS = 3
"""``CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED``.  Source: ``cuda.h``."""

_IS_CAPTURED = 1
"""``CU_STREAM_CAPTURE_STATUS_ACTIVE``.  Source: ``cuda.h``."""
_NO_CONTEXT = 201
"""``CUDA_ERROR_INVALID_CONTEXT``.  Source: ``cuda.h``."""
_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``.  Source: ``cuda.h``."""
_WITHOUT_TIMES = 2
"""``CU_EVENT_DISABLE_TIMING``.  Source: ``cuda.h``."""
_EXTERNAL = 1
"""``CU_EVENT_WAIT_EXTERNAL``: in a capture, a node of the graph, which each launch of it runs.  Source: ``cuda.h``."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * _HANDLE_BYTES)]


def has_atomics(own: int, other: int) -> bool:
    """Does the link from GPU ``own`` to ``other`` carry atomic operations?  NVLink does, and PCI Express does not."""
    value, devices = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    for device, k in zip(devices, (own, other), strict=True):
        _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(k))
    _call("cuDeviceGetP2PAttribute", ctypes.byref(value), ctypes.c_int(_ATOMICS), *devices)
    return value.value == 1


@cache
def allocate(device: int, size: int) -> int:
    """The address of ``size`` bytes on the current device, whose index is ``device``; the same for the process's life.

    It is never given back: a peer may have it open for as long as it runs.  Raises RuntimeError.
    """
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


def zero(address: int, size: int) -> None:
    """Zero so many bytes, and wait until they are.  Raises RuntimeError."""
    _call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size))
    _call("cuCtxSynchronize")


def exported(address: int) -> bytes:
    """What another process of this host opens the allocation at ``address`` by.  Raises RuntimeError."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def opened(handle: bytes) -> int:
    """The address, in this process, of what another has exported.  Raises RuntimeError."""
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_ENABLE_PEER_ACCESS))
    return address.value


def close(address: int) -> None:
    """Let go of what was opened.  Raises RuntimeError."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def capture_of(stream: int) -> int:
    """The number of the capture that the stream with this handle is part of; 0 for none.  Raises RuntimeError."""
    if not stream:  # the default stream is never captured
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    _call(
        "cuStreamGetCaptureInfo_v2",
        ctypes.c_void_p(stream),
        ctypes.byref(status),
        ctypes.byref(number),
        None,
        None,
        None,
    )
    return number.value if status.value == _IS_CAPTURED else 0


def made_event() -> int:
    """An event that never ends: graphs may wait for it and record it for as long as the process runs.

    Raises RuntimeError.
    """
    event = ctypes.c_void_p()
    with _beside_captures():
        _call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_WITHOUT_TIMES))
    return event.value or 0


def record(event: int, stream: int) -> None:
    """Have the event stand for what is on the stream now, which is not captured.  Raises RuntimeError."""
    with _beside_captures():
        _call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))


def wait_for(event: int, stream: int, *, is_captured: bool) -> None:
    """Have the stream wait for what the event stands for; of a graph that is captured, in each of its launches, for
    what it stands for when the host launches the graph.  Raises RuntimeError."""
    flags = ctypes.c_uint(_EXTERNAL if is_captured else 0)
    _call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), flags)


def record_in_capture(event: int, stream: int, node: int) -> int:
    """Have each launch of the graph that the stream is captured into record the event behind what is on it now.

    Nothing in the graph waits for that.  node: what an earlier call for this capture gave, 0 for the first: the graph
    records the event once, behind all of them.  Returns the node.  Raises RuntimeError.
    """
    status, graph = ctypes.c_int(), ctypes.c_void_p()
    behind, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    _call(
        "cuStreamGetCaptureInfo_v2",
        ctypes.c_void_p(stream),
        ctypes.byref(status),
        None,
        ctypes.byref(graph),
        ctypes.byref(behind),
        ctypes.byref(count),
    )
    if not node:
        made = ctypes.c_void_p()
        _call("cuGraphAddEventRecordNode", ctypes.byref(made), graph, behind, count, ctypes.c_void_p(event))
        return made.value or 0
    to = (ctypes.c_void_p * count.value)(*[node] * count.value)
    _call("cuGraphAddDependencies", graph, behind, to, count)
    return node


@contextmanager
def _beside_captures() -> Generator[None]:
    """What this thread does is no part of what is captured, by whatever thread and in whatever mode."""
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"the CUDA driver is not there: {error}") from error


def _enter_context() -> None:
    """That of the current device is this thread's from now on."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(torch.cuda.current_device()))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)


def _call(name: str, *arguments: object) -> None:
    """Raises RuntimeError with the driver's own words."""
    code = getattr(_driver(), name)(*arguments)
    if code == _NO_CONTEXT:
        _enter_context()
        code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode() or code}")
