# Two commands do all the set-up: `make serve` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := env
.NOTPARALLEL:
.PHONY: env dev serve test test-full lint types unit contract e2e lock tables review clean help

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

env:  ## make .venv from the locks (minutes the first time, resumes after an interruption)
	@$(SETUP)

dev:  ## the same with the project installed editable: edits take effect at once
	@$(SETUP) --editable

serve: env  ## start LMCache and the patched vLLM, say when they are ready [MODEL= PORT= ARGS=]
	@$(RUN) $(BIN)/python -m entrypoint.local --port '$(PORT)' $(if $(MODEL),--model '$(MODEL)') -- $(ARGS)

test: lint types unit contract e2e  ## lint, types, unit, contract and end-to-end tests
	@PYTHONPATH=tools $(BIN)/python -m envsetup.totals $(RESULTS)

test-full: lint types  ## everything, including what takes longer than `make test` may
	@$(PYTEST) tests --run-full --junitxml=$(RESULTS)/full.xml

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=tools $(BIN)/python -m envsetup.tables --check

types: env
	@$(BIN)/mypy

unit: env
	@rm -rf $(RESULTS)
	@$(PYTEST) $(QUICK) tests/unit --junitxml=$(RESULTS)/unit.xml

contract: env
	@$(PYTEST) $(QUICK) tests/contract --junitxml=$(RESULTS)/contract.xml

e2e: env
	@$(PYTEST) $(QUICK) tests/e2e --junitxml=$(RESULTS)/e2e.xml

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
