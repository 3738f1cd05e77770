# Each target does its own set-up: a fresh Debian or Ubuntu machine needs only python3, git, make and
# a C++20 compiler. Everything made here lands in .venv/ and build/.

PYTHON     ?= python3
TORCH      ?= torch==2.13.0
JOBS       ?= $(shell nproc)
BENCH_ARGS ?=
# How long each fuzz target looks.
FUZZ_SECONDS ?= 10

VENV  := .venv
PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check install --quiet
PATHS := $(wildcard python tests bench tools)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

# TSan needs a predictable address space, which some kernels give only without randomisation.
TSAN_RUN := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# A test that hangs is ended with all its children, never waited for. At a terminal only the test itself
# is ended, because a process group of its own would not see Ctrl-C.
TIMEOUT      := timeout --kill-after=10 $(shell test -t 0 && echo --foreground)
CPP_LIMIT    := $(TIMEOUT) 30m
PYTHON_LIMIT := $(TIMEOUT) 20m
RDMA_LIMIT   := $(TIMEOUT) 20m
WHEEL_LIMIT  := $(TIMEOUT) 60m
FUZZ_LIMIT   := $(TIMEOUT) 12h

# What ends up in the installed package. Folders are listed too: theirs is the date that a deletion changes.
PACKAGE_SOURCES := CMakeLists.txt pyproject.toml $(shell find cpp python -name __pycache__ -prune -o -print)

# $(call need,<test>,<Debian packages>): installs the packages if the test fails and we may, else says so.
define need
	@{ $(1); } >/dev/null 2>&1 || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "kvzc: installing $(2)"; \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(2) >/dev/null; \
	else \
	  echo "kvzc: please install: $(2) (names as in Debian and Ubuntu)"; exit 1; \
	fi
endef
# $(call has_header,<name>): succeeds if the compiler finds it.
has_header = echo "\#include <$(1)>" | $(CXX) -x c++ -E -

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-core test-python test-asan test-tsan test-rdma docs \
        test-rdma-demo test-aarch64 test-wheel lint bench bench-core bench-python bench-rdma stub clean \
        distclean gtest verbs fuzz fuzz-corpus tidy coverage

help:
	@echo "make demo         a real prefill/decode split on one host"
	@echo "make test         all tests: test-core, test-aarch64, test-rdma, then test-python"
	@echo "make test-all     the same, tidy, fuzz, test-asan, test-tsan and test-wheel"
	@echo "make test-core    C++ unit and conformance tests"
	@echo "make test-rdma    the rdma transport on real verbs: Soft-RoCE in a QEMU guest"
	@echo "make test-rdma-demo  the demo across two guests as two hosts; a quarter of an hour, not part of test"
	@echo "make test-python  Python and layout tests, on the installed package"
	@echo "make test-asan    C++ tests under AddressSanitizer and UBSan"
	@echo "make test-tsan    C++ tests under ThreadSanitizer"
	@echo "make test-aarch64 C++ unit tests compiled for 64-bit ARM, under QEMU"
	@echo "make fuzz         libFuzzer on everything that reads bytes of others; FUZZ_SECONDS=10 for each"
	@echo "make coverage     C++ tests, and which lines of the core they run: build/coverage/coverage.html"
	@echo "make test-wheel   the wheel in a clean environment of each CPython, 3.10 to 3.13"
	@echo "make lint         ruff, mypy, and Clang on what each mutex guards"
	@echo "make tidy         clang-tidy on the core, some minutes; TIDY_FILES='cpp/src/core/wire.cc' for these alone"
	@echo "make bench        bench-core and bench-python, each shortly; BENCH_ARGS='...' and"
	@echo "                  PYTHON_BENCH_ARGS='...' choose instead"
	@echo "make bench-rdma   the rdma transport beside bare verbs, in a QEMU guest; BENCH_ARGS likewise"
	@echo "make stub         write python/kvzc/_core.pyi anew from the built module"
	@echo "make docs         write docs/errors.md anew from the built module"
	@echo "make clean        remove what was built; distclean removes .venv as well"

# ---- set-up; each stamp is a file in .venv ----

$(VENV)/.tools:
	$(call need,$(PYTHON) -c 'import ensurepip',python3-venv)
	@echo "kvzc: making $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) cmake ninja
	@touch $@

$(VENV)/.python: $(VENV)/.tools
	$(call need,$(call has_header,$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h),python3-dev)
	@echo "kvzc: installing $(TORCH) and the build requirements"
	@$(PIP) '$(TORCH)' scikit-build-core pybind11
	@touch $@

# Without isolation, because an isolated build has a new path each time and so compiles everything anew;
# pip checks the build requirements of pyproject.toml all the same.
$(VENV)/.installed: $(VENV)/.python $(PACKAGE_SOURCES) | verbs
	@echo "kvzc: building and installing kvzc"
	@$(PIP) --no-build-isolation --check-build-dependencies \
	  --config-settings=cmake.define.KVZC_WERROR=ON '.[test]'
	@touch $@

# The headers make the difference: with them the rdma transport is built, and the library is opened at
# run time. Where nothing may be installed, kvzc is built without.
verbs:
	-$(call need,$(call has_header,infiniband/verbs.h),libibverbs-dev)

gtest:
	$(call need,$(call has_header,gtest/gtest.h),libgtest-dev)

# ---- what people ask for ----

