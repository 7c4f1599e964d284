#!/usr/bin/env bash
# The status page in a headless Chromium, before a router, a store and simulated engines under load. As root on Debian it
# installs the packages chromium and fonts-dejavu-core where there is no Chromium.
. "$(dirname "$0")/../lib.sh"
.ci/prepare/page.sh > build/ci/page-packages.log 2>&1 || echo "no packages: build/ci/page-packages.log"
activate_dev
python -c 'import sys; from tests.page.browser import find_chromium; sys.exit(find_chromium() is None)' ||
  skip "no Chromium here, and it could not be installed"
make page
