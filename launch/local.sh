#!/usr/bin/env bash
# Sets up and runs transformer-jax on this machine.
#
#   bash launch/local.sh                    trains configs/cmudict.py in runs/cmudict, or
#                                           goes on with it, shows decoded samples, and
#                                           ends with one JSON line: WER and PER
#   bash launch/local.sh COMMAND --flags    runs that command (COMMAND --help explains it)
#
# Relative paths count from the repository root, wherever you call it from. PYTHON names
# the Python to use (3.11 or newer). Exit codes: 0 done, 1 failed, 2 wrong flags or
# Python, 75 stopped after saving: start it again and it goes on.
set -euo pipefail
CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' launch/local.sh
    exit
fi

. launch/setup.sh
setup g2p
tool=.venv/bin/transformer-jax

# Huge pages for XLA's buffers, which come and go with every step: a quarter less time a
# step on a CPU. Only glibc 2.35 and newer listens.
export GLIBC_TUNABLES="${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}"

# Runs a step as a child that is told to stop when this script is: a training that gets
# SIGTERM saves first. (bash itself would die and leave the child behind.)
step() {
    local child code=0
    "$tool" "$@" &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null' TERM INT
    # A signal ends `wait` early; when the child is gone it still tells its exit code.
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
    wait "$child" || code=$?
    trap - TERM INT
    return "$code"
}

if [ $# -gt 0 ]; then
    exec "$tool" "$@"
fi
step train --config=configs/cmudict.py --workdir=runs/cmudict
exec "$tool" evaluate --workdir=runs/cmudict --samples=12
