#!/usr/bin/env bash
# Style and types. All are run, whichever fails.
. "$(dirname "$0")/../lib.sh"
activate_dev
status=0
for check in "ruff check ." "ruff format --check ." mypy; do
  step "$check"
  $check || status=1
done
exit "$status"
