# make demo   set up, then the quick start: forward, backward, the derived program, the error, the kernel
# make test   set up, then the checks that need no GPU, but for the slow ones
# make slow   the slow ones: kernels of many programs compiled by nvcc, and most cases of large tables
# make lint   the style and type checks alone
# make pyright   installs basedpyright, 60 MB, and has it find the mistakes that mypy finds in lint's tests
# make docs   the documents as a site, in build/site
# make drawings   the pictures of the documents, and what the pages for maintainers print, made anew
# make measures   files, functions, types and imports in numbers; AT=COMMIT puts another commit beside
# make clean  remove what these targets made
#
# The first call makes .venv and installs the versions of constraints.txt in it. To use another interpreter:
#   make test PYTHON=python3.12
# To use the environment that is active, as it is, with nothing installed by this file:
#   make test VENV=
# torch's CPU build is a smaller download than the one PyPI gives on Linux:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
# A recipe that names MAKE itself runs even where `make -n` asks what it would run.
ITSELF := $(MAKE)

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
endif

.PHONY: demo test slow lint pyright docs drawings measures clean

demo: $(READY)
	$(RUN) attn_script/mha.py --show

# Tests start some forty processes that import the package: bytecode is written, for the next process or call.
test slow: export PYTHONDONTWRITEBYTECODE :=

# lint keeps one core busy for a minute where mypy has no cache: beside the tests, and told after them
test: $(READY)
	@mkdir -p build; $(ITSELF) --no-print-directory lint > build/lint.txt 2>&1 & lint=$$!; \
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -q -m "not slow"; tests=$$?; \
	wait $$lint; linted=$$?; cat build/lint.txt; exit $$((tests || linted))

slow: $(READY)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -q -m slow

lint: $(READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

pyright: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check basedpyright==1.40.2
	$(RUN) -m pytest -q tests/test_typing.py

docs: $(READY)
	$(RUN) -m mkdocs build --strict

drawings: $(READY)
	$(RUN) docs/pictures.py
	$(RUN) docs/drawings/draw.py
	$(RUN) docs/outputs.py --write
	$(RUN) docs/notebooks/run.py --write

measures: $(READY)
	@$(RUN) -m tests.measures $(if $(AT),--at $(AT))

# torch first and alone: the constraint then takes whichever 2.13.0 build the index prefers, and nothing replaces it.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -type d -prune -exec rm -rf {} +
