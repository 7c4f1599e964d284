#!/usr/bin/env bash
# Store, clients, engines and routers of today beside those of an earlier version, which is built from the history and
# kept outside the checkout, under its commit.
. "$(dirname "$0")/../lib.sh"
activate_dev
earlier=$(python -c 'from tests.compatibility.versions import EARLIER; print(EARLIER)')
git cat-file -e "$earlier^{commit}" || skip "this clone's history does not reach $earlier (git fetch --unshallow)"
python -m pytest -m compatibility tests/compatibility --timeout 1200 -o faulthandler_timeout=0 --durations 10 -v -rs
