"""``python -m shardfuse doctor``: what it finds, what it says to do, and what it keeps to itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from itertools import permutations
from pathlib import Path

import pytest

from shardfuse.__main__ import main
from shardfuse.errors import EnvironmentVariableError
from shardfuse.tools.doctor import devices, processes, report, surroundings, trials, versions
from shardfuse.tools.doctor.finding import Finding, checked
from shardfuse.tools.doctor.variables import read_variables, unknown_variables

ROOT = Path(__file__).parents[1]
SECRET = "hunter2"


def test_a_bare_environment(tmp_path: Path) -> None:
    """No PATH, no home, no compiler, no mpirun, no GPU: it says so, and every self-test that is left passes."""
    folders = {"PYTHONPATH": str(ROOT), "PATH": "/nonexistent", "HOME": "/nonexistent/home", "TMPDIR": str(tmp_path)}
    secrets = {"AWS_SECRET_ACCESS_KEY": SECRET, "SHARDFUSE_TOKEN": SECRET, "TRITON_PASSWORD": SECRET}
    job = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**folders, **secrets, **job}
    command = [sys.executable, "-m", "shardfuse", "doctor", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is True
    found = {(f["area"], f["name"]): f for f in told["findings"]}
    assert {name for _, name in found} >= {"torch", "triton", "GPU", "kernels", "key", "rendezvous"}
    for trial in ("torch", "interpreter", "ranks"):
        assert found["self-tests", trial]["status"] == "ok", found["self-tests", trial]
    warned = ("compilers", "C compiler"), ("launchers", "mpirun"), ("caches", "key"), ("self-tests", "C module")
    for place in (*warned, ("environment", "SHARDFUSE_TOKEN")):
        assert found[place]["status"] == "warning", found[place]
        assert found[place]["remedy"], place
    assert found["environment", "launcher"]["found"] == "mpirun: rank 1 of 4"
    assert found["environment", "compiler settings"]["found"].startswith("TRITON_PASSWORD ")


def test_a_fault_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "CHECKS", (("environment", surroundings.environment),))
    assert main(["doctor", "--no-self-tests"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(", 0 warnings, 0 faults")
    monkeypatch.setenv("SHARDFUSE_TIMEOUT", "soon")
    monkeypatch.setenv("SHARDFUSE_AUTOTUN", SECRET)
    assert main(["doctor", "--no-self-tests"]) == 1
    said = capsys.readouterr().out
    assert "  fault    SHARDFUSE_TIMEOUT                'soon' is refused\n" in said
    assert "-> correct it, or unset it: environment variable SHARDFUSE_TIMEOUT is 'soon', expected a number" in said
    assert "-> did you mean SHARDFUSE_AUTOTUNE?" in said
    assert said.endswith(", 1 warnings, 1 faults\n")
    assert SECRET not in said


def test_each_variable_is_read_as_programs_read_it() -> None:
    given = {"SHARDFUSE_CHECK": "replicas", "SHARDFUSE_TIMEOUT": "12.5", "TRITON_INTERPRET": "yes", "HOME": "/h"}
    found = {v.name: v for v in read_variables(given)}
    assert [found[name].value for name in ("SHARDFUSE_CHECK", "SHARDFUSE_TIMEOUT", "TRITON_INTERPRET")] == [
        "replicas",
        12.5,
        True,
    ]
    assert (found["SHARDFUSE_STRICT"].text, found["SHARDFUSE_STRICT"].value) == (None, False)
    wrong = {"SHARDFUSE_CHECK": "all", "SHARDFUSE_HEARTBEAT_LIMIT": "-1", "SHARDFUSE_STRICT": "perhaps"}
    assert {v.name for v in read_variables(wrong) if v.error} == set(wrong)
    assert unknown_variables({**given, "SHARDFUSE_CACHE": "x", "OTHER": "y"}) == ["SHARDFUSE_CACHE"]


def test_every_variable_that_the_sources_name_is_in_the_report() -> None:
    source = (ROOT / "shardfuse/config.py").read_text()
    quoted = {part for part in source.split('"')[1::2] if part.startswith("SHARDFUSE_") and part != "SHARDFUSE_"}
    assert quoted == {v.name for v in read_variables({}) if v.name.startswith("SHARDFUSE_")}


def test_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {need.split(">=")[0]: need.split(">=")[1].split(";")[0] for need in project["dependencies"] if ">=" in need}
    assert named == {name: ".".join(map(str, oldest)) for name, oldest in versions.OLDEST.items()}
    assert project["requires-python"] == ">=3.11,<3.13"
    assert versions.PYTHONS == ((3, 11), (3, 12))


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1+cu130", "fault"), ("2.11.0", "ok"), ("3.0", "ok"), (None, "fault")]
)
def test_old_and_missing_packages(monkeypatch: pytest.MonkeyPatch, version: str | None, status: str) -> None:
    monkeypatch.setattr(versions, "version_of", lambda name: version)
    found = versions.package("versions", "torch")
    assert found.status == status
    assert (found.remedy == "pip install 'torch>=2.11'") == (status == "fault")


def test_two_nccls_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version_of", lambda name: "2.28")
    assert versions.nccl("versions").status == "fault"


def test_folders(tmp_path: Path) -> None:
    def verdict(path: Path) -> Finding:
        return surroundings.folder("kernels", path, "name another", "slow")

    own, open_to_all = tmp_path / "own", tmp_path / "open"
    own.mkdir(0o700)
    (own / "a").write_bytes(b"x" * 2**20)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "file").write_text("")
    assert verdict(own).status == "ok"
    assert "mode 0700, 1 file of 1.0 MiB, trusted" in verdict(own).found
    assert "not made yet" in verdict(tmp_path / "new/folder").found
    assert not (tmp_path / "new").exists()
    refused = verdict(open_to_all)
    assert (refused.status, "mode 0777" in refused.found) == ("warning", True)
    assert f"run `chmod 700 {open_to_all}`" in refused.remedy
    assert open_to_all.stat().st_mode & 0o777 == 0o777
    below_a_file = verdict(tmp_path / "file/cache")
    assert (below_a_file.status, "cannot be made" in below_a_file.found) == ("warning", True)


def test_the_cache_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mode in (("own", 0o700), ("open", 0o777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    monkeypatch.setenv("SHARDFUSE_CACHE_DIR", str(tmp_path / "own"))
    assert trials.cache_trial().status == "ok"
    assert list((tmp_path / "own").iterdir()) == []
    monkeypatch.setenv("SHARDFUSE_CACHE_DIR", str(tmp_path / "open"))
    found = trials.cache_trial()
    assert (found.status, "mode 0777" in found.found) == ("warning", True)
    monkeypatch.setenv("SHARDFUSE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(trials, "read_sealed", lambda directory, name: b"kept")
    assert trials.cache_trial().status == "fault"


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    assert [f.status for f in versions.compilers()] == ["warning"]
    assert trials.compiler_trial().status == "warning"


def test_wrong_results_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trials.torch_trial().status == "ok"
    true = trials._difference
    monkeypatch.setattr(trials, "_difference", lambda found, expected: true(found * (1 + 1e-5), expected))
    found = trials.torch_trial()
    assert (found.status, "2048 of 2048 elements differ" in found.found) == ("fault", True)


def test_what_hangs_is_ended_and_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = subprocess.Popen

    def have_run(first: str, second: str) -> None:
        codes = iter((first, second))
        command = [sys.executable, "-S", "-c"]
        monkeypatch.setattr(subprocess, "Popen", lambda _, **options: opened([*command, next(codes)], **options))

    sleep, fail = "import time; time.sleep(600)", "raise OSError('no loopback')"
    monkeypatch.setattr(processes, "_IN_PLACE", ())
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    have_run(sleep, sleep)
    (found,) = processes.self_tests(0.2)
    assert (found.status, found.found) == ("fault", "did not end within 0.2 s")
    for codes in ((sleep, fail), (fail, sleep)):
        have_run(*codes)
        (found,) = processes.self_tests(250)
        assert (found.status, found.found) == ("fault", "OSError: no loopback")
    assert "127.0.0.1" in found.remedy


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31
GPU1\tNV18\t X \tNV18\tSYS\t0-31
GPU2\tSYS\tNV18\t X \tSYS\t32-63
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""


def test_by_what_ranks_on_gpus_exchange() -> None:
    assert devices.exchange([]).found == "kernels of ranks exchange statistics over NVLink, without collectives"
    assert devices.exchange([(0, 1), (1, 0)]).found.endswith("which no NVLink joins: 0-1, 1-0")


def test_links_between_gpus() -> None:
    assert devices.links(TOPOLOGY, 3).found == "NV18: 0-1, 1-2; SYS: 0-2"
    assert devices.links("nothing of the kind", 3).status == "warning"
    assert devices.links(None, 3).status == "warning"
    every = list(permutations(range(3), 2))
    assert devices.peers(3, every) == Finding("GPUs", "peer access", "ok", "- 1 1 / 1 - 1 / 1 1 -")
    lacking = devices.peers(3, [pair for pair in every if pair != (0, 2)])
    assert (lacking.status, lacking.found) == ("warning", "- 1 0 / 1 - 1 / 1 1 -")


def test_gpus_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "answer", lambda command: "580.65.06")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [f.status for f in devices.gpus()] == ["ok", "ok"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver, gpu = devices.gpus()
    assert driver.found == "580.65.06"
    assert gpu.status == ("warning" if devices.torch.version.cuda is None else "fault")
    assert gpu.remedy


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> list[Finding]:
        raise KeyError("free")

    (found,) = checked("GPUs", broken)
    assert (found.status, found.found) == ("fault", "ended with KeyError: 'free'")

    def half_way() -> Iterator[Finding]:
        yield Finding("caches", "key", "ok", "fine")
        raise EnvironmentVariableError("SHARDFUSE_CACHE_DIR", "x", "a folder")

    first, second = checked("caches", half_way)
    assert (first.status, second.status) == ("ok", "fault")
    assert second.found.startswith("environment variable SHARDFUSE_CACHE_DIR is 'x'")


def test_both_forms_hold_every_finding() -> None:
    found = [Finding("a", "x", "ok", "fine"), Finding("b", "yy", "fault", "one\ntwo", "do this")]
    assert json.loads(report.as_json(found)) == {"ok": False, "findings": [asdict(f) for f in found]}
    assert report.as_text(found).splitlines() == [
        "a",
        "  ok       x   fine",
        "",
        "b",
        "  fault    yy  one",
        "               two",
        "               -> do this",
        "",
        "1 ok, 0 warnings, 1 faults",
    ]
