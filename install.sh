#!/usr/bin/env bash
# Install videotune from this folder into .venv, with the build of PyTorch for this machine.
#
#   ./install.sh              asks before it installs anything outside this folder
#   ./install.sh --dry-run    prints the commands and runs none
#
# Options: --yes (installs uv without asking), --pip (uses python3 and pip, not uv), --extras NAMES (such as all),
# --build NAME (cpu, or a line of scripts/torch_builds.txt, whatever the driver), --torch-from-pip (takes PyTorch from
# the index that pip or uv is set up with, not from download.pytorch.org).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

INDEX=https://download.pytorch.org/whl
UV_INSTALLER=https://astral.sh/uv/install.sh
dry_run=false
yes=false
use_pip=false
torch_from_pip=false
extras=
build=

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case "$1" in
        --dry-run) dry_run=true ;;
        --yes) yes=true ;;
        --pip) use_pip=true ;;
        --torch-from-pip) torch_from_pip=true ;;
        --extras) extras=${2:?--extras needs names, such as all}; shift ;;
        --build) build=${2:?--build needs a name, such as cpu}; shift ;;
        -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) fail "no such option: $1. See ./install.sh --help" ;;
    esac
    shift
done

run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    if ! $dry_run; then "$@"; fi
}

# Whether version $1 is at least version $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

# Print "driver capability" of the oldest card, or nothing without a driver that answers.
find_card() {
    command -v nvidia-smi >/dev/null || return 0
    nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null |
        sed -n 's/^ *\([0-9][0-9.]*\), *\([0-9][0-9.]*\) *$/\1 \2/p' | sort -k 2 -V | head -n 1 || true
}

choose_build() {
    local driver=$1 capability=$2 name linux _ least
    while read -r name linux _ least; do
        case "$name" in '' | '#'*) continue ;; esac
        if at_least "$driver" "$linux" && at_least "$capability" "$least"; then
            echo "$name"
            return
        fi
    done <scripts/torch_builds.txt
    echo cpu
}

if $torch_from_pip; then
    [ -z "$build" ] || fail "--build and --torch-from-pip both choose the build of PyTorch. Leave one out"
    build=default
    echo "PyTorch: the build of your own package index, as asked for."
elif [ -n "$build" ]; then
    [ "$build" = cpu ] || grep -q "^$build " scripts/torch_builds.txt || fail "--build: $build is not in scripts/torch_builds.txt"
    echo "PyTorch: the build $build, as asked for."
elif [ "$(uname -s)" = Darwin ]; then
    build=default
    echo "PyTorch: the build for macOS."
else
    read -r driver capability < <(find_card) || true
    if [ -z "${driver:-}" ]; then
        build=cpu
        if command -v nvidia-smi >/dev/null; then
            echo "PyTorch: the build for the CPU, because nvidia-smi names no card. Is the driver loaded?"
        else
            echo "PyTorch: the build for the CPU, because there is no driver of NVIDIA (no nvidia-smi)."
        fi
    else
        build=$(choose_build "$driver" "$capability")
        if [ "$build" = cpu ]; then
            echo "PyTorch: the build for the CPU, because driver $driver is older than any build needs, or the card is."
            echo "Install a driver from https://www.nvidia.com/drivers (525.60.13 or newer), and start this again."
        else
            echo "PyTorch: the build $build, for driver $driver and compute capability $capability."
        fi
    fi
fi

if ! $use_pip && ! command -v uv >/dev/null; then
    echo "uv (https://docs.astral.sh/uv) installs Python packages fast, and Python itself. It is not here."
    answer=n
    if $yes; then
        answer=y
    elif [ -t 0 ] && ! $dry_run; then
        read -r -p "Run its installer, $UV_INSTALLER? It writes to ~/.local/bin. [y/N] " answer || {
            echo
            fail "no answer, so nothing was installed. ./install.sh --yes installs uv, and ./install.sh --pip goes without it"
        }
    fi
    case "$answer" in
        y | Y | yes)
            run sh -c "curl -LsSf $UV_INSTALLER | sh"
            export PATH="$HOME/.local/bin:$PATH"
            ;;
        *)
            echo "Without uv: python3 and pip."
            use_pip=true
            ;;
    esac
fi

torch=$(sed -n 's/^ *"\(torch>[^"]*\)".*/\1/p' pyproject.toml)
[ -n "$torch" ] || fail "pyproject.toml does not name torch"
if $use_pip; then
    command -v python3 >/dev/null || fail "python3 is not installed; videotune needs Python 3.11 or newer"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$(python3 --version) is too old; videotune needs Python 3.11 or newer (uv can install one)"
    if [ ! -x .venv/bin/python ]; then run python3 -m venv .venv; fi
    install=(.venv/bin/python -m pip --disable-pip-version-check install)
else
    if [ ! -x .venv/bin/python ]; then run uv venv --python ">=3.11" .venv; fi
    install=(uv pip install --python .venv/bin/python)
fi

# pip's last words name a version that was not found, also where the index did not answer.
explain_no_torch() {
    local answers='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=20)'
    if .venv/bin/python -c "$answers" "$INDEX/$build/torch/" 2>/dev/null; then
        fail "PyTorch was not installed; the reason is above"
    fi
    fail "PyTorch's index (download.pytorch.org) was not reached. With your own pip index: make demo, or ./install.sh --torch-from-pip"
}

# torch first and alone, so that nothing else chooses its build
if [ "$build" = default ]; then
    run "${install[@]}" "$torch"
else
    run "${install[@]}" --index-url "$INDEX/$build" "$torch" || explain_no_torch
fi
run "${install[@]}" ".${extras:+[$extras]}"
run .venv/bin/videotune doctor

echo
if $dry_run; then
    echo "Nothing was installed. Without --dry-run these commands install into .venv."
    exit 0
fi
echo "Installed into .venv. Next:"
echo "  . .venv/bin/activate"
echo "  videotune studio    # in the browser; or in the terminal: videotune demo"
