#!/usr/bin/env bash
# The sdist and the wheel, built and tested outside the tree.
. "$(dirname "$0")/../lib.sh"
activate_dev
python -m pytest -m packaging tests/test_packaging.py --timeout 440 -o faulthandler_timeout=0 -v
