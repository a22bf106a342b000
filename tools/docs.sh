#!/usr/bin/env bash
# Builds the documentation as HTML in build/docs, or in the folder named. A warning, such as a broken link, is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/docs}
.venv/bin/python -m sphinx -q -W --keep-going -b html -c docs -d "$out/.doctrees" . "$out"
echo "$out/index.html"
