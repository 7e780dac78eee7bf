# Two commands do all set-up: `make up` serves a real model through Dynamo on this machine's CPU, `make test` runs the suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
WORKERS ?= 1
CONFIG ?= configs/smollm2-cpu.yaml
UV := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
# Wheels that the machine offers (a CPU build of torch, for instance) are taken before anything is downloaded.
LINKS := $(if $(PIP_FIND_LINKS),$(foreach d,$(PIP_FIND_LINKS),--find-links $(d)))

.PHONY: setup up test test-faults soak lint property helm-test k8s-test image-check bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(if $(LINKS),-$(UV) --no-index --no-deps $(LINKS) torch)
	$(UV) --constraint .ci/constraints.txt $(LINKS) --editable '.[demo,dev]'
	touch $@

up: setup
	$(BIN)/pagelane up --config $(CONFIG) --workers $(WORKERS) --port $(PORT)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not speed and not faults"

# Real frontends and workers that are drained, killed, stopped, flooded and broken: some minutes.
test-faults: setup
	$(BIN)/python -m pytest -m "faults and not soak" tests/faults tests/k8s

# Their long forms: about an hour.
soak: setup
	$(BIN)/python -m pytest -m soak --timeout 7200 -s tests/faults

# The long form of the property tests: some minutes.
property: setup
	PAGELANE_LONG_PROPERTY_TESTS=1 $(BIN)/python -m pytest --timeout 3600 tests/property

# The long form of the fuzzers alone: socket, requests, configuration (a few thousand examples each, drawn anew).
fuzz: setup
	PAGELANE_LONG_PROPERTY_TESTS=1 $(BIN)/python -m pytest --timeout 3600 tests/property/test_fuzz_*.py

# The chart alone: rendered, linted, held against schemas, golden files and refusals (also part of `make test`).
helm-test: setup
	$(BIN)/python -m pytest tests/helm

# The chart's pods started here, most in a stand-in cluster that the real helm installs into (also part of `make test`).
k8s-test: setup
	$(BIN)/python -m pytest tests/k8s

# The image without a container engine: its Dockerfile read, the demo's image built by the Dockerfile's own commands and
# started (a minute; the start needs root, and is left out with the reason where it cannot be).
image-check: setup
	$(BIN)/python -m helm.image.check

bench: setup
	$(BIN)/python -m pytest -m speed -s

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
