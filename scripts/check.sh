#!/usr/bin/env bash
# Does all set-up and checks the code, format, lint, types, floors and budgets, and builds the docs. All run, whatever the others find.
# Types take half of the time, on one core: they are checked beside the others.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

[[ $# == 0 ]] || fail "takes no arguments, and not '$*'"
prepare dev docs
cd "$root"
failed=()

check() {
    local name=$1
    shift
    printf '\n##### %s\n' "$name"
    "$@" || failed+=("$name")
}

types=$(mktemp)
"$python" -m basedpyright --pythonpath "$(command -v "$python")" >"$types" 2>&1 &
typed=$!
trap 'kill "$typed" 2>/dev/null || true; rm -f "$types"' EXIT
finish_types() {
    local code=0
    wait "$typed" || code=$?
    cat "$types"
    return "$code"
}

check format "$python" -m ruff format --check .
check lint "$python" -m ruff check .
check floors "$python" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo
check budgets "$python" scripts/budgets.py
check sharding "$python" scripts/sharding_tables.py --check
check docs scripts/docs.sh
check types finish_types

printf '\n'
[[ ${#failed[@]} == 0 ]] || fail "failed: ${failed[*]}" 1
echo "all checks passed"
