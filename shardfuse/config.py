"""The only reader of the environment: frozen records, read where a caller asks for them and then passed on."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from shardfuse.errors import EnvironmentVariableError, LaunchEnvironmentError

VERSION = "0.2.0"
"""Of shardfuse; part of the key of what is kept on disk."""

Exchange = Literal["auto", "nccl", "symmetric"]
Launcher = Literal["torchrun", "mpirun", "environment", "slurm", "none"]


@dataclass(frozen=True)
class Settings:
    """What shardfuse's own variables (and Triton's one) say.

    triton_interpret: TRITON_INTERPRET, generated kernels run under Triton's interpreter.
    strict: SHARDFUSE_STRICT, a kernel that fails to compile is an error instead of a fallback to torch.
    autotune: SHARDFUSE_AUTOTUNE, kernels are tuned before a program's first run on a GPU.
    timeout: SHARDFUSE_TIMEOUT, seconds that a rank waits for its peers in a collective.
    heartbeat_limit: SHARDFUSE_HEARTBEAT_LIMIT, seconds without a sign of life after which a rank counts as gone.
    check_replicas: SHARDFUSE_CHECK=replicas, replicated inputs are compared between ranks before every run.
    exchange: SHARDFUSE_EXCHANGE, by what ranks of a host exchange statistics of rows that are sharded: their kernels
    themselves, over symmetric memory ("symmetric", or an error); collectives of NCCL ("nccl"); or the default ("auto"):
    their kernels where NVLink joins their GPUs, else collectives.
    exchange_memory: SHARDFUSE_EXCHANGE_MEMORY, MB (2**20 bytes) of each rank's memory that others of its host write to,
    where they exchange so; the same on all ranks.
    shared_gpu: SHARDFUSE_SHARED_GPU, ranks of a host take turns on its GPUs, with gloo's collectives: for tests on a
    machine with fewer GPUs than ranks.
    """

    triton_interpret: bool = False
    strict: bool = False
    autotune: bool = False
    timeout: float = 300.0
    heartbeat_limit: float = 30.0
    check_replicas: bool = False
    exchange: Exchange = "auto"
    exchange_memory: int = 64
    shared_gpu: bool = False


@dataclass(frozen=True)
class LaunchConfig:
    """This process's place among the processes of its job, as the launcher's environment tells it.

    rank, world_size: among all processes; local_rank, local_size: among those of this host.
    job: a text that all processes of the job and no other job on this host have ("" if the launcher gives none).
    master_addr, master_port: where rank 0 (or the launcher's agent) serves the store; None where unknown.
    agent_store: the launcher's agent serves it. attempt: how often the agent has started the ranks anew.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "none"
    job: str = ""
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    attempt: int = 0


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read `Settings`. Raises EnvironmentVariableError for a value that none of them takes."""
    env = os.environ if environ is None else environ
    return Settings(
        triton_interpret=_flag(env, "TRITON_INTERPRET"),
        strict=_flag(env, "SHARDFUSE_STRICT"),
        autotune=_flag(env, "SHARDFUSE_AUTOTUNE"),
        timeout=_seconds(env, "SHARDFUSE_TIMEOUT", Settings.timeout),
        heartbeat_limit=_seconds(env, "SHARDFUSE_HEARTBEAT_LIMIT", Settings.heartbeat_limit),
        check_replicas="replicas" in _choices(env, "SHARDFUSE_CHECK", ("replicas",)),
        exchange=_exchange(env),
        exchange_memory=_megabytes(env, "SHARDFUSE_EXCHANGE_MEMORY", Settings.exchange_memory),
        shared_gpu=_flag(env, "SHARDFUSE_SHARED_GPU"),
    )


def is_nccl_blocking(environ: Mapping[str, str] | None = None) -> bool:
    """Do NCCL's functions end when they return?  torch can be asked for communicators whose functions do not."""
    env = os.environ if environ is None else environ
    return env.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0").lower() in ("", "0", "false", "n", "no", "f")


def read_nccl_programs(environ: Mapping[str, str] | None = None) -> int | None:
    """Programs of a kernel that the environment lets NCCL have at most; ``None`` where it says nothing of that."""
    env = os.environ if environ is None else environ
    return min(_nccl_numbers(env, "MAX"), default=None)


def read_least_nccl_programs(environ: Mapping[str, str] | None = None) -> int:
    """Programs of a kernel that the environment has NCCL have at the least; 0 where it says nothing of that."""
    return max(_nccl_numbers(os.environ if environ is None else environ, "MIN"), default=0)


def _nccl_numbers(env: Mapping[str, str], bound: str) -> list[int]:
    """What NCCL reads under the three names that it has had for it; it ignores other texts."""
    said = [env.get(f"NCCL_{bound}_{name}", "") for name in ("CTAS", "NCHANNELS", "NRINGS")]
    return [int(text) for text in said if text.isdecimal() and int(text) > 0]


def read_launch(environ: Mapping[str, str] | None = None) -> LaunchConfig:
    """Read `LaunchConfig` from torchrun's, Open MPI's, the RANK/WORLD_SIZE convention's or SLURM's variables.

    The innermost launcher wins: torchrun's agent sets its variables inside what mpirun or srun started.
    Raises EnvironmentVariableError and LaunchEnvironmentError.
    """
    env = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" in env and "RANK" in env:
        return _check(_from_rank_variables(env, "torchrun"))
    if "OMPI_COMM_WORLD_SIZE" in env:
        return _check(_from_open_mpi(env))
    if "RANK" in env or "WORLD_SIZE" in env:
        return _check(_from_rank_variables(env, "environment"))
    # SLURM_STEP_NUM_TASKS is set by srun only: a batch script's SLURM_NTASKS does not mean that tasks were started.
    if "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        return _check(_from_slurm(env))
    return LaunchConfig()


def set_process_defaults(launch: LaunchConfig, environ: MutableMapping[str, str] | None = None) -> bool:
    """Set what several ranks on one host need and is not set: gloo on the loopback interface, one OpenMP thread.

    gloo otherwise binds to what the host name resolves to, which may be nothing; OpenMP otherwise takes every core
    in every rank. Returns True where the number of threads was set here: libraries that are loaded by now have to be
    told by other means.
    """
    env = os.environ if environ is None else environ
    if launch.world_size == launch.local_size:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit_threads = launch.local_size > 1 and "OMP_NUM_THREADS" not in env
    if limit_threads:
        env["OMP_NUM_THREADS"] = "1"
    return limit_threads


def _from_rank_variables(env: Mapping[str, str], launcher: Launcher) -> LaunchConfig:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        raise LaunchEnvironmentError(f"only {'RANK' if 'RANK' in env else 'WORLD_SIZE'}", "both RANK and WORLD_SIZE")
    rank, world_size = _integer(env, "RANK", 0), _integer(env, "WORLD_SIZE", 1)
    addr = env.get("MASTER_ADDR")
    # Without LOCAL_WORLD_SIZE the ranks are taken to share one host unless MASTER_ADDR says otherwise.
    one_host = addr in (None, "localhost", "127.0.0.1", "::1")
    return LaunchConfig(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(env, "LOCAL_RANK", rank if one_host else 0),
        local_size=_integer(env, "LOCAL_WORLD_SIZE", world_size if one_host else 1),
        launcher=launcher,
        job=env.get("TORCHELASTIC_RUN_ID", ""),
        master_addr=addr,
        master_port=_port(env),
        agent_store=launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True",
        attempt=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _from_open_mpi(env: Mapping[str, str]) -> LaunchConfig:
    rank, world_size = _integer(env, "OMPI_COMM_WORLD_RANK", 0), _integer(env, "OMPI_COMM_WORLD_SIZE", 1)
    return LaunchConfig(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(env, "OMPI_COMM_WORLD_LOCAL_RANK", rank),
        local_size=_integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE", world_size),
        launcher="mpirun",
        job=env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", ""),
        master_addr=env.get("MASTER_ADDR"),
        master_port=_port(env),
    )


def _from_slurm(env: Mapping[str, str]) -> LaunchConfig:
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    world_size, nodes = _integer(env, "SLURM_STEP_NUM_TASKS", 1), _integer(env, "SLURM_STEP_NUM_NODES", 1)
    master_addr, master_port = env.get("MASTER_ADDR"), _port(env)
    if nodes > 1:
        master_addr = master_addr or _first_host(env.get("SLURM_STEP_NODELIST", ""))
        # The same on every node and seldom the same for two jobs: SLURM hands nothing round.
        master_port = master_port or 20000 + _integer(env, "SLURM_JOB_ID", 0) % 20000
    tasks = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))
    node = _integer(env, "SLURM_NODEID", 0)
    return LaunchConfig(
        rank=_integer(env, "SLURM_PROCID", 0),
        world_size=world_size,
        local_rank=_integer(env, "SLURM_LOCALID", 0),
        local_size=tasks[node] if node < len(tasks) else tasks[-1],
        launcher="slurm",
        job=job,
        master_addr=master_addr,
        master_port=master_port,
    )


