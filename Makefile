# Every target can be run first: each makes .venv before it needs it, and is quick when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
DIST ?= dist
# What a hundred started processes import is compiled once, also where the environment says otherwise.
RUN := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python
PYTEST := $(RUN) -m pytest
# A third of the time a slow test waits for processes, leases and sockets, so there are three processes for two cores. The quick
# tests compute: one process for each core, forked when all is imported and collected, which a simulation on another core outlasts.
# Those of deployment wait most of the time. (nproc would say what OMP_NUM_THREADS says.)
CORES := $(shell env -u OMP_NUM_THREADS nproc)
OVERLAPPING := -n $(shell echo $$(( ($(CORES) * 3 + 1) / 2 ))) --maxprocesses 8 --dist loadgroup
WAITING := -n $(shell echo $$(( $(CORES) * 3 ))) --maxprocesses 8 --dist loadgroup
ON_EVERY_CORE := -p no:xdist -p tests.forked --forks $(CORES)

.PHONY: setup demo test test-processes hunts test-fast test-long test-deploy test-deploy-quick test-torch skypilot gpu sim soak storm check docs release image format bench clean

setup: .venv/.installed

# pip first: that of Debian 12 tries versions for more than ten minutes, a newer one for seconds. Then torch, at its pin: a
# looser range would pull several gigabytes of CUDA packages. The rest by uv, on every core; by pip where uv finds no index.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 2; }
	@echo "setup: creating .venv (about 2 GB, one to three minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) install --upgrade -c constraints.txt pip uv
	@echo "setup: installing torch"
	@$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "setup: installing elastic-train and what it needs"
	@UV_DEFAULT_INDEX="$${PIP_INDEX_URL:-$$($(PIP) config get global.index-url 2> /dev/null || echo https://pypi.org/simple)}" \
	$(BIN)/uv pip install -q --python $(BIN)/python --compile-bytecode -c constraints.txt -e '.[dev]' || \
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "setup: done"

demo: setup
	@$(RUN) -m chaos.demo

test: setup
	@echo "test: every law, in memory or with few processes, with real etcd, torchrun, signals and S3, on every core"
	@$(PYTEST) $(OVERLAPPING) -m "not long and not deploy and not hunt and not process"

# Each transport, each real fault and each place once; CI runs them after `make test`.
test-processes: setup
	@echo "test-processes: whole jobs, services, networks, MLflow and the installed package as real processes"
	@$(PYTEST) $(OVERLAPPING) -m "process and not long and not deploy and not hunt"

# What is proven in memory, or of one case in several, each time, and of all of them here.
hunts: setup
	@echo "hunts: planted bugs, combinations at more exchanges, and by processes"
	@$(PYTEST) $(OVERLAPPING) -m "hunt and not long"

test-fast: setup
	@echo "test-fast: what starts no processes and takes no time, and beside it twenty-five jobs in virtual time"
	@simulated=$$(mktemp); $(RUN) -m chaos.cli sim --seeds 25 --json > $$simulated & simulation=$$!; \
	$(PYTEST) $(ON_EVERY_CORE) --hypothesis-profile inner-loop -m "not long and not deploy and not hunt and not process and not slow and not heavy"; code=$$?; \
	wait $$simulation || code=1; cat $$simulated; rm -f $$simulated; exit $$code

test-long: test test-processes
	@echo "test-long: what takes minutes, one at a time"
	@$(PYTEST) -m long

# -rs names what is skipped and why: without root, or the packages, there is no cluster. Its tests wait for Slurm, Ray and podman
# more than they compute, so several run at once; those of an xdist group share a cluster or an image, and run one at a time.
test-deploy: setup
	@$(MAKE) -s skypilot || echo "test-deploy: SkyPilot's parser could not be installed"
	@echo "test-deploy: jobs as a cluster runs them, with Slurm's own programs on machines in namespaces"
	@$(PYTEST) $(WAITING) -rfEs -m "deploy or monitoring" tests/deploy tests/elastic_train/insight/test_prometheus.py

# What takes no cluster, release or live job: manifests, schemas, the SkyPilot task.
test-deploy-quick: setup
	@$(MAKE) -s skypilot || echo "test-deploy-quick: SkyPilot's parser could not be installed"
	@echo "test-deploy-quick: manifests by their APIs, tasks by their parsers"
	@$(PYTEST) -rfEs -m deploy tests/deploy/test_kubernetes.py tests/deploy/test_skypilot.py

