#!/usr/bin/env bash
# Sets up and runs everything that is checked: lint, format, and all tests.
#
#   bash tests/run.sh [--slow] [arguments of pytest]
#
# --slow adds the tests of minutes and the big downloads, the TPU's compiler among them
# (in a folder of its own: installed, JAX would look for a TPU). PYTHON names the Python
# to use.
# A process a core, four at most, takes file after file, in order: neighbours share.
set -euo pipefail
CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

. launch/setup.sh
setup test

case " $* " in
    *" --slow "*)
        [ -d .venv/tpu/libtpu ] || .venv/bin/python -m pip install --quiet \
            --disable-pip-version-check --no-deps --target .venv/tpu libtpu
        ;;
esac

.venv/bin/ruff check --quiet .
.venv/bin/ruff format --check --quiet .
exec .venv/bin/python -m pytest \
    --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder "$@"
