#!/usr/bin/env bash
# deploy/ for real: images built, composed, asked, taken down. Starts a private Docker engine where none answers, for which
# it installs the Debian packages mmdebstrap, runc and iptables and unpacks docker.io, docker-compose and docker-buildx.
# Images of Redis, NGINX and Prometheus are then made of Debian's packages.
. "$(dirname "$0")/../lib.sh"
activate_dev
can_run_containers || skip "no Docker engine answers, and a private one needs root"
KVROUTER_VLLM_PYTHON=$(tests/vllm/make_env.sh)
export KVROUTER_VLLM_PYTHON
with_docker python -m pytest -m docker tests/deploy --timeout 400 -o faulthandler_timeout=0 -v -s
