#!/usr/bin/env bash
# The README's second command: everything that needs neither an engine nor a container.
. "$(dirname "$0")/../lib.sh"
activate
export PYTEST_XDIST_AUTO_NUM_WORKERS=$(($(nproc) + 1)) # some tests wait
command=$(readme_command 2)
step "$command"
status=0
eval "$command" || status=$?
[ "$status" -eq 1 ] || exit "$status" # 1: tests failed; nothing else is a matter of time

# Several tests at a time, beside the builds of later stages, can be too much for a deadline of one. Up to three that failed
# run once more, one at a time; what failed is named either way, and what fails twice is broken.
failed=$(python -c 'import json; print(len(json.load(open(".pytest_cache/v/cache/lastfailed"))))')
[ "$failed" -le 3 ] || exit 1
step "failed beside others, once more alone"
python -m pytest -v --last-failed --last-failed-no-failures none
