"""How a rank ends by an error that nobody caught, or by Ctrl-C: where it was, what it printed, what atexit has."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from forked_ranks import Rank, Server, rank_variables

from shardfuse.mesh.captured import reset_graphs
from shardfuse.mesh.groups import destroy_groups

SCRIPT = Path(__file__).with_name("process_end_cases.py")
PATIENCE = 100  # seconds for ranks to start on a busy machine


@dataclass(frozen=True)
class Ended:
    """Exit codes, outputs and errors, by rank."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """All ranks of this file are forked from one process."""
    server = Server(SCRIPT)
    yield server
    server.close()


def start(server: Server, case: str, folder: Path) -> list[Rank]:
    return [server.start([case, str(folder)], own, folder) for own in rank_variables(2)]


def start_and_await(server: Server, case: str, folder: Path) -> list[Rank]:
    """Ranks that have come to where they wait."""
    ranks = start(server, case, folder)
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob("ready*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return ranks


def wait(ranks: list[Rank]) -> Ended:
    codes = [rank.wait(PATIENCE) for rank in ranks]
    return Ended(codes, [rank.output.read_text() for rank in ranks], [rank.errors.read_text() for rank in ranks])


def test_a_refused_call_names_the_callers_lines_and_runs_what_atexit_has(server: Server, tmp_path: Path) -> None:
    ended = wait(start(server, "refuse", tmp_path))
    assert ended.codes == [1, 1]
    lines = ended.errors[1].splitlines()
    assert lines[0] == "[rank1]: Traceback (most recent call last):", ended.errors[1]
    shown = [line.strip() for line in lines if line.startswith("[rank1]:   File ")]
    assert len(shown) == 2, "the module and main(), and nothing of the library"
    assert all(f'File "{SCRIPT}", line ' in line for line in shown)
    assert "[rank1]:     define().execute([torch.ones(2, 3), torch.ones(4)])" in lines
    line_of_y = 1 + SCRIPT.read_text().splitlines().index("        y = fd.define_tensor([-1, -1])")
    shown_path = str(SCRIPT).removeprefix(f"{os.getcwd()}/")
    sentence = (
        "Expected input 1, T1, to be a tensor of 2 dims but got 1 dims, shape [4]: pass one for each logical axis; "
        f"at {shown_path}:{line_of_y}: y = fd.define_tensor([-1, -1]) # T1"
    )
    assert [line for line in lines if line.startswith("shardfuse")] == [f"shardfuse: rank 1: {sentence}"]
    assert ended.errors[0] == (f"shardfuse: rank 0: rank 1 failed: {sentence}; this rank cannot go on without it\n"), (
        ended.errors[0]
    )
    assert ended.outputs[1] == "rank 1 says this without an end of line"
    assert (tmp_path / "ended").read_text() == "in good order"


def test_what_atexit_has_cannot_hold_up_the_end(server: Server, tmp_path: Path) -> None:
    began = time.monotonic()
    ended = wait(start(server, "hang", tmp_path))
    assert ended.codes == [1, 1]
    assert time.monotonic() - began < PATIENCE, "it sleeps for 600 s"
    assert not (tmp_path / "ended").exists(), "what was registered before it comes after it"


@pytest.mark.parametrize("who", [(0, 1), (0,)], ids=["both", "rank_0"])
def test_ctrl_c_is_one_line_for_each_rank_that_gets_it(server: Server, who: tuple[int, ...], tmp_path: Path) -> None:
    ranks = start_and_await(server, "interrupt", tmp_path)
    for rank in who:
        ranks[rank].send(signal.SIGINT)
    ended = wait(ranks)
    assert ended.errors[0] == "shardfuse: rank 0: interrupted\n"
    assert ended.codes[0] == 130
    assert ended.errors[1].count("\n") == 1, ended.errors[1]
    if who == (0,):
        assert ended.errors[1].startswith("shardfuse: rank 1: rank 0 was interrupted")
        assert ended.codes[1] == 1


@pytest.mark.parametrize("case", ["interrupt", "collective"])
def test_a_rank_that_is_ended_because_another_one_died_says_so(server: Server, case: str, tmp_path: Path) -> None:
    """A launcher sends SIGTERM as soon as it sees that a rank has ended, while the others may be slow to find out."""
    ranks = start_and_await(server, case, tmp_path)
    ranks[0].send(signal.SIGSTOP)
    ranks[1].send(signal.SIGKILL)
    ranks[1].wait(PATIENCE)
    ranks[0].send(signal.SIGTERM)
    ranks[0].send(signal.SIGCONT)
    ended = wait(ranks[:1])
    line = "shardfuse: rank 0: rank 1 ended without a word (killed, or crashed); this rank cannot go on without it\n"
    assert ended.errors[0] == line
    assert ended.codes[0] != 0


def test_a_rank_in_a_collective_ends_by_sigterm_and_the_other_names_it(server: Server, tmp_path: Path) -> None:
    ranks = start_and_await(server, "collective", tmp_path)
    ranks[0].send(signal.SIGTERM)
    ended = wait(ranks)
    assert ended.codes == [-signal.SIGTERM, 1]
    assert ended.errors[0] == "shardfuse: rank 0: this rank was ended by SIGTERM\n"
    assert ended.errors[1] == ("shardfuse: rank 1: rank 0 was ended by SIGTERM; this rank cannot go on without it\n")


def test_ranks_that_all_get_sigterm_blame_no_rank_for_a_crash(server: Server, tmp_path: Path) -> None:
    """As where somebody ends the launcher, mpirun or torchrun: each rank says in one line what has ended it."""
    ranks = start_and_await(server, "interrupt", tmp_path)
    for rank in ranks:
        rank.send(signal.SIGTERM)
    ended = wait(ranks)
    assert -signal.SIGTERM in ended.codes
    for rank, (code, errors) in enumerate(zip(ended.codes, ended.errors, strict=True)):
        other = f"rank {1 - rank} was ended by SIGTERM; this rank cannot go on without it"  # it learnt of that first
        said = "this rank was ended by SIGTERM" if code == -signal.SIGTERM else other
        assert errors == f"shardfuse: rank {rank}: {said}\n"


def test_a_handler_of_the_callers_for_sigterm_stays(server: Server, tmp_path: Path) -> None:
    ranks = start_and_await(server, "handler", tmp_path)
    for rank in ranks:
        rank.send(signal.SIGTERM)
    assert wait(ranks).codes == [7, 7]


def test_sigterm_ends_a_forked_process_and_one_that_has_left_its_world(server: Server, tmp_path: Path) -> None:
    ended = wait(start(server, "forked", tmp_path))
    assert ended.codes == [-signal.SIGTERM, -signal.SIGTERM]
    assert ended.errors == ["", ""]


def test_a_rank_that_leaves_with_groups_in_hand_is_not_waited_for_until_the_timeout(
    server: Server, tmp_path: Path
) -> None:
    """Its connections stay open: meshes of torch's are emptied, and of what a program holds the watchdog tells."""
    started = {}
    for case in ("left_on_a_mesh_of_torch", "left_with_a_group_in_hand"):
        (tmp_path / case).mkdir()
        started[case] = start(server, case, tmp_path / case)
    for case, ranks in started.items():
        ended = wait(ranks)  # which gives up long before the world's timeout
        assert ended.codes == [1, 1], case
        sentence = r"rank 1 left before collective \d of ranks \[0, 1\]; this rank cannot go on without it"
        assert re.search(f"shardfuse: rank 0: {sentence}\n", ended.errors[0]), ended.errors[0]


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.is_reset = False

    def reset(self) -> None:
        self.is_reset = True


def test_graphs_are_reset_before_nccl_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Inductor, which records them again, by Inductor; then all others, in whatever holds them."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    held, order = {"graphs": [Graph(), Graph()]}, list[str]()

    def reset_trees() -> None:
        order.append("trees")
        assert not any(g.is_reset for g in held["graphs"])

    trees = SimpleNamespace(reset_cudagraph_trees=reset_trees)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    reset_graphs(gc.get_objects())
    assert order == ["trees"]
    assert all(g.is_reset for g in held["graphs"])


@pytest.mark.parametrize("backend", ["cuda:nccl", "gloo"])
def test_a_group_of_nccl_anywhere_has_graphs_reset_first(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a default group of gloo too, and where the collector has put objects aside."""
    order, end = list[str](), dist.destroy_process_group

    def destroy() -> None:
        order.append("groups")
        end()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cast("Any", c10d)._world.pg_backend_config[dist.new_group([0])] = backend
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    graph = Graph()
    gc.freeze()
    monkeypatch.setattr(Graph, "reset", lambda _: order.append("graph"))
    destroy_groups()
    assert order == (["graph", "groups"] if "nccl" in backend else ["groups"])
    assert graph is not None
