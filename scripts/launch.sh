#!/usr/bin/env bash
# Does all set-up and runs a script on several ranks of this machine; see the usage text below.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
usage: scripts/launch.sh [--nproc N] [--launcher torchrun|mpirun] [--] [SCRIPT [ARGS...]]
       scripts/launch.sh [--nproc N] [--launcher torchrun|mpirun] [OPTIONS OF THE MAIN JOB...]

Does all set-up, then runs SCRIPT on N ranks of this machine: on GPUs if there is one for every rank, else on the CPU.

  --nproc N      the number of ranks (2)
  --launcher L   what starts them: torchrun or mpirun (torchrun)
  SCRIPT         a Python script (examples/train_lm.py, the main job); examples/README.md lists others
  ARGS           all that stands behind SCRIPT goes to it, --nproc and --launcher too: launch.sh's own options stand before

Without a SCRIPT, options that are not launch.sh's go to the main job: scripts/launch.sh --preset gpu --nproc 4. Behind
-- nothing is launch.sh's: scripts/launch.sh -- --help shows the options of the main job.

The exit code is the job's: that of the rank that failed first, or 128 and the signal's number.
TEXT
}

ranks=2
launcher=torchrun
main_job=$root/examples/train_lm.py
script='' # none as yet
arguments=()
while [[ $# -gt 0 ]]; do
    case $1 in
    --nproc | --launcher)
        [[ $# -gt 1 ]] || fail "$1 wants a value"
        if [[ $1 == --nproc ]]; then ranks=$2; else launcher=$2; fi
        shift
        ;;
    --nproc=*) ranks=${1#*=} ;;
    --launcher=*) launcher=${1#*=} ;;
    --)
        shift
        if [[ -z $script && $# -gt 0 && $1 != -* ]]; then
            script=$1
            shift
        fi
        arguments+=("$@")
        break
        ;;
    -h | --help)
        [[ -n $script ]] || {
            usage
            exit
        }
        arguments+=("$1")
        ;;
    -*)
        script=$main_job
        arguments+=("$1")
        ;;
    *)
        if [[ -n $script ]]; then # a value of one of the main job's options
            arguments+=("$1")
        else
            script=$1
            shift
            arguments=("$@")
            for argument in "$@"; do
                case $argument in --nproc | --nproc=* | --launcher | --launcher=*)
                    say "$argument stands behind $script and goes to it: launch.sh's own options stand before"
                    break
                    ;;
                esac
            done
            break
        fi
        ;;
    esac
    shift
done
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "--nproc wants a number of ranks, 1 or more, and not '$ranks'"
processors=$(nproc --all)
most=$((processors > 64 ? processors : 64))
[[ ${#ranks} -lt 9 && $ranks -le $most ]] ||
    fail "--nproc wants at most $most ranks on this machine, which has $processors processors, and not $ranks"
[[ $launcher == torchrun || $launcher == mpirun ]] || fail "--launcher wants torchrun or mpirun, and not '$launcher'"
set -- "${script:-$main_job}" "${arguments[@]}"
[[ -f $1 ]] || fail "no such script: $1"

extras=(examples)
[[ $launcher == torchrun ]] || extras+=(mpi)
prepare "${extras[@]}"
set_rank_variables "$ranks"
if [[ $(count_gpus) -lt $ranks && ${SHARDFUSE_SHARED_GPU:-0} != 1 ]]; then
    export CUDA_VISIBLE_DEVICES= # all ranks on the CPU, rather than some without a GPU
fi

if [[ $launcher == torchrun ]]; then
    exec "$python" "$root/scripts/torchrun.py" --nproc-per-node "$ranks" "$@"
fi
find_mpirun
exec "${mpirun[@]}" -n "$ranks" "$python" "$@" </dev/null
