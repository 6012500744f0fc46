"""Errors about an op or a tensor name the lines of the program that made it; nothing else knows of lines."""

from __future__ import annotations

import copy
import linecache
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks

from shardfuse import DataType, DeviceMesh, FusionDefinition, ParallelType, ShardfuseError, TensorView
from shardfuse.compat import nvfuser_direct
from shardfuse.errors import IndexRangeError, InputError, KernelCompileError, ProgramMismatchError, ShapeError
from shardfuse.executor import program
from shardfuse.nn import RMSNorm

PROGRAM = """
from shardfuse import FusionDefinition
with FusionDefinition(backend="torch") as fd:
    a = fd.define_tensor([-1, 4])
    b = fd.define_tensor([-1, -1])
    s = fd.define_scalar()
    fd.add_output(fd.ops.mul(fd.ops.add(a, b), s))
"""


def lines_of(error: BaseException) -> list[str]:
    """The lines named below the sentence, without the file, as ``code # tensors``."""
    return [re.sub(r"^  at \S+:\d+: ", "", line) for line in str(error).splitlines()[1:]]


def two_inputs() -> tuple[FusionDefinition, TensorView, TensorView]:
    with FusionDefinition() as fd:
        a = fd.define_tensor([-1, -1])
        b = fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.add(a, b))
    return fd, a, b


def refusal(call: Callable[[], object], kind: type[ShardfuseError] = ShardfuseError) -> ShardfuseError:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def test_operands_that_do_not_fit() -> None:
    fd, _, _ = two_inputs()
    error = refusal(lambda: fd.execute([torch.ones(2, 3), torch.ones(2, 4)]), ShapeError)
    assert lines_of(error) == [
        "fd.add_output(fd.ops.add(a, b))  # T2",
        "a = fd.define_tensor([-1, -1])  # T0",
        "b = fd.define_tensor([-1, -1])  # T1",
    ]
    number = two_inputs.__code__.co_firstlineno + 4
    assert f"test_caller_lines.py:{number}: fd.add_output" in str(error)


def test_the_sentence_comes_first_and_unchanged() -> None:
    fd, _, _ = two_inputs()
    error = refusal(lambda: fd.execute([torch.ones(2, 3), torch.ones(2)]), InputError)
    assert str(error).splitlines()[0] == (
        "Expected input 1, T1, to be a tensor of 2 dims but got 1 dims, shape [2]: pass one for each logical axis"
    )
    assert lines_of(error) == ["b = fd.define_tensor([-1, -1])  # T1"]


def test_an_error_of_torch_names_the_op_and_its_line() -> None:
    with FusionDefinition(backend="torch") as fd:
        x = fd.define_tensor([-1], dtype=DataType.Int)
        fd.add_output(fd.ops.floor_div(fd.ops.add(x, 1), x))
    assert fd.execute([torch.tensor([2])])[0].tolist() == [1]
    with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
        fd.execute([torch.tensor([0])])
    sentence, line = caught.value.__notes__[0].splitlines()
    assert sentence == "raised by floor_div of T2"
    assert line.endswith("fd.add_output(fd.ops.floor_div(fd.ops.add(x, 1), x))  # T2")


def test_a_tensor_that_was_gathered_has_the_definitions_name() -> None:
    def run(rank: int, size: int) -> str:
        with FusionDefinition() as fd:
            x, index = fd.define_tensor([4, 3]), fd.define_tensor([1], dtype=DataType.Int)
            x.set_device_mesh(DeviceMesh(range(size)))
            x.outer_split(0, size)
            x.axis(0).parallelize(ParallelType.mesh_x)
            fd.add_output(fd.ops.index_select(fd.ops.relu(x), index, 0))
        return str(refusal(lambda: fd.execute([torch.ones(2, 3), torch.tensor([9])]), IndexRangeError))

    for text in run_ranks(2, run):
        assert "axis 0 of T2 has 4 elements" in text


