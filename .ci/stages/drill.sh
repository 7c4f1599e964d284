#!/usr/bin/env bash
# A minute of steady traffic while prefill, decode, store, links and clients fail one after another; exit status 0 only if
# no request failed without an excuse, none hung, no token was wrong and nothing was left over. Then engines freeze in turn
# while others are only slow: no request may take long, and no engine leave that lives.
. "$(dirname "$0")/../lib.sh"
activate_dev
make drill
