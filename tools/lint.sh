#!/usr/bin/env bash
# Checks style with the tools that .venv has, in seconds. `tools/lint.sh --fix` formats, and mends what the tools can mend.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

# All C++, Objective-C++ and Metal, except generated files and the files that follow another project: declarations of
# Apple's headers, the <metal_stdlib> headers (dense tables of overloads), and programs in the style of others.
mapfile -t sources < <(find csrc kernels metalcore tests tools -type f \
  \( -name '*.c' -o -name '*.cpp' -o -name '*.h' -o -name '*.mm' -o -name '*.metal' \) \
  -not -path 'metalcore/lib/*' -not -path 'metalcore/msl/include/*' -not -path 'metalcore/msl/check/include/*' \
  -not -path 'tools/mac_check/sdk/*' -not -path 'tests/msl/corpus/*' | sort)

failed=0
# Another release formats in another way.
for tool in ruff clang-format pyright; do
  version=$($tool --version | grep -oE '[0-9]+(\.[0-9]+)+' | head -1)
  grep -qx "$tool==$version" constraints.txt ||
    { echo "lint: $tool is ${version:-missing}, not the release in constraints.txt; make venv installs that one" >&2; exit 1; }
done

step() { echo "lint: $1"; shift; "$@" || failed=1; }
if [[ ${1:-} == --fix ]]; then
  step "ruff check" ruff check -q --fix .
  step "ruff format" ruff format -q .
  step "clang-format" clang-format -i "${sources[@]}"
else
  step "ruff check" ruff check -q --output-format concise .
  step "ruff format" ruff format -q --check .
  step "clang-format, ${#sources[@]} files" clang-format --dry-run -Werror "${sources[@]}"
fi
step "pyright" pyright
# pytest imports a test's file by its name alone, so that two files of one name cannot be collected in one run.
twins() {
  find tests -name '*.py' -not -name conftest.py -printf '%f\n' | sort | uniq -d |
    { ! grep . ; } || { echo "lint: the files above stand in two folders of tests; give each a name of its own" >&2; return 1; }
}
step "names of tests" twins
exit $failed
