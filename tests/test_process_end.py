"""How a rank ends by an error that nobody caught, or by Ctrl-C: where it was, what it printed, what atexit has."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_process import commands, environment

SCRIPT = Path(__file__).with_name("process_end_cases.py")
PATIENCE = 100  # seconds for ranks to start on a busy machine


@dataclass(frozen=True)
class Ended:
    """Exit codes, outputs and errors, by rank."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]


def start(case: str, folder: Path) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [command[0], str(SCRIPT), case, str(folder)],
            env={**environment(), **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, own in commands("by hand", case)
    ]


def wait(ranks: list[subprocess.Popen[str]]) -> Ended:
    try:
        texts = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return Ended([rank.returncode for rank in ranks], [out for out, _ in texts], [err for _, err in texts])


def test_a_refused_call_names_the_callers_lines_and_runs_what_atexit_has(tmp_path: Path) -> None:
    ended = wait(start("refuse", tmp_path))
    assert ended.codes == [1, 1]
    lines = ended.errors[1].splitlines()
    assert lines[0] == "[rank1]: Traceback (most recent call last):", ended.errors[1]
    shown = [line.strip() for line in lines if line.startswith("[rank1]:   File ")]
    assert len(shown) == 2, "the module and main(), and nothing of the library"
    assert all(f'File "{SCRIPT}", line ' in line for line in shown)
    assert "[rank1]:     define().execute([torch.ones(2, 3), torch.ones(4)])" in lines
    shown_path = str(SCRIPT).removeprefix(f"{os.getcwd()}/")
    sentence = (
        "Expected input 1, T1, to be a tensor of 2 dims but got 1 dims, shape [4]: pass its logical rank; "
        f"at {shown_path}:18: y = fd.define_tensor([-1, -1]) # T1"
    )
    assert [line for line in lines if line.startswith("shardfuse")] == [f"shardfuse: rank 1: {sentence}"]
    assert ended.errors[0] == (f"shardfuse: rank 0: rank 1 failed: {sentence}; this rank cannot go on without it\n"), (
        ended.errors[0]
    )
    assert ended.outputs[1] == "rank 1 says this without an end of line"
    assert (tmp_path / "ended").read_text() == "in good order"


def test_what_atexit_has_cannot_hold_up_the_end(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = wait(start("hang", tmp_path))
    assert ended.codes == [1, 1]
    assert time.monotonic() - began < PATIENCE, "it sleeps for 600 s"
    assert not (tmp_path / "ended").exists(), "what was registered before it comes after it"


@pytest.mark.parametrize("who", [(0, 1), (0,)], ids=["both", "rank_0"])
def test_ctrl_c_is_one_line_for_each_rank_that_gets_it(who: tuple[int, ...], tmp_path: Path) -> None:
    ranks = start("interrupt", tmp_path)
    deadline = time.monotonic() + PATIENCE
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for rank in who:
        os.kill(ranks[rank].pid, signal.SIGINT)
    ended = wait(ranks)
    assert ended.errors[0] == "shardfuse: rank 0: interrupted\n"
    assert ended.codes[0] == 130
    assert ended.errors[1].count("\n") == 1, ended.errors[1]
    if who == (0,):
        assert ended.errors[1].startswith("shardfuse: rank 1: rank 0 was interrupted")
        assert ended.codes[1] == 1
