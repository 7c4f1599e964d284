# `make` lists the targets. Everything runs in the active virtual environment.
.DEFAULT_GOAL := help
.PHONY: help dev quick lint fmt types test csrc-test csrc-tsan fuzz bench headline connectors stubs lock images release vllm-env gpu-check docker rdma drill cluster-drill doors page soak walks deploy-check docs monitoring
PYTHON ?= python
FUZZ_SECONDS ?= 60

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

dev: ## install editable with every development dependency; C++ rebuilds itself on import
	$(PYTHON) -m pip install scikit-build-core nanobind cmake ninja
	$(PYTHON) -m pip install --no-build-isolation -Ceditable.rebuild=true -e '.[dev]'

quick: ## before each commit: style, house rules and the fast unit tests; a minute
	ruff check .
	ruff format --check .
	$(PYTHON) -m pytest -q -n auto --dist loadfile -m "not slow and not rdma" tests/unit $(wildcard tests/test_*.py)

lint: ## style
	ruff check .
	ruff format --check .

fmt: ## apply the style
	ruff check --fix .
	ruff format .

types: ## mypy, strict
	mypy

test: ## unit, property, integration and fault tests; no engine, no container
	$(PYTHON) -m pytest -n auto --dist loadfile

csrc-test: ## C++ tests under AddressSanitizer and UBSan
	.ci/sanitize address,undefined build/asan

csrc-tsan: ## C++ tests under ThreadSanitizer
	.ci/sanitize thread build/tsan

fuzz: ## replay the kept inputs of every fuzz target, then fuzz for FUZZ_SECONDS of one processor in all
	.ci/fuzz $(FUZZ_SECONDS)

bench: ## the quick benchmarks; figures in build/
	@mkdir -p build
	$(PYTHON) -m benchmarks.store --quick --json build/store.json
	$(PYTHON) -m benchmarks.wire --quick --json build/wire.json

deploy-check: ## manifests, units and proxies of deploy/, as far as that goes without a cluster
	$(PYTHON) -m tests.deploy.check

docs: ## the pages as a site in build/site; needs docs/site/requirements.txt
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --config-file docs/site/mkdocs.yml

page: ## the status page in a headless browser
	$(PYTHON) -m pytest -m page tests/page

soak: ## 2,000 idle streams, then two minutes of a router at 70 % load: flat memory, nothing left over
	@mkdir -p build
	$(PYTHON) -m benchmarks.router_soak --seconds 120 --log build/router_soak.jsonl

headline: ## cold and warm TTFT with real engines, beside one alone; ten minutes
	$(PYTHON) -m benchmarks.headline --vllm-python "$$(tests/vllm/make_env.sh)" --json build/headline.json

connectors: ## TTFT with our connector, LMCache's, Mooncake's and NIXL, on real engines; ten minutes
	@mkdir -p build
	$(PYTHON) -m benchmarks.connectors --vllm-python "$$(tests/vllm/make_env.sh)" --json build/connectors.json

stubs: ## what the native modules offer, in build/stubs; tests/test_stubs.py holds the checked-in stubs to it
	@mkdir -p build/stubs
	$(PYTHON) -P -m nanobind.stubgen -q -m kvrouter_store._core -o build/stubs/_core.pyi
	$(PYTHON) -P -m nanobind.stubgen -q -m kvrouter._native -o build/stubs/_native.pyi

# Each version with the hashes of all its files, so that they hold for aarch64 too; those of tests need none.
LOCKED = uv pip compile --quiet --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28
LOCK = $(LOCKED) --generate-hashes --custom-compile-command 'make lock'
CLIENTS = $(wildcard tests/clients/python/with_*.py)
lock: ## renew deploy/*.lock: what the image installs, what builds it, and what builds the wheel for engines; tests/clients/
	$(LOCK) --extra dns --extra otel --extra tokenizers --no-emit-package kvrouter-store \
	  --output-file deploy/requirements.lock pyproject.toml
	printf '%s\n' build cmake nanobind ninja scikit-build-core | $(LOCK) --output-file deploy/build.lock -
	$(LOCK) --output-file deploy/wheels.lock wheels/requirements.txt
	for script in $(CLIENTS); do $(LOCKED) --no-annotate --no-header --output-file "$${script%.py}.lock" "$$script"; done
	cd tests/clients/node && npm install --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund

IMAGE = docker build -f deploy/Dockerfile --build-arg REVISION="$$(git rev-parse HEAD)" \
  --build-arg VERSION="$$(sed -n 's/^version = "\(.*\)"/\1/p' store/pyproject.toml)"
images: ## kvrouter:local, and with RDMA kvrouter-rdma:local; labels say the version and the revision
	$(IMAGE) -t kvrouter:local .
	$(IMAGE) --target rdma -t kvrouter-rdma:local .

RULE = deploy/kubernetes/components/monitoring/rules.yaml
monitoring: ## write Grafana's dashboard, and the rules of Prometheus as its Kubernetes operator takes them
	@mkdir -p build
	$(PYTHON) -m deploy.grafana.dashboard > build/kvrouter.json
	{ sed '/^spec:/q' $(RULE); sed -n '/^groups:/,$$s/^./  &/p' deploy/prometheus/rules.yml; } > build/rules.yaml
	mv build/kvrouter.json deploy/grafana/dashboards/
	mv build/rules.yaml $(RULE)

release: ## what is released of this tag, in dist/: wheels, source distributions, SBOM, checksums
	$(PYTHON) wheels/release.py

vllm-env: ## the environment of the real engines that tests/vllm need; prints its python
	@tests/vllm/make_env.sh

walks: ## 10,000 steps of vLLM's scheduler over each kind of cache groups, while the store and clients fail
	KVROUTER_VLLM_PYTHON=$$(tests/vllm/make_env.sh) KVROUTER_WALK_STEPS=10000 $(PYTHON) -m pytest -m vllm tests/vllm/test_walks.py -q -s

gpu-check: ## on a machine with a GPU: what CUDA must do, the torch engine, and vLLM where it is installed
	.ci/gpu-check $(PYTHON)

docker: ## deploy/ for real: build, start, ask, stop (a private Docker engine where there is none)
	.ci/stages/containers.sh

rdma: ## RDMA on Soft-RoCE, in two emulated machines joined by a virtual Ethernet; Debian's packages
	$(PYTHON) -m tests.rdma

doors: ## strangers at every listening port of every process, each kind of attack for a minute: nothing is left
	KVROUTER_DOORS_SECONDS=60 $(PYTHON) -m pytest tests/faults/test_doors.py -v -s -o faulthandler_timeout=0

drill: ## minutes of traffic while engines, store, links and clients fail, and engines freeze; a verdict in the last line
	$(PYTHON) -m tests.chaos
	$(PYTHON) -m tests.chaos.frozen

cluster-drill: ## nodes on three hosts (network namespaces: root), over Mooncake and Redis, while each of them fails
	$(PYTHON) -m tests.chaos.hosts
