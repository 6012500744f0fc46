#!/usr/bin/env bash
# Does all set-up and runs a script on several ranks of this machine; see the usage text below.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
usage: scripts/launch.sh [--nproc N] [--launcher torchrun|mpirun] [SCRIPT] [ARGS...]

Does all set-up, then runs SCRIPT on N ranks of this machine: on GPUs if there is one for every rank, else on the CPU.

  --nproc N      the number of ranks (2)
  --launcher L   what starts them: torchrun or mpirun (torchrun)
  SCRIPT         a Python script (examples/train_lm.py, the main job)
  ARGS           go to the script; without a SCRIPT, options go to the main job: scripts/launch.sh --preset gpu

The exit code is the job's: that of the rank that failed first, or 128 and the signal's number.
TEXT
}

ranks=2
launcher=torchrun
while [[ $# -gt 0 ]]; do
    case $1 in
    -h | --help)
        usage
        exit
        ;;
    --nproc | --launcher)
        [[ $# -gt 1 ]] || fail "$1 wants a value"
        if [[ $1 == --nproc ]]; then ranks=$2; else launcher=$2; fi
        shift 2
        ;;
    --nproc=*)
        ranks=${1#*=}
        shift
        ;;
    --launcher=*)
        launcher=${1#*=}
        shift
        ;;
    *) break ;;
    esac
done
[[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || fail "--nproc wants a number of ranks, 1 or more, and not '$ranks'"
[[ $launcher == torchrun || $launcher == mpirun ]] || fail "--launcher wants torchrun or mpirun, and not '$launcher'"
if [[ $# -eq 0 || $1 == -* ]]; then
    set -- "$root/examples/train_lm.py" "$@"
fi
[[ -f $1 ]] || fail "no such script: $1"

extras=(examples)
[[ $launcher == torchrun ]] || extras+=(mpi)
prepare "${extras[@]}"
set_rank_variables "$ranks"
if [[ $(count_gpus) -lt $ranks ]]; then
    export CUDA_VISIBLE_DEVICES= # all ranks on the CPU, rather than some without a GPU
fi

if [[ $launcher == torchrun ]]; then
    exec "$python" "$root/scripts/torchrun.py" --nproc-per-node "$ranks" "$@"
fi
find_mpirun
exec "${mpirun[@]}" -n "$ranks" "$python" "$@" </dev/null
