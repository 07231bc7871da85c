# The two commands a newcomer needs: `make up` and `make test`. Everything happens in .venv and build/.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
MINUTES ?=
DATA ?=
UPFLAGS ?=

.PHONY: install install-test up check format test long hardware bench requirements clean

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

$(VENV)/.uv:
	@tools/links.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python is $$($(PYTHON) -V 2>&1), expected 3.11 or newer (make PYTHON=...)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $@

NATIVE := CMakeLists.txt $(shell find enforcer/native simulator/native -type f 2>/dev/null)

$(VENV)/.installed: $(VENV)/.uv pyproject.toml requirements/build.txt requirements/run.txt $(NATIVE)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/build.txt -r requirements/run.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements/test.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/test.txt
	@touch $@

up: install
	$(BIN)/poolmeter up $(if $(DATA),--data $(DATA)) $(UPFLAGS)

format: install-test
	$(BIN)/ruff format . && $(BIN)/ruff check --fix . && $(BIN)/clang-format -i $$(git ls-files '*.c' '*.h')

check: install-test
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.c' '*.h')
	$(BIN)/mypy -p poolmeter
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

test: check
	$(BIN)/pytest -n 2 --dist loadfile

# The same tests at full counts; with MINUTES they repeat with new seeds until the time is up.
long: install-test
	$(BIN)/python tests/long.py $(if $(MINUTES),--minutes $(MINUTES))

hardware:
	$(PYTHON) benchmarks/hardware.py

bench: install-test
	$(BIN)/python benchmarks/run.py

# Pins every dependency with its hashes; no registry's address is written.
requirements:
	tools/requirements.sh

clean:
	rm -rf build dist $(VENV)
