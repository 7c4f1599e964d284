#!/usr/bin/env bash
# The README's first command in a fresh environment: install, then the demo to its end, without torch.
. "$(dirname "$0")/../lib.sh"
rm -rf "$VENV"
activate
command=$(readme_command 1)
install=${command%% && *}
demo=${command#* && }
[ "$install" != "$command" ] || { echo "README: the first command is not INSTALL && DEMO"; exit 1; }

step "$install"
eval "$install"
python -m pip check
if python -c 'import torch' 2> /dev/null; then echo "the base install brought torch"; exit 1; fi

step "$demo"
started=$(date +%s)
eval "$demo"
took=$(($(date +%s) - started))
echo "the demo took $took s (bar: 60)"
[ "$took" -lt 60 ]
