#!/usr/bin/env bash
# Does all set-up and builds the pages of docs/ as a site, strictly: a page that is missing or a link that leads nowhere
# fails.  `scripts/docs.sh [FOLDER]`: where to, build/site where nothing is said.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

[[ $# -le 1 ]] || fail "takes one folder at most, and not '$*'"
site=$(realpath -m "${1:-$root/build/site}")
prepare docs
cd "$root"

NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --quiet --strict --site-dir "$site"
say "the site is in $site: open index.html, or run '$python -m mkdocs serve' to see changes at once"