def _tasks_per_node(text: str) -> list[int]:
    """`"2(x3),1"` -> [2, 2, 2, 1], SLURM's short form."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise EnvironmentVariableError("SLURM_STEP_TASKS_PER_NODE", text, "counts such as '2(x3),1'")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _first_host(node_list: str) -> str:
    """`"gpu[03-05,9],cpu1"` -> "gpu03", the host of rank 0."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", node_list)
    if match is None:
        raise EnvironmentVariableError("SLURM_STEP_NODELIST", node_list, "a list of host names")
    return match[1] + (match[2] or "")


def _check(launch: LaunchConfig) -> LaunchConfig:
    if not 0 <= launch.rank < launch.world_size:
        raise LaunchEnvironmentError(
            f"rank {launch.rank} in a world of {launch.world_size}", f"a rank from 0 to {launch.world_size - 1}"
        )
    if not 0 <= launch.local_rank < max(launch.local_size, 1):
        raise LaunchEnvironmentError(
            f"local rank {launch.local_rank} of {launch.local_size}", f"a local rank from 0 to {launch.local_size - 1}"
        )
    return launch


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise EnvironmentVariableError(name, env[name], "1 or 0")


def _choices(env: Mapping[str, str], name: str, known: tuple[str, ...]) -> list[str]:
    """What a variable lists, separated by commas."""
    given = [word.strip() for word in env.get(name, "").split(",") if word.strip()]
    if any(word not in known for word in given):
        raise EnvironmentVariableError(name, env[name], f"nothing, or {', '.join(known)}")
    return given


