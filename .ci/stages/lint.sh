#!/usr/bin/env bash
# Style and types, and the pages as a site. All are run, whichever fails.
. "$(dirname "$0")/../lib.sh"
activate_dev
status=0
for check in "ruff check ." "ruff format --check ." mypy; do
  step "$check"
  $check || status=1
done
step "make docs"
# In an environment of its own: what MkDocs needs is none of the project's dependencies.
export KVROUTER_MKDOCS_PYTHON=$ROOT/build/ci/docs/bin/python
[ -x "$KVROUTER_MKDOCS_PYTHON" ] || python3 -m venv build/ci/docs
"$KVROUTER_MKDOCS_PYTHON" -m pip install --quiet -r docs/site/requirements.txt
python -m pytest -q tests/docs/test_site.py || status=1
exit "$status"
