#!/usr/bin/env bash
# The environments of other projects' clients, downloaded where the cache has none.
set -euo pipefail
cd "$(dirname "$0")/../.."
for lock in tests/clients/python/*.lock; do tests/clients/make_env.sh python "$lock"; done
tests/clients/make_env.sh node
