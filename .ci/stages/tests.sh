#!/usr/bin/env bash
# The README's second command: everything that needs neither an engine nor a container.
. "$(dirname "$0")/../lib.sh"
activate
export PYTEST_XDIST_AUTO_NUM_WORKERS=$(($(nproc) + 1)) # some tests wait
# Near its limit the stage ends by itself, and says what failed and what ran.
export PYTEST_ADDOPTS="-v --durations=30 --session-timeout=$((1700 * ${CI_PATIENCE:-1}))"
command=$(readme_command 2)
step "$command"
status=0
eval "$command" || status=$?
[ "$status" -eq 1 ] || exit "$status" # 1: tests failed

# Tests in quarantine run once more, alone. Any other that failed fails the stage.
again=build/ci/again.txt
python .ci/quarantine.py .pytest_cache/v/cache/lastfailed > "$again"
step "in quarantine: once more, alone"
python -m pytest "@$again"
sed 's/^/again: /' "$again"