def norm(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.mul(x, fd.ops.rsqrt(fd.ops.mean(fd.ops.mul(x, x), [-1], keepdim=True)))


def test_the_line_of_a_helper_is_the_innermost_of_the_callers_own() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        w = fd.define_tensor([-1])
        fd.add_output(
            fd.ops.mul(
                norm(fd, x),
                w,
            )
        )
    error = refusal(lambda: fd.execute([torch.ones(2, 3), torch.ones(4)]), ShapeError)
    found = lines_of(error)
    assert found[0] == "fd.ops.mul(  # T8"
    assert found[1].startswith("return fd.ops.mul(x, fd.ops.rsqrt(")
    assert found[2] == "w = fd.define_tensor([-1])  # T1"


def test_shardings_name_the_lines_that_said_them() -> None:
    fd, a, _ = two_inputs()
    mesh = DeviceMesh([0, 1])
    a.set_device_mesh(mesh)
    a.outer_split(0, 2)
    a.axis(0).parallelize(ParallelType.mesh_x)
    error = refusal(lambda: fd.explain(sizes={tv.val: [7, 4] for tv in fd.fusion.inputs}))
    assert lines_of(error) == [
        "a = fd.define_tensor([-1, -1])  # T0",
        "a.set_device_mesh(mesh)  # T0",
        "a.outer_split(0, 2)  # T0",
        "a.axis(0).parallelize(ParallelType.mesh_x)  # T0",
    ]
    outside = refusal(lambda: fd.execute([torch.ones(4, 4), torch.ones(4, 4)]))
    assert "a.set_device_mesh(mesh)  # T0" in lines_of(outside)


def test_scalars_and_nvfuser_programs() -> None:
    with FusionDefinition() as fd:
        s = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.full([2], s, DataType.Int))
    error = refusal(lambda: fd.execute([1.5]), InputError)
    assert lines_of(error) == ["s = fd.define_scalar(dtype=DataType.Int)  # S0"]
    with nvfuser_direct.FusionDefinition() as direct:
        x = direct.define_tensor([-1, -1])
        y = direct.define_tensor([-1, -1])
        direct.add_output(direct.ops.add(x, y))
    with pytest.raises(RuntimeError) as caught:
        direct.execute([torch.ones(2, 3), torch.ones(2, 4)])
    assert lines_of(caught.value)[0] == "direct.add_output(direct.ops.add(x, y))  # T2"


def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise KernelCompileError("pointwise_T2", "no", "T0 + T1")

    fd, _, _ = two_inputs()
    monkeypatch.setattr(program.ProgramBuilder, "add", refuse)
    error = refusal(lambda: fd.execute([torch.ones(2, 2)] * 2))
    assert lines_of(error) == ["fd.add_output(fd.ops.add(a, b))  # T2", "T0 + T1"]


def test_ranks_that_differ_name_their_own_lines() -> None:
    def own(rank: int, _: int) -> ShardfuseError:
        mesh = DeviceMesh([0, 1])
        with FusionDefinition() as fd:
            x = fd.define_tensor([4])
            x.set_device_mesh(mesh)
            if rank:
                fd.add_output(fd.ops.exp(x))
            else:
                fd.add_output(fd.ops.neg(x))
        return refusal(lambda: fd.execute([torch.ones(4)]), ProgramMismatchError)

    first, second = run_ranks(2, own)
    call = "return refusal(lambda: fd.execute([torch.ones(4)]), ProgramMismatchError)  # the call"
    assert lines_of(first)[:2] == [call, "fd.add_output(fd.ops.neg(x))  # T1"]
    assert lines_of(second)[:2] == [call, "fd.add_output(fd.ops.exp(x))  # T1"]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def test_a_module_names_the_line_that_made_it_and_not_the_librarys() -> None:
    model = copy.deepcopy(Model())
    error = refusal(lambda: model(torch.ones(2, 7)))
    assert lines_of(error) == ["self.norm = RMSNorm(8)  # RMSNorm"]
    assert torch.equal(pickle.loads(pickle.dumps(model.norm))(torch.ones(2, 8)), model(torch.ones(2, 8)))


def test_defining_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "getline", lambda *_: pytest.fail("a definition read a source file"))
    fd, a, b = two_inputs()
    (y,) = fd.execute([torch.ones(2, 2), torch.ones(2, 2)])
    assert y.tolist() == [[2.0, 2.0]] * 2
    assert None not in (a.line, b.line)


def test_nothing_that_ranks_compare_depends_on_lines() -> None:
    """The same definition in two files, at other lines: the same script, plan, program and fingerprint."""
    texts: list[tuple[str, str, str]] = []
    for name, head in (("/somewhere/train.py", ""), ("/elsewhere/run.py", "\n" * 40)):
        names: dict[str, object] = {}
        exec(compile(head + PROGRAM, name, "exec"), names)
        fd = names["fd"]
        assert isinstance(fd, FusionDefinition)
        arguments = [torch.ones(2, 4), torch.ones(2, 4), 3.0]
        assert fd.execute(arguments)[0].tolist() == [[6.0] * 4] * 2
        call = fd.fec._prepare("key", arguments, {}, None)
        texts.append((repr(fd), fd.last_trace(), call.text))
        error = refusal(lambda fd=fd: fd.execute([torch.ones(2, 4), torch.ones(2, 3), 3.0]))
        assert f"  at {name}:{7 + len(head)}  # T2" in str(error)
    assert texts[0] == texts[1]