def _exchange(env: Mapping[str, str]) -> Exchange:
    match env.get("SHARDFUSE_EXCHANGE", "").strip().lower():
        case "" | "auto":
            return "auto"
        case "nccl":
            return "nccl"
        case "symmetric":
            return "symmetric"
        case _:
            raise EnvironmentVariableError("SHARDFUSE_EXCHANGE", env["SHARDFUSE_EXCHANGE"], "auto, nccl or symmetric")


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    value = env.get(name, "")
    if not value:
        return default
    try:
        seconds = float(value)
    except ValueError:
        raise EnvironmentVariableError(name, value, "a number of seconds") from None
    if not 0 < seconds < float("inf"):
        raise EnvironmentVariableError(name, value, "a positive number of seconds")
    return seconds


def _megabytes(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name, "").strip()
    if not value:
        return default
    if not re.fullmatch(r"\d+", value) or int(value) < 1:
        raise EnvironmentVariableError(name, env[name], "a whole number of MB, 1 or more")
    return int(value)


def _port(env: Mapping[str, str]) -> int | None:
    value = env.get("MASTER_PORT", "").strip()
    if not value:
        return None
    if not re.fullmatch(r"\d{1,5}", value) or not 1 <= int(value) <= 65535:
        raise EnvironmentVariableError("MASTER_PORT", env["MASTER_PORT"], "the number of a port, 1 to 65535")
    return int(value)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    value = _optional_integer(env, name)
    return default if value is None else value


