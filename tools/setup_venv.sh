#!/usr/bin/env bash
# Makes .venv with what a group of commands needs, pinned by constraints.txt: `tools/setup_venv.sh run test lint docs`.
# run is what building and the examples need, and the others add to it.
# It installs python3-venv, python3-dev and g++ by apt where they are missing and this is root; else it says what to
# install. It does the same with what only tests need, and tests are skipped without: Clang and GCC's Objective-C runtime,
# on which the Metal backend runs on Linux, and the linker that makes the wheel for Macs. (Clang 15 checks the kernels.)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
declare -A of_group=(
  [run]="torch setuptools wheel pcpp numpy transformers gguf"
  [test]="pytest pytest-xdist expecttest hypothesis accelerate bitsandbytes peft torchao matplotlib sphinx furo myst-parser"
  [lint]="ruff clang-format pyright[nodejs]"
  [docs]="sphinx furo myst-parser"
)
# NVRTC compiles the kernels for NVIDIA GPUs. The tests do so on every machine.
if [[ $(uname) == Linux ]]; then of_group[test]+=" nvidia-cuda-nvrtc"; fi
tested='' packages=()
for group in run "$@"; do
  [[ -n ${of_group[$group]:-} ]] || { echo "setup_venv.sh: no group $group; there are ${!of_group[*]}" >&2; exit 1; }
  read -ra more <<<"${of_group[$group]}"
  packages+=("${more[@]}")
  if [[ $group == test ]]; then tested=1; fi
done

missing=()
if ! command -v "$PYTHON" >/dev/null; then
  missing=(python3 python3-venv python3-dev)
else
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "metalcore needs Python 3.10 or newer; $PYTHON is $("$PYTHON" -V). Set PYTHON=... to another one." >&2; exit 1; }
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  "$PYTHON" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    missing+=(python3-dev)
fi
if [[ $(uname) == Linux ]] && ! compiler=$(tools/compiler.sh); then
  # g++ 11 (Ubuntu 22.04) has no _Float16 in C++.
  if command -v apt-cache >/dev/null && grep -qs 'VERSION_ID="22.04"' /etc/os-release; then missing+=(g++-12); else missing+=(g++); fi
fi

if ((${#missing[@]})); then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]} (apt)"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "missing: ${missing[*]}. Install them first, e.g.: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
fi

wanted=()  # each item has the names of one package, and the first that apt has is taken
if [[ $tested && $(uname) == Linux ]]; then
  command -v clang++-19 >/dev/null || wanted+=("$(echo clang-{19..15})")
  command -v ld64.lld-19 >/dev/null || wanted+=(lld-19)
  compgen -G "/usr/lib/gcc/*/*/include/objc/objc.h" >/dev/null || wanted+=("$(echo libobjc-{12..15}-dev)")
fi
if ((${#wanted[@]})) && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  ((${#missing[@]})) || apt-get update -qq
  for names in "${wanted[@]}"; do
    for name in $names; do
      if apt-cache show "$name" >/dev/null 2>&1; then
        echo "installing $name (apt)"
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$name" >/dev/null
        break
      fi
    done
  done
elif ((${#wanted[@]})); then
  echo "tests that need them are skipped without: ${wanted[*]%% *}" >&2
fi

[[ -x .venv/bin/python ]] && .venv/bin/python -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear .venv

# PyPI's torch for Linux brings gigabytes of CUDA libraries that nothing here uses; PyTorch's own index has a CPU build.
index=()
cpu_index=https://download.pytorch.org/whl/cpu
if [[ $(uname) == Linux ]] && .venv/bin/python - "$cpu_index/torch/" <<'PYTHON' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=8).read(1)
PYTHON
then
  index=(--extra-index-url "$cpu_index")
fi
echo "installing ${packages[*]} into .venv"
# Python compiles the modules that are imported, which are a small part of the packages'.
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile "${index[@]}" -c constraints.txt "${packages[@]}"