# At another version of torch than the pin: `make test-torch TORCH=2.9.1`, the quick tests and a live job whose worker is killed.
# An environment of its own has torch (4 GB where the index has no build for CPUs) and what that needs; .venv has the rest.
TORCH_ENV = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/elastic-train/torch-$(TORCH)
WITH_TORCH = PATH="$(TORCH_ENV)/bin:$$PATH" OMP_NUM_THREADS=1 nice $(TORCH_ENV)/bin/python -m pytest
test-torch: setup
	@test -n "$(TORCH)" || { echo "test-torch: which torch? make test-torch TORCH=2.9.1"; exit 2; }
	@test -e $(TORCH_ENV)/.installed || $(MAKE) -s $(TORCH_ENV)/.installed
	@$(TORCH_ENV)/bin/python -c 'import torch; print("test-torch:", torch.__version__)'
	@$(WITH_TORCH) $(ON_EVERY_CORE) --hypothesis-profile inner-loop -m "not long and not deploy and not hunt and not process and not slow"
	@$(WITH_TORCH) tests/elastic_train/training/live/test_live.py -k dead_one_replaced

$(TORCH_ENV)/.installed:
	@echo "test-torch: installing torch $(TORCH)"
	@rm -rf $(@D) && $(BIN)/python -m venv --without-pip $(@D)
	@grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	@$(PIP) --python $(@D)/bin/python install -c $(@D)/constraints.txt torch==$(TORCH)
	@$(PIP) --python $(@D)/bin/python install --no-deps -e .
	@site="$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/ours.pth"
	@touch $@

skypilot: .venv/skypilot/.installed

# On top of what .venv has: a program of its own, since SkyPilot wants other versions of some packages than we do.
.venv/skypilot/.installed: .venv/.installed tests/deploy/skypilot.txt
	@echo "skypilot: installing its parser of tasks (about 100 MB)"
	@$(BIN)/python -m venv --without-pip .venv/skypilot
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(.venv/skypilot/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	@$(PIP) --python .venv/skypilot/bin/python install --no-deps -r tests/deploy/skypilot.txt
	@touch $@

# Speed first, then jobs, faults and NCCL (several ranks share the first device; NCCL gets one each where there are as many), then
# the rest; figures are written as they come, and all ends within nine minutes. `make gpu ONLY="tests faults"` runs some parts;
# `make gpu INSTALLED=python3.12` runs on that interpreter's packages, without a network.
gpu: $(if $(INSTALLED),,setup)
	@OMP_NUM_THREADS=1 $(or $(INSTALLED),$(BIN)/python) -m benchmarks.gpu --only "$(ONLY)" --within 520 --write docs/benchmarks.md

sim: setup
	@echo "sim: five hundred jobs in virtual time, each with its faults, and a verdict on each"
	@$(RUN) -m chaos.cli sim --seeds 500 --json

soak: setup
	@echo "soak: half a minute of real faults on one job, and a verdict on it"
	@$(RUN) -m chaos.cli run soak --minutes 0.5 --seed 1 --out runs/soak-short

# For a night: continues where the ledger in runs/storm ends; Ctrl-C, and the same command later, is one storm.
storm: setup
	@echo "storm: five thousand real faults over all layouts, a verdict and a line for each job in runs/storm"
	@$(RUN) -m chaos.cli storm

check: setup
	@echo "check: format, lint, types, imports, generated lists, words, the documentation site"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/python -m tests.release.limits --check
	@$(BIN)/python -m tests.release.words
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: setup
	@$(BIN)/python -m tests.release $(DIST)

# What deploy/Containerfile builds from; then: buildah build --format docker -f deploy/Containerfile -t elastic-train build/image
image: setup
	@rm -rf build/image && mkdir -p build/image
	@$(BIN)/python -m build --no-isolation --outdir build/image . > /dev/null
	@rm build/image/*.tar.gz && cp constraints.txt build/image
	@echo "image: build/image has the wheel and its pins"; \
	builder=$$(command -v buildah || command -v podman || command -v docker) || { echo "image: no buildah, podman or docker here to build it with"; exit 1; }; \
	case $$builder in */docker) format=;; *) format="--format docker";; esac; \
	$$builder build $$format -f deploy/Containerfile $(IMAGE) -t elastic-train:$$(ls build/image/*.whl | cut -d- -f2) build/image

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "docs: site/index.html"

format: setup
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: setup
	@$(RUN) -m benchmarks.reduction --json

clean:
	rm -rf .venv data runs build dist site mlflow.db *.egg-info
