#!/usr/bin/env bash
# The sdist and the wheel, built and tested outside the tree.
. "$(dirname "$0")/../lib.sh"
activate_dev
export CCACHE_BASEDIR=${TMPDIR:-/tmp} # the sdist is unpacked and built there
python -m pytest -m packaging tests/test_packaging.py --timeout 440 -o faulthandler_timeout=0 -v
