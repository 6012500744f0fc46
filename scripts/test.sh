#!/usr/bin/env bash
# Does all set-up and runs the tests: scripts/test.sh [pytest's arguments]
#
#   single        tests/ but for the two below, in one process
#   interpreter   tests/interpreter, in a process of its own with TRITON_INTERPRET=1, beside the first
#   2-ranks       tests/multirank under mpirun, on 2 ranks and then on 4
#   4-ranks
#
# Options go to every part. Where paths are given, only the parts that they belong to run. Tests that need GPUs are
# deselected where there are too few. The last line counts the results of all parts.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare test mpi
set_rank_variables 4
gpus=$(count_gpus)
started=$SECONDS
given=$#
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
declare -A paths=([single]='' [interpreter]='' [multirank]='') code=()
options=()

# Sorts the arguments into options and the paths of each part.
sort_arguments() {
    local path
    while [[ $# -gt 0 ]]; do
        case $1 in
        -k | -m | -p | -o | -c | -W | -r | -n)
            options+=("$1" "${@:2:1}")
            shift
            ;;
        *)
            if [[ ! -e ${1%%::*} ]]; then
                options+=("$1")
            else
                path=$(realpath "${1%%::*}")${1#"${1%%::*}"}
                case $path in
                "$root" | "$root/tests") paths=([single]=all [interpreter]=all [multirank]=all) ;;
                "$root/tests/interpreter"*) paths[interpreter]+=$path$'\n' ;;
                "$root/tests/multirank"*) paths[multirank]+=$path$'\n' ;;
                *) paths[single]+=$path$'\n' ;;
                esac
            fi
            ;;
        esac
        shift
    done
    [[ -n ${paths[single]}${paths[interpreter]}${paths[multirank]} ]] ||
        paths=([single]=all [interpreter]=all [multirank]=all)
}

# targets PART DEFAULT...: sets $targets to what pytest is given for that part; false where the part has nothing to run.
targets() {
    [[ -n ${paths[$1]} ]] || return 1
    targets=("${@:2}")
    [[ ${paths[$1]} == *all ]] || mapfile -t targets <<<"${paths[$1]%$'\n'}"
}

# run_pytest PART MARKS COMMAND...: the command's arguments are completed; the output goes to the screen and to a log.
run_pytest() {
    local part=$1 marks=$2
    printf '\n##### %s\n' "$part"
    set +e
    "${@:3}" -m "$marks" "${options[@]}" "${targets[@]}" 2>&1 | tee "$logs/$part"
    code[$part]=${PIPESTATUS[0]}
    set -e
}

run_on_ranks() {
    local ranks=$1 marks='not gpu and not multi_gpu' mpirun
    find_mpirun
    (
        if [[ $gpus -lt $ranks ]]; then export CUDA_VISIBLE_DEVICES=; else marks=''; fi
        MEETING_PLACE=$(mktemp -d -p "$logs")
        export MEETING_PLACE
        run_pytest "$ranks-ranks" "$marks" "${mpirun[@]}" -n "$ranks" \
            bash "$root/scripts/rank.sh" "$python" -m pytest -p no:cacheprovider --color=no
        exit "${code[$ranks-ranks]}"
    ) </dev/null && code[$ranks-ranks]=0 || code[$ranks-ranks]=$?
}

sort_arguments "$@"
cd "$root"
unset TRITON_INTERPRET

interpreter=
if targets interpreter tests/interpreter; then
    CUDA_VISIBLE_DEVICES='' TRITON_INTERPRET=1 "$python" -m pytest -p no:cacheprovider \
        -m 'not gpu and not multi_gpu and not mpi' "${options[@]}" "${targets[@]}" >"$logs/interpreter" 2>&1 &
    interpreter=$!
    trap 'kill "$interpreter" 2>/dev/null || true; rm -rf "$logs"' EXIT
fi
if targets single tests --ignore=tests/interpreter --ignore=tests/multirank; then
    run_pytest single "not mpi and not multi_gpu$([[ $gpus -gt 0 ]] || echo ' and not gpu')" "$python" -m pytest
fi
if [[ -n $interpreter ]]; then
    wait "$interpreter" && code[interpreter]=0 || code[interpreter]=$?
    printf '\n##### interpreter\n'
    cat "$logs/interpreter"
fi
if targets multirank tests/multirank; then
    run_on_ranks 2
    run_on_ranks 4
fi

# pytest's code 5 says that no test ran: no fault of a part where the caller chose the tests.
parts=() bad=() empty=0
for part in single interpreter 2-ranks 4-ranks; do
    [[ ! -v code[$part] ]] || parts+=("$part")
done
for part in "${parts[@]}"; do
    case ${code[$part]} in
    0) ;;
    5) if [[ $given -gt 0 ]]; then empty=$((empty + 1)); else bad+=("$part ran no test"); fi ;;
    *) bad+=("$part ended with exit code ${code[$part]}") ;;
    esac
done
[[ $empty -lt ${#parts[@]} ]] || bad+=("no test ran")

counts=$(for part in "${parts[@]}"; do grep -E ' in [0-9.]+s' "$logs/$part" | tail -n 1; done |
    grep -oE '[0-9]+ (failed|passed|skipped|xfailed|xpassed|errors?)' | sed 's/errors$/error/' |
    awk '{ sum[$2] += $1; if (!($2 in seen)) { seen[$2]; order[++n] = $2 } }
         END { for (i = 1; i <= n; i++) printf "%s%d %s", (i > 1 ? ", " : ""), sum[order[i]], order[i] }') || true
printf '\n'
for line in "${bad[@]}"; do say "$line"; done
printf 'all parts: %s in %ds\n' "${counts:-no test ran}" "$((SECONDS - started))"
[[ ${#bad[@]} == 0 ]]
