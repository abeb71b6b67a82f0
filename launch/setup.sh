# Sourced by launch/local.sh and tests/run.sh: makes .venv in the repository root.
# shellcheck shell=bash
#
# setup EXTRAS   installs this package, editable, with the given extras, once for each
#                state of pyproject.toml. Everything it prints goes to standard error.
#
# PYTHON names the interpreter to use; otherwise the first of python3, python3.13,
# python3.12 and python3.11 that works is taken.

say() { printf '%s\n' "$*" >&2; }

# Prints the version of interpreter $1, and fails where it cannot make an environment:
# 1 does not run, 3 too old, 4 has no venv or ensurepip.
probe() {
    "$1" - 2>/dev/null <<'PYTHON'
import sys
print("%d.%d" % sys.version_info[:2])
if sys.version_info < (3, 11):
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(4)
PYTHON
}

# Sets `python` to a usable interpreter and `version` to its version, or exits 2.
find_python() {
    local candidate code found="" candidates=(python3 python3.13 python3.12 python3.11)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        code=0
        version=$(probe "$candidate") || code=$?
        case $code in
            0) python=$candidate && return ;;
            3) found+=" $candidate is $version." ;;
            4) found+=" $candidate lacks venv or ensurepip (Debian: apt install python3-venv)." ;;
        esac
    done
    say "Python 3.11 or newer is needed:${found:- ${candidates[*]} did not run.}" \
        "Install one, or name it: PYTHON=/path/to/python3.12 bash $0"
    exit 2
}

# What an environment was installed from; its folder belongs to that, because an
# environment does not survive being moved.
state() { cat pyproject.toml <(pwd -P) | cksum; }

# Whether .venv runs, with the interpreter that PYTHON asks for by name, if it does.
runs() {
    local found
    found=$(probe .venv/bin/python) || return 1
    [ -z "${PYTHON:-}" ] || [ "$found" = "$(probe "$PYTHON")" ]
}

installed() {
    [ ! -e .venv/unfinished ] &&
        [ "$(cat ".venv/installed-$1" 2>/dev/null)" = "$(state)" ] && runs
}

# Whether .venv can be kept: it has a pip, lies where it was made, and no installation
# into it was cut short.
sound() {
    [ ! -e .venv/unfinished ] && runs &&
        grep -qF "$(pwd -P)/.venv" .venv/bin/activate &&
        .venv/bin/python -m pip --version >/dev/null 2>&1
}

install() {
    if sound; then
        version=$(probe .venv/bin/python)
    elif [ -e .venv ]; then
        say "Making .venv anew: it is unfinished, broken, moved or of another Python."
        rm -rf .venv
    fi
    say "Setting up .venv with Python $version: a few minutes the first time."
    mkdir -p .venv
    touch .venv/unfinished
    if ! {
        { [ -x .venv/bin/python ] || "$python" -m venv .venv; } &&
            .venv/bin/python -m pip install --quiet --disable-pip-version-check \
                --editable ".[$1]"
    } >&2 </dev/null; then
        say "The installation failed, see above. It needs the network (or a filled pip" \
            "cache) and 2 GB of free disk; another Python: PYTHON=python3.12 bash $0"
        exit 1
    fi
    state >".venv/installed-$1"
    rm .venv/unfinished
}

# Sets `python` and `version`, waits for its turn, and installs what is still missing.
setup() {
    local python version
    if installed "$1"; then return; fi
    find_python
    # One at a time. The lock belongs to descriptor 9, which this shell and what it
    # starts keep open, so it ends with them, however they end.
    exec 9>>.venv.lock
    "$python" - <<'PYTHON'
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("Waiting for another set-up to finish.", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
PYTHON
    if ! installed "$1"; then install "$1"; fi
    exec 9>&-
}