def _optional_integer(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name, "")
    if not value:
        return None
    if not re.fullmatch(r"\d+", value.strip()):
        raise EnvironmentVariableError(name, value, "a whole number, 0 or more")
    return int(value)


def read_compiler_settings(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What the environment says to Triton's compiler, sorted: other kernels may come of other settings.

    Inductor names the assembler that comes with torch once it compiles, and not in a process that finds all compiled:
    what one such process keeps the next one has to find.
    """
    env = os.environ if environ is None else environ
    said = (f"{name}={value}" for name, value in env.items() if name.startswith(("TRITON_", "MLIR_", "LLVM_")))
    passed = "TRITON_CACHE_DIR=", f"TRITON_PTXAS_PATH={Path(torch.__file__).absolute().parent}{os.sep}"
    return tuple(sorted(text for text in said if not text.startswith(passed)))


def read_c_compiler(environ: Mapping[str, str] | None = None) -> str | None:
    """CC, else gcc or clang where one is in PATH, as Triton does; else None."""
    env = os.environ if environ is None else environ
    path = env.get("PATH")
    return env.get("CC") or shutil.which("gcc", path=path) or shutil.which("clang", path=path)


def read_home(environ: Mapping[str, str] | None = None) -> Path | None:
    """HOME, else the password database's home of this user, as every shell has it; None for a user without one."""
    env = os.environ if environ is None else environ
    if env.get("HOME"):
        return Path(env["HOME"])
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # a container's made-up user
        return None


def read_cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where kernels are kept: SHARDFUSE_CACHE_DIR, else ~/.cache/shardfuse, else a folder in the temporary directory.

    The last is for a user whose home cannot be written. The directory need not exist, be writable or be safe:
    `secure_files` decides on that. Raises EnvironmentVariableError where a file is named.
    """
    env = os.environ if environ is None else environ
    named = env.get("SHARDFUSE_CACHE_DIR")
    if named:
        path = _expanded(named, env)
        above = next(p for p in (path, *path.parents) if p.exists())
        if not above.is_dir():
            raise EnvironmentVariableError("SHARDFUSE_CACHE_DIR", named, f"a folder, and {above} is none")
        return path
    home = read_home(env)
    if home is not None and os.access(home, os.W_OK):
        return home / ".cache" / "shardfuse"
    return Path(tempfile.gettempdir()) / f"shardfuse-{os.geteuid()}"


def is_cache_directory_named(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the user named the cache directory; else its name and its mode are shardfuse's own."""
    return bool((os.environ if environ is None else environ).get("SHARDFUSE_CACHE_DIR"))


def read_key_directory(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the key that vouches for kept files is: $XDG_CONFIG_HOME/shardfuse, else ~/.config/shardfuse."""
    env = os.environ if environ is None else environ
    configuration = env.get("XDG_CONFIG_HOME", "")
    if configuration.startswith("/"):  # the specification has relative ones ignored
        return Path(configuration) / "shardfuse"
    home = read_home(env)
    return home / ".config" / "shardfuse" if home is not None and home.is_dir() else None


def read_job_directory() -> Path:
    """A folder of this user and this host, whose name all ranks of a job work out alike."""
    return Path(tempfile.gettempdir()) / f"shardfuse-{os.geteuid()}"


def _expanded(text: str, env: Mapping[str, str]) -> Path:
    """An absolute path, with ``~`` for the home."""
    home = read_home(env)
    if home is not None and (text == "~" or text.startswith("~/")):
        return home / text[2:]
    return Path(text).absolute()


def process_environment() -> dict[str, str]:
    """All of the environment, for a report, and for processes to start."""
    return dict(os.environ)
