"""The environment variables that shardfuse reads, as it reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...config import (
    is_nccl_blocking,
    process_environment,
    read_c_compiler,
    read_cache_directory,
    read_home,
    read_key_directory,
    read_settings,
)
from ...errors import EnvironmentVariableError

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Variable:
    """text: what it holds, None where it is not set. value: what shardfuse makes of that, None where it is refused.

    error: why it is refused, "" where it is not.
    """

    name: str
    text: str | None
    value: object
    error: str = ""


READERS: dict[str, Callable[[Environment], object]] = {
    "SHARDFUSE_AUTOTUNE": lambda env: read_settings(env).autotune,
    "SHARDFUSE_CACHE_DIR": lambda env: str(read_cache_directory(env)),
    "SHARDFUSE_CHECK": lambda env: "replicas" if read_settings(env).check_replicas else "nothing",
    "SHARDFUSE_EXCHANGE": lambda env: read_settings(env).exchange,
    "SHARDFUSE_EXCHANGE_MEMORY": lambda env: read_settings(env).exchange_memory,
    "SHARDFUSE_HEARTBEAT_LIMIT": lambda env: read_settings(env).heartbeat_limit,
    "SHARDFUSE_SHARED_GPU": lambda env: read_settings(env).shared_gpu,
    "SHARDFUSE_STRICT": lambda env: read_settings(env).strict,
    "SHARDFUSE_TIMEOUT": lambda env: read_settings(env).timeout,
    "TRITON_INTERPRET": lambda env: read_settings(env).triton_interpret,
}
"""Each is given an environment that has it alone of these."""
AROUND: dict[str, Callable[[Environment], object]] = {
    "CC": read_c_compiler,
    "HOME": read_home,
    "TORCH_NCCL_USE_COMM_NONBLOCKING": lambda env: not is_nccl_blocking(env),
    "XDG_CONFIG_HOME": read_key_directory,
}
"""Those that others read too."""

_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "TORCHELASTIC_", "MASTER_")
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


def read_variables(environ: Environment | None = None) -> list[Variable]:
    """Every variable that shardfuse reads, launchers' apart, whether it is set or not."""
    env = process_environment() if environ is None else environ
    found: list[Variable] = []
    for name, read in {**READERS, **AROUND}.items():
        own = {key: text for key, text in env.items() if key == name or key not in READERS}
        try:
            found.append(Variable(name, env.get(name), read(own)))
        except EnvironmentVariableError as error:
            found.append(Variable(name, env.get(name), None, str(error)))
    return found


def unknown_variables(environ: Environment | None = None) -> list[str]:
    """Names of variables that begin as shardfuse's do and that nothing reads: misspelt ones, most of them."""
    env = process_environment() if environ is None else environ
    return sorted(name for name in env if name.startswith("SHARDFUSE_") and name not in READERS)


def hides_gpus(environ: Environment | None = None) -> bool:
    """Does CUDA_VISIBLE_DEVICES name no GPU at all?"""
    named = (process_environment() if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    return named is not None and (not named.strip() or named.strip().startswith("-1"))


def environment_without_launch(
    said: Environment, python_path: Sequence[str] = (), environ: Environment | None = None
) -> dict[str, str]:
    """This environment with ``said`` in it, for a process that is no rank of this one's job.

    ``python_path``: folders where the process looks for modules first.
    """
    env = process_environment() if environ is None else environ
    kept = {name: text for name, text in env.items() if not (name.startswith(_OF_LAUNCHERS) or name in _OF_RANKS)}
    folders = [*python_path, *filter(None, [env.get("PYTHONPATH")])]
    return {**kept, **({"PYTHONPATH": os.pathsep.join(folders)} if folders else {}), **said}
