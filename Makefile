# Two commands for a newcomer: `make report` and `make test`. Each sets up what it needs by itself.
PY := .venv/bin/python
UV := .uv/bin/uv
SNAKEMAKE := .venv/bin/snakemake
COMPARISON ?=
WORLD ?=
# Checks and tests in this order: what is fast comes first.
TESTS ?= tests/unit tests/property tests/integration tests/browser tests/slurm

.PHONY: report test setup check-all lint format lock clean
export PYTHONHASHSEED ?= 0
# Python 3.12 cannot start where the locale is C and this folder's path has an umlaut (site.py reads .pth files in it).
export LC_ALL := C.UTF-8

# The main job: predict, launch, probe, reconcile, plot, report. Ends with 0 only when everything reconciles.
# `make report COMPARISON=paper` makes another comparison, `WORLD=nccl` starts the ranks in another way.
OVERRIDES := $(if $(COMPARISON),comparison=$(COMPARISON)) $(if $(WORLD),world=$(WORLD))
report: setup
	. ./envs/cache.sh; $(SNAKEMAKE) --profile profiles/local $(if $(strip $(OVERRIDES)),--config $(OVERRIDES))

test: setup
	$(PY) -m pytest $(TESTS)

setup: .venv/.complete

# The bootstrap is a script because it must run before any Python of ours exists.
.venv/.complete: envs/requirements.txt envs/bootstrap.sh pyproject.toml
	bash envs/bootstrap.sh

# The whole sweep of layouts in the three frameworks, every rank that differs; tens of minutes.
check-all: setup
	$(PY) -m pytest -m sweep

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/snakefmt --check Snakefile workflow
	$(SNAKEMAKE) --lint

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/snakefmt Snakefile workflow

# New pins: edit envs/requirements.in, then this. The conda environments follow.
lock: setup
	$(UV) pip compile -q --python $(PY) --generate-hashes --no-emit-index-url --no-header envs/requirements.in -o envs/requirements.txt
	bash envs/bootstrap.sh
	$(PY) envs/conda.py

# What the main job made. The environments stay: remove .venv and .uv by hand.
clean:
	rm -rf .snakemake logs build
	find results -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +
