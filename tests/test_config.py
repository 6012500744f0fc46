"""What the launchers' environments mean."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from shardfuse.config import (
    LaunchConfig,
    Settings,
    read_cache_directory,
    read_key_directory,
    read_launch,
    read_settings,
    set_process_defaults,
)
from shardfuse.errors import EnvironmentVariableError, LaunchEnvironmentError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1",
}


def test_plain_python_is_a_world_of_one() -> None:
    assert read_launch({}) == LaunchConfig()
    assert (LaunchConfig().rank, LaunchConfig().world_size, LaunchConfig().launcher) == (0, 1, "none")


def test_open_mpi() -> None:
    assert read_launch(OPEN_MPI) == LaunchConfig(3, 4, 1, 2, "mpirun", "prterun-host-7@1")
    told = read_launch({**OPEN_MPI, "MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    assert (told.master_addr, told.master_port, told.agent_store) == ("node0", 1234, False)


def test_torchrun_inside_of_the_others() -> None:
    expected = LaunchConfig(5, 8, 1, 4, "torchrun", "none", "node0", 29500, agent_store=True, attempt=2)
    assert read_launch({**OPEN_MPI, **SRUN, **TORCHRUN}) == expected


def test_rank_and_world_size_by_hand() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    assert read_launch(env) == LaunchConfig(1, 2, 1, 2, "environment", "", "127.0.0.1", 1234)
    assert read_launch({**env, "MASTER_ADDR": "node0"}).local_size == 1


def test_srun() -> None:
    launch = read_launch(SRUN)
    assert launch == LaunchConfig(4, 5, 1, 2, "slurm", "123.0", "gpu03", 20123)
    # A batch script has SLURM_NTASKS and a SLURM_PROCID, and nothing has been started.
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "123"}).world_size == 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "1"}, "has only RANK, expected both RANK and WORLD_SIZE"),
        ({"WORLD_SIZE": "1"}, "has only WORLD_SIZE, expected both"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "has rank 2 in a world of 2, expected a rank from 0 to 1"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "has local rank 2 of 2, expected a local rank from 0 to 1"),
    ],
)
def test_contradictions(env: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=message):
        read_launch(env)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', expected a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1', expected a whole number, 0 or more"),
        *(
            ({**env, "MASTER_PORT": port}, f"MASTER_PORT is '{port}', expected the number of a port, 1 to 65535")
            for env in (OPEN_MPI, TORCHRUN, SRUN)
            for port in ("http", "0", "-1", "65536", "1e4", "99999999999999999999")
        ),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x"}, "SLURM_STEP_TASKS_PER_NODE is '2x', expected counts"),
    ],
)
def test_values_that_are_none(env: dict[str, str], message: str) -> None:
    with pytest.raises(EnvironmentVariableError, match=message):
        read_launch(env)


def test_settings() -> None:
    assert read_settings({}) == Settings(False, False, False, 300.0, 30.0)
    env = {
        "TRITON_INTERPRET": "1",
        "SHARDFUSE_STRICT": "true",
        "SHARDFUSE_AUTOTUNE": "on",
        "SHARDFUSE_TIMEOUT": "7.5",
        "SHARDFUSE_HEARTBEAT_LIMIT": "3",
        "SHARDFUSE_EXCHANGE_MEMORY": " 96 ",
    }
    assert read_settings(env) == Settings(True, True, True, 7.5, 3.0, exchange_memory=96)
    assert Settings().exchange_memory == 64
    for text in ("0", "-64", "1.5", "64MB", "much"):
        with pytest.raises(
            EnvironmentVariableError, match=f"SHARDFUSE_EXCHANGE_MEMORY is '{text}', expected a whole nu"
        ):
            read_settings({"SHARDFUSE_EXCHANGE_MEMORY": text})
    assert read_settings({"SHARDFUSE_CHECK": "replicas"}) == Settings(check_replicas=True)
    for named in ("auto", "nccl", "symmetric"):
        assert read_settings({"SHARDFUSE_EXCHANGE": named}) == Settings(exchange=named)
    with pytest.raises(
        EnvironmentVariableError, match=r"SHARDFUSE_EXCHANGE is 'p2p', expected auto, nccl or symmetric"
    ):
        read_settings({"SHARDFUSE_EXCHANGE": "p2p"})
    with pytest.raises(EnvironmentVariableError, match=r"SHARDFUSE_CHECK.*replicas"):
        read_settings({"SHARDFUSE_CHECK": "replica"})
    for bad in ({"SHARDFUSE_STRICT": "maybe"}, {"SHARDFUSE_TIMEOUT": "-1"}, {"SHARDFUSE_TIMEOUT": "soon"}):
        with pytest.raises(EnvironmentVariableError, match=next(iter(bad))):
            read_settings(bad)


def test_process_defaults_fill_gaps_only() -> None:
    several = LaunchConfig(1, 2, 1, 2, "mpirun", "job")
    env: dict[str, str] = {}
    assert set_process_defaults(several, env)
    assert env == {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4"}
    assert not set_process_defaults(several, env)
    assert env == {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4"}
    env = {}
    assert set_process_defaults(LaunchConfig(1, 4, 1, 2, "mpirun", "job"), env)
    assert env == {"OMP_NUM_THREADS": "1"}, "ranks on several hosts do not meet on the loopback interface"


def test_a_home_is_that_of_the_password_database_where_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    assert read_key_directory({}) == read_key_directory({"HOME": ""}) == home / ".config" / "shardfuse"
    assert read_cache_directory({"SHARDFUSE_CACHE_DIR": "~/kept"}) == home / "kept"

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert read_key_directory({}) is None
    assert read_cache_directory({}).name == f"shardfuse-{os.geteuid()}"


def test_where_files_are_kept(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    assert read_cache_directory(env) == tmp_path / ".cache" / "shardfuse"
    assert read_cache_directory({**env, "SHARDFUSE_CACHE_DIR": "~"}) == tmp_path
    assert read_cache_directory({**env, "SHARDFUSE_CACHE_DIR": "~/a/b"}) == tmp_path / "a" / "b"
    assert read_cache_directory({**env, "SHARDFUSE_CACHE_DIR": "a"}) == Path.cwd() / "a"
    (tmp_path / "file").touch()
    for named in (tmp_path / "file", tmp_path / "file" / "below"):
        message = (
            rf"SHARDFUSE_CACHE_DIR is '{named}', expected a folder, and {tmp_path}/file is none: correct it or unset"
        )
        with pytest.raises(EnvironmentVariableError, match=message):
            read_cache_directory({**env, "SHARDFUSE_CACHE_DIR": str(named)})
    assert read_key_directory(env) == tmp_path / ".config" / "shardfuse"
    assert read_key_directory({**env, "XDG_CONFIG_HOME": "/c"}) == Path("/c/shardfuse")
    assert read_key_directory({**env, "XDG_CONFIG_HOME": "c"}) == tmp_path / ".config" / "shardfuse"
    assert read_key_directory({"HOME": str(tmp_path / "missing")}) is None, "a home is not made"
