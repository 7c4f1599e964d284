#!/usr/bin/env bash
# A minute of steady traffic while prefill, decode, store, links and clients fail one after another; exit status 0 only if
# no request failed without an excuse, none hung, no token was wrong and nothing was left over. Then two minutes of a
# router at 70 % load, 2,000 idle streams before: its memory, latency and CPU per request must not grow.
. "$(dirname "$0")/../lib.sh"
activate_dev
make drill
make soak
