# Two commands do all the set-up: `make serve` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := env
.NOTPARALLEL:
.PHONY: env dev serve test test-full lint types unit contract e2e container image lock tables review clean help

MODEL ?=
PORT ?= 8000
ARGS ?=
PATCHES ?=
RELEASES ?=
DIFF ?=

SETUP := PYTHONPATH=tools python3 -m envsetup
BIN := .venv/bin
# Without the safe path the checkout would stand in front of the installed wheel in every process that the tests start.
RUN := PYTHONSAFEPATH=1
RESULTS := .cache/results
PYTEST := $(RUN) $(BIN)/pytest
QUICK := -m 'not full'
# A private Docker engine: it needs root and Debian. `make test CONTAINERS=yes` takes its tests in, as CI does.
CONTAINERS ?= no
ENGINE := tools/containers/engine.sh
# Most of a contract test is the start of an interpreter that imports vLLM: files run beside one another. Not those that
# start LMCache servers, with limits of a few seconds: two of them on two cores were seen to keep silent for ten.
BESIDE := -n auto --maxprocesses 4 --dist loadfile
SERVERS := tests/contract/test_lmcache_*.py
# The first container test builds the images.
PATIENT := -o timeout=1500

env:  ## make .venv from the locks (minutes the first time, resumes after an interruption)
	@$(SETUP)

dev:  ## the same with the project installed editable: edits take effect at once
	@$(SETUP) --editable

serve: env  ## start LMCache and the patched vLLM, say when they are ready [MODEL= PORT= ARGS=]
	@$(RUN) $(BIN)/python -m entrypoint.local --port '$(PORT)' $(if $(MODEL),--model '$(MODEL)') -- $(ARGS)

test: lint types unit contract e2e $(if $(filter-out no,$(CONTAINERS)),container)  ## lint, types, unit, contract, end-to-end and with CONTAINERS=yes container tests
	@$(if $(filter-out no,$(CONTAINERS)),,echo 'container tests left out: they take root and Debian, and CONTAINERS=yes')
	@PYTHONPATH=tools $(BIN)/python -m envsetup.totals $(RESULTS)

test-full: lint types  ## everything, including what takes longer than `make test` may
	@$(ENGINE) env $(PYTEST) $(PATIENT) tests --run-full --junitxml=$(RESULTS)/full.xml

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/hadolint Dockerfile
	@PYTHONPATH=tools $(BIN)/python -m envsetup.tables --check

types: env
	@$(BIN)/mypy

unit: env
	@rm -rf $(RESULTS)
	@$(PYTEST) $(QUICK) tests/unit --junitxml=$(RESULTS)/unit.xml

contract: env
	@$(PYTEST) $(QUICK) $(BESIDE) $(filter-out $(wildcard $(SERVERS)),$(wildcard tests/contract/test_*.py)) --junitxml=$(RESULTS)/contract.xml
	@$(PYTEST) $(QUICK) $(wildcard $(SERVERS)) --junitxml=$(RESULTS)/contract-lmcache.xml

e2e: env
	@$(PYTEST) $(QUICK) tests/e2e --junitxml=$(RESULTS)/e2e.xml

container: env  ## build the images on a private Docker engine and test them, compose.yaml included
	@$(ENGINE) env $(PYTEST) $(QUICK) $(PATIENT) tests/container --junitxml=$(RESULTS)/container.xml

image:  ## build the image for GPUs on the stock image, with this machine's Docker
	docker build --tag vllm-splint:latest .

tables: env  ## write the README's generated tables again
	@PYTHONPATH=tools:. $(BIN)/python -m envsetup.tables

review: env  ## fingerprint every release that a patch covers, list what is to be read [PATCHES= RELEASES= DIFF=1]
	@PYTHONPATH='$(CURDIR)/tools:$(CURDIR)/tests:$(CURDIR)' SPLINT_MODE=off $(BIN)/python -m reviewing \
	  --patches '$(PATCHES)' --releases '$(RELEASES)' $(if $(DIFF),--diff)

lock: env  ## resolve requirements/*.in again [UPGRADE=1 moves versions]
	@PYTHONPATH=tools $(BIN)/python -m envsetup.lock $(if $(UPGRADE),--upgrade)

clean:  ## remove .venv and everything that was built or cached in the checkout
	rm -rf .venv .setup.lock .cache build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18
