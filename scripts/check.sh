#!/usr/bin/env bash
# Does all set-up and checks the code, format, lint, types, floors and budgets, and builds the docs. All run, whatever the others find.
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

check format "$python" -m ruff format --check .
check lint "$python" -m ruff check .
check types "$python" -m basedpyright --pythonpath "$(command -v "$python")"
check floors "$python" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo
check budgets "$python" scripts/budgets.py
check sharding "$python" scripts/sharding_tables.py --check
check docs scripts/docs.sh

printf '\n'
[[ ${#failed[@]} == 0 ]] || fail "failed: ${failed[*]}" 1
echo "all checks passed"
