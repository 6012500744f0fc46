"""Calls that a definition refuses, each in one sentence, and what a definition tells of its runs."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import pickle
import pkgutil
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_answers import assert_beside

import shardfuse
import shardfuse.compat.nvfuser_direct as nvfuser_direct
from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, ShardfuseError, TensorView
from shardfuse.compiler import compile_fusion
from shardfuse.errors import (
    ArgumentError,
    AxisError,
    DefinitionError,
    InputError,
    NotPickledError,
    PeerLostError,
    ScheduleError,
    ShardAxisError,
)
from shardfuse.executor.cache import LRUCache
from shardfuse.frontend import executor_cache
from shardfuse.rank_errors import SimulationError


def defined() -> tuple[FusionDefinition, TensorView, TensorView]:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        y = fd.ops.exp(x)
        fd.add_output(y)
    return fd, x, y


def refused(call: Callable[[], object], kind: type[ShardfuseError], *said: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    sentence = str(raised.value).partition("\n  at ")[0]  # below it stand the lines that made what it names
    assert all(part in sentence for part in said), sentence
    assert "\n" not in sentence
    assert not getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize("has_run", [False, True], ids=["after with", "after a run"])
def test_nothing_is_recorded_once_a_definition_has_ended(has_run: bool) -> None:
    fd, x, y = defined()
    given = torch.ones(2, 3)
    if has_run:
        fd.execute([given])
    when = "the fusion was first run" if has_run else "`with` block had ended"
    refused(lambda: fd.ops.exp(x), DefinitionError, "ops.exp", when)
    refused(lambda: fd.ops.add(x, 1.0), DefinitionError, "ops.add", when)
    refused(lambda: fd.ops.full([2], 1.0, DataType.Float), DefinitionError, "ops.full", when)
    refused(lambda: fd.ops.matmul(x, y), DefinitionError, "ops.matmul", when)
    refused(lambda: fd.define_tensor([3]), DefinitionError, "define_tensor", when)
    refused(lambda: fd.define_scalar(), DefinitionError, "define_scalar", when)
    refused(lambda: fd.add_output(y), DefinitionError, "add_output", when)
    assert torch.equal(fd.execute([given])[0], given.exp())


def test_a_definition_that_has_not_run_goes_on_in_another_with() -> None:
    fd, x, _ = defined()
    with fd:
        fd.add_output(fd.ops.neg(x))
    given = torch.ones(2, 3)
    assert len(fd.execute([given])) == 2
    with fd:
        refused(lambda: fd.ops.neg(x), DefinitionError, "the fusion was first run")


def test_a_definition_without_a_with_is_open_until_it_runs() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([3])
    fd.add_output(fd.ops.neg(x))
    assert torch.equal(fd.execute([torch.ones(3)])[0], -torch.ones(3))
    refused(lambda: fd.ops.neg(x), DefinitionError, "the fusion was first run")


CHANGES: dict[str, Callable[[TensorView], object]] = {
    "set_device_mesh": lambda tv: tv.set_device_mesh(DeviceMesh([0])),
    "split": lambda tv: tv.split(0, 2),
    "outer_split": lambda tv: tv.outer_split(0, 2),
    "merge": lambda tv: tv.merge(0),
    "reorder": lambda tv: tv.reorder([1, 0]),
    "parallelize": lambda tv: tv.axis(0).parallelize(ParallelType.mesh_x),
    "swizzle1d": lambda tv: tv.swizzle1d(0, ParallelType.mesh_x),
    "set_allocation_domain": lambda tv: tv.set_allocation_domain([tv.axis(1), tv.axis(0)]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tensor_is_not_rescheduled_after_a_run(name: str) -> None:
    fd, x, y = defined()
    given = torch.ones(2, 3)
    fd.execute([given])
    text = repr(fd)
    for tv in (x, y):
        refused(lambda tv=tv: CHANGES[name](tv), ScheduleError, tv.name, "has been run", "before the first run")
    assert repr(fd) == text
    assert torch.equal(fd.execute([given])[0], given.exp())


def test_a_sharding_that_comes_too_late_is_refused_on_a_mesh() -> None:
    def run(rank: int, size: int) -> None:
        mesh = DeviceMesh(list(range(size)))
        with FusionDefinition() as fd:
            x = fd.define_tensor([4, 4])
            x.set_device_mesh(mesh)
            fd.add_output(fd.ops.sum(x, [0]))
        whole = torch.arange(16.0).reshape(4, 4)
        for given in (whole, distribute_tensor(whole, init_device_mesh("cpu", (size,)), [Replicate()])):
            fd.execute([given])
            refused(lambda: x.outer_split(0, size), ScheduleError, "T0.split", "has been run")
            refused(lambda: x.axis(0).parallelize(ParallelType.mesh_x), ScheduleError, "T0.parallelize")

    run_ranks(2, run)


def test_compat_refuses_it_too() -> None:
    with nvfuser_direct.FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, -1], contiguity=True)
        fd.add_output(fd.ops.exp(x))
    fd.execute([torch.ones(2, 3)])
    for call in (lambda: x.set_device_mesh(DeviceMesh([0])), lambda: fd.ops.exp(x), lambda: x.split(0, 2)):
        with pytest.raises(RuntimeError, match=r"run"):
            call()
    with nvfuser_direct.FusionDefinition() as other, pytest.raises(RuntimeError, match="another definition"):
        other.ops.exp(x)


def test_a_tensor_of_another_definition_is_refused() -> None:
    other, x, y = defined()
    with FusionDefinition() as fd:
        z, n = fd.define_tensor([2, 3]), other.fusion.new_scalar(DataType.Int)
        refused(lambda: fd.ops.add(z, x), DefinitionError, "ops.add", "T0", "another definition")
        refused(lambda: fd.ops.sum(y, [0]), DefinitionError, "ops.sum", "T1", "another definition")
        refused(lambda: fd.ops.cat([z, y], 0), DefinitionError, "ops.cat", "another definition")
        refused(lambda: fd.ops.where(fd.ops.gt(z, 0.0), z, y), DefinitionError, "ops.where", "another definition")
        refused(lambda: fd.ops.mul(z, n), DefinitionError, "ops.mul", "S0", "another definition")
        refused(lambda: fd.ops.full([n], 0.0, DataType.Float), DefinitionError, "ops.full", "another definition")
        refused(lambda: fd.add_output(y), DefinitionError, "add_output", "another definition")
        refused(lambda: fd.add_output(fd.ops.neg(z), alias_input=x), DefinitionError, "alias_input=T0")
        fd.add_output(fd.ops.neg(z))
    given = torch.ones(2, 3)
    refused(lambda: fd.execute([x]), InputError, "input 0, T0", "a TensorView")
    refused(lambda: fd.execute([given], sizes={x: [2, 3]}), DefinitionError, "sizes", "T0")
    refused(lambda: fd.execute([given], sizes={z: [2]}), DefinitionError, "sizes", "2 unsharded sizes")
    refused(lambda: fd.explain(sizes={y: [2, 3]}), DefinitionError, "sizes", "T1")
    assert torch.equal(fd.execute([given])[0], -given)


@pytest.mark.parametrize("backend", ["bogus", "cuda", "Triton", 1, ""])
def test_a_backend_that_is_none_is_refused(backend: object) -> None:
    refused(lambda: FusionDefinition(backend=backend), DefinitionError, repr(backend), "'triton', 'torch'")


# what is told of the last run


def rows(fd: FusionDefinition) -> str:
    """The shape that the plan of the last run has for T0."""
    return next(line for line in fd.last_trace().splitlines() if "T0" in line)


BAD_TENSORS = {
    "size": torch.ones(2, 9),
    "dims": torch.ones(8),
    "dtype": torch.ones(2, 8).double(),
    "strides": torch.ones(8, 2).t(),
    "sparse": torch.ones(2, 8).to_sparse(),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_explain_refuses_what_execute_refuses(name: str) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        fd.add_output(fd.ops.sum(x, [1]))
    sentences: list[str] = []
    for call in (fd.explain, fd.execute, fd.explain):  # before a plan of the right size is there, and after
        with pytest.raises(InputError) as raised:
            call([BAD_TENSORS[name]])
        sentences.append(str(raised.value))
    assert sentences == sentences[:1] * 3
    assert "T0" in sentences[0]
    assert fd.explain([torch.ones(2, 8)]).kernels == 1


def test_explain_refuses_what_is_no_share_of_this_rank() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        fd.add_output(fd.ops.exp(x))
        x.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(1, 2)
        x.axis(1).parallelize(ParallelType.mesh_x)
    refused(lambda: fd.explain([torch.ones(2, 8)]), InputError, "input 0, T0", "shape [2, 4]", "unsharded [2, 8]")
    assert fd.explain([torch.ones(2, 4)]).kernels == 1


def test_explain_and_trace_tell_of_the_last_run() -> None:
    fd, x, _ = defined()
    a, b = torch.ones(2, 3), torch.ones(40, 50)
    texts = {}
    for name, given in (("a", a), ("b", b)):
        fd.execute([given])
        texts[name] = str(fd.explain()), fd.last_trace()
    assert texts["a"][0] != texts["b"][0]
    fd.execute([a])  # found, not made
    assert (str(fd.explain()), fd.last_trace()) == texts["a"]
    assert str(fd.explain([b])) == texts["b"][0]
    assert str(fd.explain(sizes={x: [40, 50]})) == texts["b"][0]
    assert (str(fd.explain()), fd.last_trace()) == texts["a"], "explain(inputs) is no run"
    with pytest.raises(InputError):
        fd.execute([b.double()])
    assert (str(fd.explain()), fd.last_trace()) == texts["a"], "nor is a call that was refused"


def test_explain_tells_of_the_last_run_of_dtensors_and_of_plain_tensors() -> None:
    def run(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (size,))
        fd, _, _ = defined()
        plain = torch.ones(6, 4)
        rows, columns = (distribute_tensor(plain, mesh, [Shard(k)]) for k in range(2))
        texts = []
        for given in (plain, rows, columns):
            fd.execute([given])
            texts.append(fd.last_trace())
        assert len(set(texts)) == 3
        for k, given in ((1, rows), (0, plain), (2, columns), (1, rows)):
            fd.execute([given])
            assert fd.last_trace() == texts[k]
            fd.explain([columns])
            assert fd.last_trace() == texts[k], "explain(inputs) is no run"
            with pytest.raises(InputError):
                fd.execute([distribute_tensor(plain.double(), mesh, [Shard(0)])])
            assert fd.last_trace() == texts[k], "nor is a call that was refused"

    run_ranks(2, run)


# tables


def test_tables_of_a_fusion_keep_what_was_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_cache, "PROGRAMS", 8)
    fd, _, _ = defined()
    for n in range(1, 41):
        given = torch.full((n, 2), 0.5)
        assert_beside(fd.execute([given])[0], given.exp())
        fd.execute([torch.ones(1, 2)])
        assert fd.fec.is_compiled([torch.ones(1, 2)]), "used in every turn"
    assert len(fd.fec.programs) <= 8
    assert len(fd.fec.plans) <= 8
    assert not fd.fec.is_compiled([torch.ones(2, 2)])


def test_the_least_recently_used_goes() -> None:
    table: LRUCache[int, int] = LRUCache(8)
    for k in range(100):
        table.put(k, k)
        assert table.get(0 if k == 0 else k - 1) is not None
        assert len(table) <= 8
    assert table.get(50) is None


def test_memory_does_not_grow_with_the_sizes_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_cache, "PROGRAMS", 8)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.mul(x, fd.ops.sum(x, [1], keepdim=True)))

    def objects_after(sizes: range) -> int:
        for n in sizes:
            fd.execute([torch.ones(n, 3)])
            fd.explain()
        gc.collect()
        return len(gc.get_objects())

    full = objects_after(range(1, 300))  # the tables of the compiler's stages hold up to 1024 entries
    last = objects_after(range(300, 400))
    assert last < 1.01 * full, f"{full} objects, and after 100 more sizes {last}"


def test_no_table_of_a_module_grows_without_bound() -> None:
    """But for those that hold one thing, or one for each driver, folder, device, stream, op, type, or our functions."""
    for module in pkgutil.walk_packages(shardfuse.__path__, "shardfuse."):
        if not module.name.endswith((".__main__", ".simulate", ".torchtitan_norms")):
            importlib.import_module(module.name)
    unbounded = {
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if name.startswith("shardfuse.")
        for attribute, value in vars(module).items()
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == name
        if value.cache_parameters()["maxsize"] is None
    }
    assert unbounded == {
        "shardfuse.compile.aten_collectives.collective_ops",
        "shardfuse.compile.aten_table.aten_ops",
        "shardfuse.compile.cast_lowering.register",
        "shardfuse.compile.kept_regions.sources_hash",
        "shardfuse.compile.random_op.register",
        "shardfuse.compile.region_lowering.register",
        "shardfuse.executor.driver.open_driver",
        "shardfuse.executor.gpu_clock.clock_of",
        "shardfuse.executor.streams.communication_stream",
        "shardfuse.executor.triton_key.installed_triton",
        "shardfuse.executor.triton_key.remember_triton_key",
        "shardfuse.ir.base_op._told_of",
        "shardfuse.kernel_functions._closure",
        "shardfuse.kernel_functions._library",
        "shardfuse.mesh.host_memory._allocated",
        "shardfuse.mesh.peer_memory._driver",
        "shardfuse.mesh.peer_memory.allocate",
        "shardfuse.mesh.rendezvous.open_job_store",
        "shardfuse.nn.symbolic_strides.mend_symbolic_strides",
        "shardfuse.ops.table.computes",
        "shardfuse.optim.kernel_text._file_text",
        "shardfuse.secure_files.sealed._choose",
        "shardfuse.secure_files.sealed._key",
    }


# threads


def test_threads_come_to_the_first_run_of_a_fusion_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def counted(*args: object, **named: object) -> object:
        made.append(args)
        return compile_fusion(*args, **named)

    monkeypatch.setattr(executor_cache, "compile_fusion", counted)
    for turn in range(5):
        fd, _, _ = defined()
        given = [torch.full((k % 3 + 1, 4), k / 8) for k in range(8)]
        found: dict[int, torch.Tensor] = {}
        start = threading.Barrier(len(given))

        def run(k: int, fd=fd, given=given, found=found, start=start) -> None:
            start.wait()
            (found[k],) = fd.execute([given[k]])

        threads = [threading.Thread(target=run, args=(k,)) for k in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for k, x in enumerate(given):
            assert_beside(found[k], x.exp())
        assert len(made) == 3 * (turn + 1), "each size once"


def test_a_definition_is_copied_and_not_pickled() -> None:
    x = torch.arange(3.0)
    for has_run in (False, True):
        with FusionDefinition() as fd:
            fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
        if has_run:
            fd.execute([x])
        refused(
            lambda fd=fd: pickle.dumps(fd), NotPickledError, "a FusionDefinition is not pickled", "repro_script_for"
        )
        assert torch.equal(copy.deepcopy(fd).execute([x])[0], -x)
        assert torch.equal(copy.copy(fd).execute([x])[0], -x)


def test_storage_is_said_of_all_axes() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6])
        y = fd.ops.neg(x)
        for axes in ([x.axis(0)], [x.axis(0), x.axis(0)], [x.axis(0), x.axis(1), x.axis(0)]):
            refused(lambda axes=axes: x.set_allocation_domain(axes), ScheduleError, "not all of T0 is there, each once")
        refused(lambda: y.set_allocation_domain([x.axis(1), x.axis(0)]), ScheduleError, "these are axes of T0")
        x.split(1, 2)
        refused(lambda: x.set_allocation_domain(x.get_loop_domain()[:2]), ScheduleError, "not all of T0")
        mixed = [x.get_logical_domain()[1], *x.get_loop_domain()[:2]]
        refused(lambda: x.set_allocation_domain(mixed), ScheduleError, "not all of T0")
        x.set_allocation_domain(x.get_logical_domain()[::-1])
        x.set_allocation_domain(x.get_loop_domain())
        x.merge(0, 1)
        x.set_allocation_domain(x.get_loop_domain())
        refused(lambda: x.merge(0, 0), ScheduleError, "merge: axis i0i1o with itself", "two different ones")
        refused(lambda: x.merge(1), AxisError, "no loop axis 2: it has 2")


def test_an_inference_tensor_is_not_written_to() -> None:
    """Also where a program of such a layout is there already."""
    with torch.inference_mode():
        x = torch.ones(4)
    with FusionDefinition() as fd:
        t = fd.define_tensor([4])
        fd.add_output(fd.ops.add(t, 1.0), alias_input=t)
    for _ in range(2):
        refused(lambda: fd.execute([x]), InputError, "input 0, T0, ", "a tensor made in inference mode")
        plain = torch.ones(4)
        fd.execute([plain])
        assert torch.equal(plain, torch.full((4,), 2.0))
    with torch.inference_mode():
        fd.execute([x])
    assert torch.equal(x, torch.full((4,), 2.0))


def test_arguments_of_another_kind() -> None:
    with FusionDefinition() as fd:
        t = fd.define_tensor([-1, 4])
        fd.add_output(fd.ops.neg(t))
    x, mesh = torch.ones(2, 4), DeviceMesh([0, 1])
    refused(lambda: fd.execute([x], sizes={t: (-1, 4)}), DefinitionError, "[-1, 4] for T0", "sizes of 0 or more")
    refused(lambda: DeviceMesh.from_torch(None), ArgumentError, "from_torch: mesh is None")  # type: ignore[arg-type]
    refused(lambda: mesh.coordinate("a"), ArgumentError, "coordinate: rank is 'a'")  # type: ignore[arg-type]
    assert (mesh.coordinate(1), mesh.coordinate(2)) == ((1,), None)
    refused(lambda: shardfuse.simulate(None), SimulationError, "fn=None: pass a function")  # type: ignore[arg-type]
    refused(lambda: mesh.shard_tensor(torch.ones(()), 0), ShardAxisError, "a single number is not sharded")


def test_sizes_that_are_wrong_on_one_rank_are_told_to_the_other() -> None:
    def run(rank: int, size: int) -> None:
        with FusionDefinition() as fd:
            t = fd.define_tensor([-1, 4])
            fd.add_output(fd.ops.sum(t, [0]))
        t.set_device_mesh(DeviceMesh([0, 1]))
        t.outer_split(0, 2, uneven=True)
        t.axis(0).parallelize(ParallelType.mesh_x)
        with pytest.raises(DefinitionError if rank else PeerLostError, match="sizes of 0 or more"):
            fd.execute([torch.ones(2, 4)], sizes={t: (-4 if rank else 4, 4)})

    run_ranks(2, run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_gpu_where_there_is_none(device: str | int) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([-1])))
    refused(lambda: fd.execute([torch.ones(2)], device=device), DefinitionError, "torch finds no GPU")
