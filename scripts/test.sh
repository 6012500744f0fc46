#!/usr/bin/env bash
# Does all set-up and runs the tests; see the usage text below.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
usage: scripts/test.sh [OPTIONS OF PYTEST...] [--] [FILE|FOLDER|FILE::TEST...]

Does all set-up and runs the tests, in parts:

  single        tests/ but for the folders below, in one process
  interpreter   tests/interpreter, in a process of its own with TRITON_INTERPRET=1
  2-ranks       tests/multirank under mpirun, on 2 ranks and then on 4
  4-ranks
  second        what is left of the first part's files by then, from the last one backward

The interpreter and, where there is no GPU to share, the parts below it run at the same time as the first.

Options go to every part. Where paths are given, only the parts that they belong to run. Tests that need GPUs are
deselected where there are too few. The last line counts the results of all parts.
TEXT
}

given=$#
declare -A paths=([single]='' [interpreter]='' [multirank]='')
options=()

marks='' # an expression of the caller's

# Sorts the arguments into options and the paths of each part.
sort_arguments() {
    local is_path=
    while [[ $# -gt 0 ]]; do
        case $is_path$1 in
        -h | --help)
            usage
            exit
            ;;
        --) is_path=path: ;;
        -m | -k | -p | -o | -c | -W | -r | -n | --maxfail | --durations | --durations-min | --deselect | --ignore | \
            --ignore-glob | --tb | --timeout | --timeout-method | --basetemp | --rootdir | --junit-xml | --junitxml | \
            --log-level | --log-cli-level | --log-file | --capture | --show-capture | --color | --confcutdir | \
            --import-mode | --hypothesis-seed | --hypothesis-profile)
            [[ $# -gt 1 ]] || fail "$1 wants a value"
            if [[ $1 == -m ]]; then marks=$2; else options+=("$1" "$2"); fi
            shift
            ;;
        -m*) marks=${1#-m} ;;
        -*) options+=("$1") ;;
        *) add_path "$1" ;;
        esac
        shift
    done
    [[ -n ${paths[single]}${paths[interpreter]}${paths[multirank]} ]] ||
        paths=([single]=all [interpreter]=all [multirank]=all)
}

add_path() {
    local path
    [[ -e ${1%%::*} ]] || fail "no such file or folder: ${1%%::*}"
    path=$(realpath "${1%%::*}")${1#"${1%%::*}"}
    case $path in
    "$root" | "$root/tests") paths=([single]=all [interpreter]=all [multirank]=all) ;;
    "$root/tests/interpreter"*) paths[interpreter]+=$path$'\n' ;;
    "$root/tests/multirank"*) paths[multirank]+=$path$'\n' ;;
    *) paths[single]+=$path$'\n' ;;
    esac
}

# targets PART DEFAULT...: sets $targets to what pytest is given for that part; false where the part has nothing to run.
targets() {
    [[ -n ${paths[$1]} ]] || return 1
    targets=("${@:2}")
    [[ ${paths[$1]} == *all ]] || mapfile -t targets <<<"${paths[$1]%$'\n'}"
}

# all_marks MARKS: what a part takes and the caller wants.
all_marks() { printf '%s' "$1${marks:+${1:+ and }($marks)}"; }

# run_pytest PART MARKS COMMAND...: the command's arguments are completed; the output goes to the screen and to a log,
# the exit code to a file.
run_pytest() {
    local part=$1
    printf '\n##### %s\n' "$part"
    set +e
    "${@:3}" -m "$(all_marks "$2")" "${options[@]}" "${targets[@]}" 2>&1 | tee "$logs/$part"
    echo "${PIPESTATUS[0]}" >"$logs/$part.code"
    set -e
}

run_interpreter() {
    targets interpreter tests/interpreter || return 0
    CUDA_VISIBLE_DEVICES='' TRITON_INTERPRET=1 \
        run_pytest interpreter 'not gpu and not multi_gpu and not mpi' "$python" -m pytest -p no:cacheprovider
}

# run_single PART ORDER [OPTIONS]: each file is run by whichever of the processes with that part's tests comes to it first.
run_single() {
    local only=''
    [[ $gpus -gt 0 ]] || only=' and not gpu'
    targets single tests --ignore=tests/interpreter --ignore=tests/multirank || return 0
    TEST_CLAIMS=$logs/claims TEST_CLAIMS_ORDER=$2 \
        run_pytest "$1" "not mpi and not multi_gpu$only" "$python" -m pytest "${@:3}"
}

run_on_ranks() {
    local ranks=$1 taken='not gpu and not multi_gpu' mpirun
    targets multirank tests/multirank || return 0
    find_mpirun
    (
        if [[ $gpus -lt $ranks ]]; then export CUDA_VISIBLE_DEVICES=; else taken=''; fi
        MEETING_PLACE=$(mktemp -d -p "$logs")
        export MEETING_PLACE
        run_pytest "$ranks-ranks" "$taken" "${mpirun[@]}" -n "$ranks" \
            bash "$root/scripts/rank.sh" "$python" -m pytest -p no:cacheprovider --color=no
    ) </dev/null
}

# Not where a few files are asked for: they are too few to be worth another process.
run_second() {
    [[ ${paths[single]} != all ]] || run_single second backward -p no:cacheprovider
}

# Starts, in a process group of its own, what runs beside the first part; its output goes to a file. It gives way: tests
# of the first part measure how soon a job ends.
run_beside() {
    set -m
    (
        renice -n 5 -p "$BASHPID" >/dev/null || true
        run_interpreter
        [[ $gpus -gt 0 ]] || { run_on_ranks 2; run_on_ranks 4; run_second; }
    ) </dev/null >"$logs/beside" 2>&1 &
    beside=$!
    set +m
    trap 'kill -- -"$beside" 2>/dev/null || true; rm -rf "$logs"' EXIT
}

sort_arguments "$@"
prepare test mpi
set_rank_variables 4
gpus=$(count_gpus)
started=$SECONDS
logs=$(mktemp -d)
mkdir "$logs/claims"
trap 'rm -rf "$logs"' EXIT
trap 'exit 130' INT
cd "$root"
unset TRITON_INTERPRET

bad=()
run_beside
run_single single forward
wait "$beside" || bad+=("what ran beside the first part ended with exit code $?")
cat "$logs/beside"
[[ $gpus == 0 ]] || { run_on_ranks 2; run_on_ranks 4; }

# pytest's code 5 says that no test ran: no fault of a part where the caller chose the tests.
parts=() empty=0
for part in single interpreter 2-ranks 4-ranks second; do
    [[ ! -e $logs/$part.code ]] || parts+=("$part")
done
for part in "${parts[@]}"; do
    code=$(<"$logs/$part.code")
    case $code in
    0) ;;
    5) if [[ $given -gt 0 ]]; then empty=$((empty + 1)); else bad+=("$part ran no test"); fi ;;
    *) bad+=("$part ended with exit code $code") ;;
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
