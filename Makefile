# make quickstart   set up and run the main job: a text through MoE layers on 4 ranks, checked against an oracle
# make test         set up, then lint, type-check and run every test that needs no GPU
# make test-gpu     the same for the GPU tests, with the kernels under compute-sanitizer where it is found (else those
#                   are skipped with a message); works without network where python3 has torch
# make test-sanitize  the C++ engine under ThreadSanitizer, AddressSanitizer and UBSan; each release weakened
# Options: PYTHON=/path/to/python  TORCH="torch==2.13.0"  TORCH_INDEX=<package index for torch>  ARGS="..."
SHELL := /bin/sh
BIN := .venv/bin
export PYTHON TORCH TORCH_INDEX

.PHONY: quickstart test test-gpu test-sanitize lint format clean

quickstart:
	@sh tools/env.sh base
	@$(BIN)/megamoe launch configs/quickstart.yaml $(ARGS)

test: lint
	@$(BIN)/python -m pytest -m "not gpu" $(ARGS)

lint:
	@sh tools/env.sh dev
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

test-gpu:
	@sh tools/env.sh gpu
	@$(BIN)/python -m pytest -m gpu $(ARGS)

test-sanitize:
	@sh tools/env.sh dev
	@$(BIN)/python tests/sanitize/run.py all

format:
	@sh tools/env.sh dev
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

clean:
	rm -rf .venv .venv.lock build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
