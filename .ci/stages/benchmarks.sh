#!/usr/bin/env bash
# The quick benchmarks of the base install: the figures and bars are printed and kept; a missed bar fails nothing here,
# since the machine is shared and the figures are for reading.
. "$(dirname "$0")/../lib.sh"
activate_dev
make bench
