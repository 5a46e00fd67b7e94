# Every target can be run first: each makes .venv before it needs it, and is quick when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
RUN := OMP_NUM_THREADS=1 $(BIN)/python

.PHONY: setup demo test test-long sim soak check docs format bench clean

setup: .venv/.installed

# pip first: that of Debian 12 tries versions for more than ten minutes, a newer one for seconds. Then torch, at its pin: a
# looser range would pull several gigabytes of CUDA packages.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 2; }
	@echo "setup: creating .venv (about 2 GB, two to four minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) install --upgrade -c constraints.txt pip
	@echo "setup: installing torch"
	@$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "setup: installing elastic-train and what it needs"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "setup: done"

demo: setup
	@$(RUN) -m chaos.demo

test: setup
	@echo "test: the whole suite, with real etcd, torchrun, signals, S3 and MLflow"
	@$(RUN) -m pytest

test-long: setup
	@echo "test: the whole suite, and what takes minutes"
	@$(RUN) -m pytest -m "long or not long"

sim: setup
	@echo "sim: five hundred jobs in virtual time, each with its faults, and a verdict on each"
	@$(RUN) -m chaos.cli sim --seeds 500 --json

soak: setup
	@echo "soak: half a minute of real faults on one job, and a verdict on it"
	@$(RUN) -m chaos.cli run soak --minutes 0.5 --seed 1 --out runs/soak-short

check: setup
	@echo "check: format, lint, types, imports, the documentation site"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "docs: site/index.html"

format: setup
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: setup
	@$(RUN) -m benchmarks.reduction --json

clean:
	rm -rf .venv data runs build site mlflow.db *.egg-info
