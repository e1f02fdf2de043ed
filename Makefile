# A bare machine needs Python >= 3.11 and make; every target makes the virtual environment that it runs in.
#   make demo        installs qjax into .venv and shows warm against cold on the embedded model
#   make serve       serves the embedded model over HTTP on 127.0.0.1:8000 until Ctrl-C
#   make test        adds the test packages to .venv and runs the tests
#   make test-clients   installs opencode and qwen-code into .clients and runs them against a server, about 2 minutes
#   make reference   runs the comparison with transformers, in .venv-reference (torch's CPU build)
#   make lint, make bench
#   make mutants     puts a fault at a time into the code of the caches and runs the test that must see it, about 15 minutes
# PYTHON=/path/to/python picks the interpreter that a new environment is made from.

SHELL := bash

# A candidate counts only if it runs: a version manager's shim can be on the path for a version that is not there.
USABLE := import sys, ensurepip, venv; raise SystemExit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do if $$p -c '$(USABLE)' >/dev/null 2>&1; then echo $$p; break; fi; done)
endif

# $(call install,DIRECTORY,REQUIREMENT): an editable install. An environment that is half made, or of an old Python, is made again;
# one that works is kept with what is in it. pip says what it downloads and installs, and nothing of what is there already.
define install
@if ! $(1)/bin/python -c 'import pip, sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	"$(or $(PYTHON),none)" -c '$(USABLE)' >/dev/null 2>&1 || { \
		echo "qjax needs Python 3.11 or newer with its venv module; found $(if $(PYTHON),$(PYTHON) to be unusable,none). Say which: make PYTHON=/path/to/python3" >&2; \
		exit 1; }; \
	echo "making $(1) with $$("$(PYTHON)" --version)"; \
	"$(PYTHON)" -m venv --clear $(1); \
fi
@echo "installing $(2) into $(1)"
@set -o pipefail; $(1)/bin/python -m pip install --disable-pip-version-check --progress-bar off --editable '$(2)' \
	| { grep -E '^ *Downloading [^ ]+\.(whl|tar\.gz) |^Installing coll' || true; }
@touch $@
endef

.PHONY: demo serve test clients test-clients reference lint bench mutants
.DELETE_ON_ERROR:

demo: .venv/.installed
	.venv/bin/qjax demo

serve: .venv/.installed
	.venv/bin/qjax serve

test: .venv/.installed-test
	.venv/bin/python -m pytest

clients: .venv/.installed-clients
	.venv/bin/python -m tests.clients.install

test-clients: clients
	.venv/bin/python -m tests.clients.alone .venv/bin/python -m pytest tests/clients

reference: .venv-reference/.installed
	.venv-reference/bin/python -m pytest tests/reference

lint: .venv/.installed-test
	.venv/bin/ruff check .

bench: .venv/.installed
	.venv/bin/qjax bench engine

mutants: .venv/.installed-test
	.venv/bin/python -m tests.mutation.run

.venv/.installed: pyproject.toml
	$(call install,.venv,.)

# After the plain one, so that two targets at once (make -j) never write to one environment together.
.venv/.installed-test: .venv/.installed
	$(call install,.venv,.[test])

.venv/.installed-clients: .venv/.installed-test
	$(call install,.venv,.[clients])

.venv-reference/.installed: pyproject.toml
	$(call install,.venv-reference,.[reference])
