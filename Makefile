# Each target works by itself from a clean checkout. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help venv build demo lint test docs mac-check bench clean distclean
SHELL := /bin/bash

PYTHON ?= python3
PY := .venv/bin/python
# What .venv has, a file for each group of packages in tools/setup_venv.sh.
VENV := .venv/.metalcore-
BUILT := build/.metalcore-built
# The same without the library for C, and the simulator's kernels are compiled when they first run.
RUNS := build/.metalcore-runs
SOURCES := $(shell find csrc kernels metalcore/msl metalcore/_device_*.py tools/build setup.py pyproject.toml -type f -not -name '*.pyc' 2>/dev/null)
# compile_shader uses the compiler that built the rest, which need not be called g++.
RUN = CXX="$$(tools/compiler.sh)" $(PY)
# Hundreds of processes of the tests would compile the package's modules again, and each pytest the tests' own.
unexport PYTHONDONTWRITEBYTECODE

EXAMPLES := linalg custom_kernel llama generate hybrid resnet50 qwen_decode

# The tests that subnormal numbers matter to most.
FLUSHED = $(addprefix tests/linalg/,test_extreme_scale.py test_rank.py) tests/activation/test_activation.py \
	$(addprefix tests/quant/,test_dequantize.py test_linear.py)

help:
	@echo "make demo    short examples: batched linear algebra, a kernel with a seeded bug, a Llama that trains, one that writes, a hybrid that does both, programs"
	@echo "make test    style, the whole test-suite, then some of it where subnormals are zero, the ops in checking mode"
	@echo "make lint    style alone, in seconds; tools/lint.sh --fix mends what the tools can mend"
	@echo "make docs    the documentation with the API reference, as HTML in build/docs"
	@echo "make mac-check   on Linux: builds the macOS wheel and checks it against PyTorch's and Apple's own files"
	@echo "make build   the extension and the built-in kernels, in place"
	@echo "make bench   metalcore against PyTorch's own ops; a report goes to build/benchmarks"
	@echo "make clean   removes what build made; make distclean removes .venv as well"

venv: $(VENV)test $(VENV)lint
# One pip runs at a time.
$(VENV)lint: | $(VENV)test
$(VENV)%: constraints.txt tools/setup_venv.sh
	@PYTHON=$(PYTHON) tools/setup_venv.sh $*
	@touch $@

build: $(BUILT)
$(BUILT): $(VENV)run $(SOURCES)
	@tools/build.sh
	@mkdir -p $(dir $@) && touch $@ $(RUNS)

$(RUNS): $(VENV)run $(SOURCES)
	@METALCORE_ISA=first-use tools/build.sh
	@mkdir -p $(dir $@) && touch $@

# Two run at once: each mostly waits for the compiler of its next family of kernels.
demo: $(RUNS)
	@echo "running examples: $(EXAMPLES)"
	@echo $(EXAMPLES) | xargs -n 1 -P 2 sh -c 'said=$$($(RUN) examples/$$0.py 2>&1); \
	  status=$$?; printf "\n=== examples/%s.py\n\n%s\n" "$$0" "$$said"; exit $$status'

lint: $(VENV)run $(VENV)lint
	@tools/lint.sh

# Installing and style each keep one core busy, and the build has the others meanwhile.
test: $(VENV)run
	@$(MAKE) --no-print-directory -j 2 lint $(BUILT)
	@$(RUN) -m pytest -n 2 --dist worksteal -rs --ignore tests/smoke tests
	@echo "--- where subnormal numbers are zero: the ops again, in checking mode, and the ends of float32's range"
	@METALCORE_FTZ=1 $(RUN) -m pytest -n 2 --dist worksteal tests/smoke $(FLUSHED)

docs: $(VENV)docs $(BUILT)
	@tools/docs.sh

mac-check: $(VENV)test
	@$(PY) -m tools.mac_check

bench: $(BUILT)
	@$(RUN) -m metalcore bench

clean:
	rm -rf build dist compile_commands.json metalcore.egg-info metalcore/lib metalcore/*.so metalcore/simulator/*.so

distclean: clean
	rm -rf .venv
