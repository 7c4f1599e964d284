#!/usr/bin/env bash
# A minute of steady traffic while prefill, decode, store, links and clients fail one after another; exit status 0 only if
# no request failed without an excuse, none hung, no token was wrong and nothing was left over.
. "$(dirname "$0")/../lib.sh"
activate_dev
make drill
