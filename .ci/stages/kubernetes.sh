#!/usr/bin/env bash
# Discovery before a real Kubernetes API server, which .ci/prepare/kubernetes.sh compiles from Debian's source.
. "$(dirname "$0")/../lib.sh"
activate_dev
python -m pytest -m kubernetes tests/kubernetes -v
