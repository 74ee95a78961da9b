# make train   make the environment and run the main job
# make test    make the environment, lint, and pass the tests
# make core    the essential tests on the newest Python that is here, with its own environment
# make bench   the benchmarks whose tables are in docs/benchmarks.md (the 8B compiles take minutes)

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# A second, newer Python: given by name, on the path, or under pyenv.
NEWER ?= $(shell for p in python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python) $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
VENV_NEWER := .venv-newer

.PHONY: train test core bench lint clean

train: $(VENV)/base
	$(VENV)/bin/python -m jaxpar.train --config configs/toy.yaml --mesh 4x2 $(ARGS)

test: lint
	$(VENV)/bin/python -m pytest $(ARGS)

core: $(VENV_NEWER)/ready
	$(VENV_NEWER)/bin/python -m pytest -m core $(ARGS)

bench: $(VENV_NEWER)/ready
	$(VENV_NEWER)/bin/python benchmarks/llama8b_tpu.py

lint: $(VENV)/ready
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/codespell
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/basedpyright --pythonpath $(VENV)/bin/python

# What the main job needs, and on top of it what the tests need.
$(VENV)/base: pyproject.toml
	@test -n "$(PYTHON)" || { echo "jaxpar needs Python 3.11 or newer on the path; none was found"; exit 1; }
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable .
	touch $@

$(VENV)/ready: $(VENV)/base
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV_NEWER)/ready: pyproject.toml
	@test -n "$(NEWER)" || { echo "make core needs Python 3.12 or newer; say where with NEWER=..."; exit 1; }
	test -x $(VENV_NEWER)/bin/python || $(NEWER) -m venv $(VENV_NEWER)
	$(VENV_NEWER)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV_NEWER) runs
