#!/usr/bin/env bash
# Builds the extension and the kernels in place (setup.py, tools/build), and makes metalcore importable from .venv.
# It rebuilds what changed. Who builds in place runs the simulator's kernels here, so that other CPUs' are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
export METALCORE_ISA=${METALCORE_ISA-native}
export CXX=${CXX:-$(tools/compiler.sh)}
.venv/bin/python setup.py -q build_ext --inplace
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e .