demo: $(VENV)/.installed
	@$(PY) -m kvzc demo

test: test-core test-aarch64 test-rdma test-python

test-all: test tidy fuzz test-asan test-tsan test-wheel

# $(call build,<folder>,<cmake options>)
build = cmake -S . -B build/$(1) -G Ninja $(2) && cmake --build build/$(1)
ctest = ctest --test-dir build/$(1) --output-on-failure --no-tests=error

test-core: $(VENV)/.tools gtest verbs
	$(call build,core,-DKVZC_TESTS=ON -DKVZC_WERROR=ON)
	$(CPP_LIMIT) $(call ctest,core)

test-aarch64: $(VENV)/.tools gtest verbs
	-$(call need,command -v aarch64-linux-gnu-g++,g++-aarch64-linux-gnu)
	-$(call need,command -v qemu-aarch64,qemu-user)
	$(CPP_LIMIT) tests/aarch64/run.sh

test-rdma: $(VENV)/.installed gtest verbs
	$(call build,core,-DKVZC_TESTS=ON -DKVZC_WERROR=ON)
	$(RDMA_LIMIT) tests/softroce/run.sh

test-rdma-demo: $(VENV)/.installed
	tests/softroce/boot.sh --prepare
	KVZC_DEMO=1 $(RDMA_LIMIT) $(PY) -m pytest -p no:cacheprovider -s tests/softroce/hosts -k demo

# No -Werror here: GCC documents false warnings in sanitized code, and test-core has judged the same sources.
SANITIZED := -DKVZC_TESTS=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g"

test-asan: $(VENV)/.tools gtest
	$(call build,asan,$(SANITIZED) -DKVZC_SANITIZE="address;undefined")
	UBSAN_OPTIONS=print_stacktrace=1 $(CPP_LIMIT) $(call ctest,asan)

# The conformance tests fork: a child may start threads of its own (die_after_fork), and the threads of
# its parent, which it does not have, are no leak (report_thread_leaks).
test-tsan: $(VENV)/.tools gtest
	$(call build,tsan,$(SANITIZED) -DKVZC_SANITIZE=thread)
	TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 die_after_fork=0 report_thread_leaks=0" \
	  $(CPP_LIMIT) $(TSAN_RUN) $(call ctest,tsan)

# What a child that is killed has run does not count.
coverage: $(VENV)/.tools gtest verbs
	$(call build,coverage,-DKVZC_TESTS=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g --coverage -fprofile-update=atomic')
	find build/coverage -name '*.gcda' -delete
	$(CPP_LIMIT) $(call ctest,coverage)
	@$(PIP) gcovr
	cd build/coverage && ../../$(PY) -m gcovr --root ../.. --filter '../../cpp/(src|include)/' \
	  --gcov-ignore-errors=all --gcov-ignore-parse-errors=negative_hits.warn --html-details coverage.html --txt-summary --txt coverage.txt

fuzz: $(VENV)/.tools verbs
	-$(call need,command -v clang++,clang libclang-rt-dev)
	$(FUZZ_LIMIT) tests/fuzz/run.sh $(FUZZ_SECONDS)

# Takes what was found into the corpus that every `make test-core` replays.
fuzz-corpus: $(VENV)/.tools verbs
	build/fuzz/kvzc_fuzz_seeds build/fuzz/found
	$(FUZZ_LIMIT) tests/fuzz/run.sh 0 merge

test-python: $(VENV)/.installed
	$(PYTHON_LIMIT) $(PY) -m pytest

# WHEEL_PYTHON="3.11 3.12" tries just these, and wants them all.
test-wheel:
	$(WHEEL_LIMIT) $(PYTHON) tests/wheel/run.py $(WHEEL_PYTHON)

lint: $(VENV)/.installed
	ruff check $(PATHS)
	ruff format --check $(PATHS)
	mypy
	-$(call need,command -v clang++,clang)
	tools/thread_safety.sh

tidy: $(VENV)/.tools verbs
	-$(call need,command -v clang-tidy,clang-tidy)
	tools/tidy.sh $(TIDY_FILES)

# Enough to see that each runs; figures to keep want seconds, and cores that are idle otherwise.
SHORTLY := --seconds 0.2

bench: bench-core bench-python

bench-python: $(VENV)/.installed
	$(PY) bench/python/python_cost.py $(or $(PYTHON_BENCH_ARGS),$(SHORTLY))

bench-rdma: $(VENV)/.tools verbs
	$(call build,bench,-DKVZC_BENCH=ON -DKVZC_WERROR=ON -DCMAKE_BUILD_TYPE=Release -DKVZC_RDMA=ON)
	tests/softroce/boot.sh --prepare
	tests/softroce/boot.sh -t 600 -- build/bench/kvzc_bench_rdma $(BENCH_ARGS)

bench-core: $(VENV)/.tools
	$(call build,bench,-DKVZC_BENCH=ON -DKVZC_WERROR=ON -DCMAKE_BUILD_TYPE=Release)
	build/bench/kvzc_bench $(or $(BENCH_ARGS),$(SHORTLY))

stub: $(VENV)/.installed
	$(PY) tools/make_stub.py python/kvzc/_core.pyi

# What is made of the code: its table of errors.
docs: $(VENV)/.installed
	mkdir -p docs
	$(PY) tools/make_errors.py docs/errors.md

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(VENV)/.installed

distclean: clean
	rm -rf $(VENV)
