#!/usr/bin/env bash
# The README's second command: everything that needs neither an engine nor a container.
. "$(dirname "$0")/../lib.sh"
activate
export PYTEST_XDIST_AUTO_NUM_WORKERS=$(($(nproc) + 1)) # some tests wait
command=$(readme_command 2)
step "$command"
eval "$command"
