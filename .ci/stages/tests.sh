#!/usr/bin/env bash
# The README's second command: everything that needs neither an engine nor a container.
. "$(dirname "$0")/../lib.sh"
activate
command=$(readme_command 2)
step "$command"
eval "$command"
