"""examples/train_lm.py from outside: what a run prints and leaves, how it goes on, how it ends where it cannot."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked_ranks import Server, rank_variables

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "train_lm.py"
TORCHRUN = [sys.executable, str(ROOT / "scripts" / "torchrun.py"), "--nproc-per-node"]
SMALL = ["--layers", "1", "--batch", "2", "--steps", "24", "--eval-every", "12", "--save-every", "5"]
CHECK = re.compile(
    r"^check: (\d+) steps, loss ([\d.]+) \(unsharded eager ([\d.]+), largest relative difference (\S+)\)$", re.M
)
FINAL = re.compile(r"^final loss ([\d.]+), validation ([\d.]+)$", re.M)


def environment() -> dict[str, str]:
    """Ranks on the CPU, with one thread each: several are started on few cores."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launch(*arguments: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT] if ranks == 1 else [*TORCHRUN, str(ranks), SCRIPT]
    return subprocess.run(
        [*map(str, command), *map(str, arguments)], env=environment(), capture_output=True, text=True, timeout=200
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The process that ranks are forked from where it is not the launcher that is tried: importing takes seconds."""
    server = Server(Path(__file__).with_name("train_lm_ranks.py"))
    yield server
    server.close()


@dataclass(frozen=True)
class Done:
    """returncode: of the first rank that failed, or 0. stdout, stderr: of all ranks, one after the other."""

    returncode: int
    stdout: str
    stderr: str


def fork(server: Server, folder: Path, *arguments: str | Path, ranks: int = 1) -> Done:
    folder = Path(tempfile.mkdtemp(dir=folder))
    running = [server.start([*map(str, arguments)], own, folder) for own in rank_variables(ranks)]
    codes = [rank.wait(200) for rank in running]
    output = "".join(rank.output.read_text() for rank in running)
    errors = "".join(rank.errors.read_text() for rank in running)
    return Done(next((code for code in codes if code), 0), output, errors)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(line["step"], line["loss"]) for line in metrics(folder)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run on 2 ranks, "whole", and its output."""
    folder = tmp_path_factory.mktemp("runs")
    done = launch(*SMALL, "--runs", folder, "--name", "whole", ranks=2)
    assert done.returncode == 0, done.stderr
    (folder / "output").write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_what_a_run_prints_and_leaves(runs: Path) -> None:
    output = (runs / "output").read_text()
    check = CHECK.search(output)
    assert check is not None, output
    assert int(check[1]) == 20
    # losses of 20 steps that follow each other, relatively: the example's own limit
    assert float(check[4]) <= 1e-4
    assert abs(float(check[2]) - float(check[3])) <= 1e-4 * float(check[3])
    lines = metrics(runs / "whole")
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert [line["step"] for line in lines if "validation" in line] == [12, 24]
    assert all(line["tokens_per_s"] > 0 and 0 < line["fusion_share"] < 1 for line in lines)
    assert lines[0]["loss"] > 5.4  # ln 256 = 5.55, before anything is learnt
    assert lines[-1]["loss"] < 4.0
    final = FINAL.search(output)
    assert final is not None
    assert output.endswith(final[0] + "\n")
    assert float(final[1]) == round(lines[-1]["loss"], 4)
    assert float(final[2]) == round(lines[-1]["validation"], 4)
    assert (runs / "whole" / "loss.png").stat().st_size > 5000
    assert "\r" not in output


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_never_stopped(server: Server, runs: Path) -> None:
    """Stopped after a step that is no multiple of --save-every, and gone on with: bitwise the same losses."""
    first = fork(server, runs, *SMALL, "--runs", runs, "--name", "two_parts", "--stop-after", "11", ranks=2)
    assert first.returncode == 0, first.stderr
    assert losses(runs / "two_parts") == losses(runs / "whole")[:11]
    second = fork(server, runs, *SMALL, "--runs", runs, "--name", "two_parts", "--resume", ranks=2)
    assert second.returncode == 0, second.stderr
    assert "going on after step 11" in second.stdout
    assert losses(runs / "two_parts") == losses(runs / "whole")
    assert metrics(runs / "two_parts")[-1]["validation"] == metrics(runs / "whole")[-1]["validation"]
    assert not list((runs / "two_parts").glob("*.unfinished"))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_one(server: Server, runs: Path) -> None:
    """It holds the whole model; the curve is that of two ranks to rounding."""
    folder = runs / "on_one"
    folder.mkdir()
    for name in ("metrics.jsonl", "checkpoint.pt"):
        (folder / name).write_bytes((runs / "whole" / name).read_bytes())
    done = fork(server, runs, *SMALL, "--steps", "26", "--runs", runs, "--name", "on_one", "--resume")
    assert done.returncode == 0, done.stderr
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 26
    assert saved["weights"]["blocks.0.qkv"]["weight"].shape == (3, 4, 32, 128)
    assert [line["step"] for line in metrics(folder)] == list(range(1, 27))


@pytest.mark.slow
def test_bfloat16_after_the_check(server: Server, tmp_path: Path) -> None:
    done = fork(server, tmp_path, *SMALL, "--dtype", "bfloat16", "--runs", tmp_path)
    assert done.returncode == 0, done.stderr
    check, final = CHECK.search(done.stdout), FINAL.search(done.stdout)
    assert check is not None
    assert float(check[4]) <= 1e-4
    assert final is not None
    assert float(final[1]) < 4.0


@pytest.mark.slow
def test_a_failed_check_ends_the_run(server: Server, tmp_path: Path) -> None:
    """The sharded model's loss is falsified, so that the eager one differs."""
    done = fork(server, tmp_path, "falsified", *SMALL, "--runs", tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(
        r"train_lm.py: check: 1 steps, loss .* relative difference 1.0e-03\): that is over 0.0001\n", done.stderr
    )
    assert "final" not in done.stdout


BAD_CALLS = {
    "ranks that do not divide the heads": (
        3,
        [],
        "3 ranks do not divide the model's heads, 4: use another number of ranks",
    ),
    "a mesh larger than the world": (
        2,
        ["--mesh-size", "4"],
        "--mesh-size 4 is more than the world's 2 ranks: start 4",
    ),
    "a mesh smaller than the world": (2, ["--mesh-size", "1"], "leaves 1 of the world's 2 ranks idle: start 1"),
    "no checkpoint": (1, ["--resume"], "checkpoint.pt: run without --resume first, or give its --name"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_end_with_one_line(server: Server, name: str, tmp_path: Path) -> None:
    ranks, arguments, message = BAD_CALLS[name]
    if name == "a mesh larger than the world":  # one through the launcher: the exit code and no line of its own
        done = launch(*arguments, "--runs", tmp_path, ranks=ranks)
    else:
        done = fork(server, tmp_path, *arguments, "--runs", tmp_path, ranks=ranks)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("train_lm.py: ")
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_a_checkpoint_of_another_model_or_a_finished_run(server: Server, runs: Path) -> None:
    other = fork(server, runs, *SMALL, "--layers", "2", "--runs", runs, "--name", "whole", "--resume")
    assert other.returncode == 2
    assert "checkpoint.pt was made with {'dim': 128, 'layers': 1" in other.stderr
    finished = fork(server, runs, *SMALL, "--runs", runs, "--name", "whole", "--resume")
    assert finished.returncode == 2
    assert "is of step 24, nothing is left to do" in finished.stderr


@pytest.mark.slow
def test_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    command = [*TORCHRUN, "2", str(SCRIPT), "--layers", "1", "--steps", "100000", "--no-check", "--runs", str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 120
        while not (tmp_path / "lm" / "metrics.jsonl").exists() or len(metrics(tmp_path / "lm")) < 3:
            assert job.poll() is None, job.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.kill(child_of(job.pid, "RANK=1"), signal.SIGKILL)
        _, errors = job.communicate(timeout=60)  # a collective that waits for a dead rank does so for much longer
    assert job.returncode != 0
    assert "rank 0: rank 1 ended without a word (killed, or crashed)" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_goes_on_from_there(server: Server, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the launcher and to all ranks."""
    command = [*TORCHRUN, "2", str(SCRIPT), "--layers", "1", "--no-check", "--runs", str(tmp_path)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen([*command, "--steps", "100000"], start_new_session=True, **options) as job:
        deadline = time.monotonic() + 120
        while not (tmp_path / "lm" / "metrics.jsonl").exists() or len(metrics(tmp_path / "lm")) < 3:
            assert job.poll() is None, job.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGINT)
        _, errors = job.communicate(timeout=100)
    assert job.returncode == 130, errors
    done = len(metrics(tmp_path / "lm"))
    path = tmp_path / "lm" / "checkpoint.pt"
    assert errors == f"train_lm.py: interrupted: {path} is of step {done}, --resume goes on from there\n"
    assert torch.load(path, weights_only=True)["step"] == done
    again = ["--layers", "1", "--steps", "100000", "--no-check", "--runs", tmp_path, "--resume"]
    resumed = fork(server, tmp_path, *again, "--stop-after", str(done + 1))
    assert resumed.returncode == 0, resumed.stderr
    assert [line["step"] for line in metrics(tmp_path / "lm")] == list(range(1, done + 2))


@pytest.mark.slow
def test_a_full_disk_ends_all_ranks_with_the_name_of_the_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "checkpoint.unfinished").symlink_to("/dev/full")
    done = fork(server, tmp_path, *SMALL, "--no-check", "--runs", tmp_path, ranks=2)
    assert done.returncode == 1, done.stderr
    sentence = f"cannot write {tmp_path}/lm/checkpoint.pt: No space left on device: make room or get the right to write"
    assert f"shardfuse: rank 0: {sentence}" in done.stderr
    assert f"shardfuse: rank 1: rank 0 failed: {sentence}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "lm").glob("checkpoint*"))


def test_files_that_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import lm_run

    path = tmp_path / "checkpoint.pt"
    torch.save({"step": 1, "made_with": {}, "weights": {}}, path)
    assert lm_run.read_checkpoint(path)["step"] == 1
    whole = path.read_bytes()
    torch.save([1, 2], path)
    for content in (b"", b"no checkpoint at all" * 100, whole[: len(whole) // 2], whole[100:], path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(
            lm_run.UnreadableError, match=rf"^--resume: {re.escape(str(path))} cannot be read: \S.*: put"
        ):
            lm_run.read_checkpoint(path)


@pytest.mark.slow
def test_a_corrupt_checkpoint_is_one_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "checkpoint.pt").write_bytes(b"PK half of it")
    done = fork(server, tmp_path, *SMALL, "--runs", tmp_path, "--resume")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"train_lm.py: --resume: {tmp_path}/lm/checkpoint.pt cannot be read: ")


def child_of(parent: int, variable: str) -> int:
    """The child process whose environment has the variable."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return next(
        int(pid) for pid in children if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
