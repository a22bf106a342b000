#!/usr/bin/env bash
# Prints the C++ compiler to build with: $CXX, else the first one that has _Float16 (g++ 12, clang++ 15, or newer).
set -euo pipefail
has_float16() { command -v "$1" >/dev/null && echo '_Float16 x;' | "$1" -x c++ -fsyntax-only - 2>/dev/null; }
for candidate in ${CXX:-} g++ c++ clang++ g++-{15,14,13,12} clang++-{20,19,18,17,16,15}; do
  if has_float16 "$candidate"; then echo "$candidate"; exit; fi
done
exit 1
