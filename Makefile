# `make` goes from nothing to the results table; see README.md.
# Assigned, not `?=`: other programs export ENV, PORT and the like. What is on the command line goes before it.
# Which lock: cpu or cuda. What is installed stays, unless another one is asked for.
ENV = $(if $(wildcard .venv/.installed-cuda),cuda,cpu)
# What makes the environment; the locks are of Python 3.11.
PYTHON = python3
# What config/config.yaml says.
EXPERIMENT = $(shell sed -n 's/^experiment: *//p' config/config.yaml)
EVIDENCE =
GPU =
GPUS =
PRICE =
RESULTS := $(shell sed -n 's/^results: *//p' config/config.yaml)
PORT = 5000
# Tests run in so many processes at once; one that starts real engines takes about 3 GB.
WORKERS = 2
PYTEST = $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
SNAKEMAKE := $(BIN)/snakemake
INSTALLED := $(VENV)/.installed-$(ENV)
# Where pip finds the CPU build of torch if the package index that it is set to has none. Not for CUDA's lock: for
# torch==2.13.0 pip would take one of the builds there, such as 2.13.0+xpu, before the index's own.
TORCH_INDEX := https://download.pytorch.org/whl/torch/
INSTALL = $(BIN)/pip install --quiet --quiet --no-deps -r envs/$(ENV).txt -r envs/slurm.txt -r envs/dev.txt

$(if $(filter-out cpu cuda,$(ENV)),$(error ENV=$(ENV): expected cpu or cuda))
$(if $(filter command,$(origin experiment)),$(error experiment=$(experiment): for make it is EXPERIMENT=$(experiment)))
IS_LOCKED = -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'

.PHONY: run smoke evidence reference plan test test-all test-verl check bench format docs mlflow install clean
run: install
	@$(SNAKEMAKE) --quiet host reason --config experiment=$(EXPERIMENT)
	@$(SNAKEMAKE) --quiet all --config experiment=$(EXPERIMENT) --report $(RESULTS)/$(EXPERIMENT)/report.html
	@$(BIN)/dvp show --config $(RESULTS)/$(EXPERIMENT)/config.yaml

smoke: install
	@$(MAKE) --no-print-directory run EXPERIMENT=smoke

# All experiments that answer config/claims.yaml, and the claims report.
# make evidence EVIDENCE=config/evidence_smoke.yaml
evidence: install
	@$(SNAKEMAKE) evidence --quiet host reason $(if $(EVIDENCE),--configfile $(EVIDENCE))
	@$(SNAKEMAKE) evidence --quiet all $(if $(EVIDENCE),--configfile $(EVIDENCE)) --report $(RESULTS)/evidence/report.html
	@echo "claims   $(RESULTS)/evidence/claims.md, $(RESULTS)/evidence/report.html"

# What results/reference keeps, drawn again from its estimates: tables, figures, the claims report.
reference: install
	$(BIN)/dvp redraw --results results/reference

# make plan EXPERIMENT=paper_8b GPU=h200 GPUS=64 PRICE=2.5
plan: install
	@$(BIN)/dvp plan --config experiment=$(EXPERIMENT) $(if $(GPU),--gpu $(GPU)) $(if $(GPUS),--gpus $(GPUS)) \
	  $(if $(PRICE),--price $(PRICE))

test: install
	$(PYTEST) -m "not nightly"

# With what takes longest: training that is killed again and again, alone and under Slurm.
test-all: install
	$(PYTEST)

# Against verl's own functions. Its antlr4 is older than this environment's: one on top of it has it first.
test-verl: install
	@$(BIN)/python -m venv .verl && .verl/bin/pip install --quiet --no-deps -r envs/verl.txt
	@cd $(VENV)/lib/python3.11/site-packages && pwd >"$(CURDIR)/.verl/lib/python3.11/site-packages/dvp.pth"
	PYTHONPATH="$(CURDIR)/src" .verl/bin/python -m pytest -q tests/integrations/test_verl.py

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(SNAKEMAKE) --lint
	$(PYTEST) -q -m "not slow" --hypothesis-profile quick

bench: install
	$(BIN)/python benchmarks/head.py
	@$(SNAKEMAKE) $(RESULTS)/$(EXPERIMENT)/base/manifest.json --quiet host reason --config experiment=$(EXPERIMENT)
	$(BIN)/python benchmarks/step.py --config $(RESULTS)/$(EXPERIMENT)/config.yaml

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/snakefmt Snakefile workflow
	$(BIN)/python -m dvp.experiment.reference  # docs/keys.md and config/schema.json

# The pages as a site, .site/html; a dead link fails.
docs:
	@rm -rf .site/pages && mkdir -p .site/pages
	@git ls-files -z -- '*.md' '*.png' '*.svg' '*.yaml' '*.yml' '*.txt' '*.json' '*.csv' '*.html' '*.py' LICENSE | tar c --null -T - | tar x -C .site/pages
	@test -x .site/env/bin/mkdocs || { $(PYTHON) -m venv .site/env && .site/env/bin/pip install --quiet -r envs/docs.txt; }
	NO_MKDOCS_2_WARNING=1 .site/env/bin/mkdocs build --strict --quiet
	@echo "the site   .site/html/index.html"

# The address goes through the environment, as it may hold a password.
mlflow: install
	@export MLFLOW_BACKEND_STORE_URI="$${MLFLOW_TRACKING_URI:-sqlite:///$(RESULTS)/mlflow.db}"; \
	case "$$MLFLOW_BACKEND_STORE_URI" in \
	  http://*|https://*) $(BIN)/python -c 'from pathlib import Path; from dvp.tracking.store import store_name; \
	     print("the tracking server is at", store_name(Path("$(RESULTS)")))' ;; \
	  *) echo "open http://127.0.0.1:$(PORT)/#/experiments?workflowType=machine_learning"; \
	     MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow ui --workers 1 --port $(PORT) ;; \
	esac

install: $(INSTALLED)

$(INSTALLED): envs/$(ENV).txt envs/slurm.txt envs/dev.txt pyproject.toml
	@# CPU and CUDA builds of one package have different names: they must not share an environment.
	@test -z "$(filter-out $(INSTALLED),$(wildcard $(VENV)/.installed-*))" || rm -rf $(VENV)
	@test ! -d $(VENV) || $(BIN)/python $(IS_LOCKED) 2>/dev/null || rm -rf $(VENV)
	@$(PYTHON) $(IS_LOCKED) || test -x $(BIN)/pip || \
	  { echo "$(PYTHON): expected Python 3.11, of which the locks are, found $$($(PYTHON) --version 2>&1); make PYTHON=python3.11" >&2; \
	    echo "Ubuntu 22.04 and 24.04: sudo add-apt-repository ppa:deadsnakes/ppa && sudo apt install python3.11-venv python3.11-dev; elsewhere: uv python install 3.11, then make PYTHON=\$$(uv python find 3.11)" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked $(ENV) environment into $(VENV) (about 3 minutes)"
	@$(INSTALL)$(if $(filter cpu,$(ENV)), || $(INSTALL) --find-links $(TORCH_INDEX))
	@$(BIN)/pip install --quiet --quiet --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) $(RESULTS)/tiny $(RESULTS)/smoke .snakemake
