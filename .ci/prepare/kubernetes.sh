#!/usr/bin/env bash
# A real Kubernetes API server, compiled where the cache has none.
. "$(dirname "$0")/../lib.sh"
tests/kubernetes/make_apiserver.sh
