#!/usr/bin/env bash
# Installs ds_lgamp and the packages its tests need, and runs all checks. Passes arguments on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/install.sh
install_ds_lgamp megatron,transformers,plot,test,dev

ruff check .
ruff format --check .
python -m mypy
# One process runs all tests of a file, because they share the ranks that its fixtures start.
python -m pytest --numprocesses 2 --dist loadfile "$@"
