# shellcheck shell=bash
# The set-up that the scripts share: sourced, never run. After `prepare EXTRA...`, $python is the Python to use.
#
# A machine's python3 that has all that a command needs is used as it is. Else the command's needs are installed into
# .venv, which goes on using a torch and a Triton that the machine has.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
export PATH # bash makes one up where the environment has none, and keeps it to itself
export HOME=${HOME:-~} # Open MPI does not start without one
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# fail MESSAGE [CODE]
fail() {
    say "$1"
    exit "${2:-2}"
}

# prepare EXTRA...: sets $python to a Python with the project's requirements and these extras of pyproject.toml.
prepare() {
    if python3 "$root/scripts/missing.py" "$@" >/dev/null 2>&1; then
        python=python3
        return
    fi
    # One set-up at a time; the lock ends with the subshell, before any job starts.
    (
        flock 9
        install_into_venv "$@"
    ) 9<"$root"
    python=$venv/bin/python
    export PATH=$venv/bin:$PATH
}

install_into_venv() {
    local wanted extras=() extra constraints
    wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)
    for extra in core "$@"; do
        [[ -e $venv/.ready-$extra && $(<"$venv/.ready-$extra") == "$wanted" ]] || extras+=("$extra")
    done
    is_supported "$venv/bin/python" || extras=(core "$@")
    [[ ${#extras[@]} -gt 0 ]] || return 0
    # A set-up that was broken off may have left anything.
    if ! { is_supported "$venv/bin/python" && is_virtual "$venv/bin/python" &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
        make_venv
        extras=(core "$@")
    fi

    say "installing into $venv (${extras[*]})"
    constraints=$venv/.constraints
    cp "$root/constraints.txt" "$constraints"
    if grep -q 'include-system-site-packages = true' "$venv/pyvenv.cfg"; then
        sed -i -E '/^(torch|triton|numpy)==/d' "$constraints" # the machine's versions hold
    fi
    local names=${extras[*]}
    names=${names#core}
    names=${names# }
    # pip also reads this variable for the environment that it builds the package in.
    PIP_CONSTRAINT=$constraints "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        --root-user-action ignore --editable "$root${names:+[${names// /,}]}" >&2 ||
        fail "could not install the requirements of pyproject.toml (${extras[*]}): pip's message is above" 1
    for extra in "${extras[@]}"; do
        printf '%s\n' "$wanted" >"$venv/.ready-$extra"
    done
}

make_venv() {
    local base options=(--clear)
    base=$(find_python) || {
        install_by_apt python3 && base=$(find_python)
    } || fail "no Python 3.11 or 3.12 was found: install one and put it on PATH" 1
    # A virtual environment's own packages cannot be passed on to another.
    if "$base" "$root/scripts/missing.py" >/dev/null && ! is_virtual "$base"; then
        options+=(--system-site-packages)
    fi
    say "making $venv with $("$base" --version)"
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        install_by_apt "$("$base" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" ||
            fail "$base has no venv module: install it (on Debian and Ubuntu: apt-get install python3-venv)" 1
    fi
    "$base" -m venv "${options[@]}" "$venv"
}

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null
}

is_virtual() {
    "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'
}

# The first Python of a version that the project supports.
find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11; do
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

install_by_apt() {
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
    say "installing $1 with apt-get"
    DEBIAN_FRONTEND=noninteractive apt-get update -qq >/dev/null 2>&1 || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1" >/dev/null 2>&1
}

# How many GPUs torch sees. Its import is spared where there is no driver.
count_gpus() {
    if compgen -G '/dev/nvidia[0-9]*' >/dev/null || command -v nvidia-smi >/dev/null; then
        "$python" -c 'import torch; print(torch.cuda.device_count())'
    else
        echo 0
    fi
}

# set_rank_variables RANKS: the environment that ranks on this one machine share.
set_rank_variables() {
    local threads=$(($(nproc) / $1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
    # NVLink multicast stays off: a program that dies in it can take the GPUs of a shared host out of service.
    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
}

# Sets $mpirun to the command that starts local ranks, by `"${mpirun[@]}" -n N COMMAND`.
find_mpirun() {
    command -v mpirun >/dev/null || fail "no mpirun was found: install Open MPI, or use --launcher torchrun" 1
    mpirun=(mpirun --oversubscribe --bind-to none)
    [[ $(id -u) != 0 ]] || mpirun+=(--allow-run-as-root)
}
