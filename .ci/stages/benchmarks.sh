#!/usr/bin/env bash
# Tests of benchmarks with many processes, then the quick benchmarks of the base install: their figures and bars are printed
# and kept; a missed bar fails nothing here, since the machine is shared and the figures are for reading.
. "$(dirname "$0")/../lib.sh"
activate_dev
python -m pytest -m benchmarks tests/benchmarks
make bench
