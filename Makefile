# Two commands for a newcomer: `make report` and `make test`. Each sets up what it needs by itself.
PY := .venv/bin/python
UV := .uv/bin/uv
COMPARISON ?= laptop

.PHONY: report test setup check-all lint format lock clean
export PYTHONHASHSEED ?= 0

setup: .venv/.complete

# The bootstrap is a script because it must run before any Python of ours exists.
.venv/.complete: envs/requirements.txt envs/bootstrap.sh pyproject.toml
	bash envs/bootstrap.sh

lock: setup
	$(UV) pip compile -q --python $(PY) --generate-hashes --no-emit-index-url --no-header envs/requirements.in -o envs/requirements.txt
	bash envs/bootstrap.sh
	$(PY) envs/conda.py
