#!/usr/bin/env bash
# Installs ds_lgamp with what its tests need, and runs them. Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/install.sh
install_ds_lgamp megatron,transformers,plot,test,dev

ruff check .
ruff format --check .
python -m mypy
# A file stays with one process: its tests share what its fixtures spawned.
python -m pytest --numprocesses 2 --dist loadfile "$@"
