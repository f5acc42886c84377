#!/usr/bin/env bash
# Makes this machine a controller: distribution packages and .venv, from requirements/<name>.txt.
# usage: scripts/bootstrap.sh controller|test
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/${1:?usage: scripts/bootstrap.sh controller|test}.txt

fail() { echo "bootstrap: $*" >&2; exit 1; }
[ -f "$lock" ] || fail "$lock not found; wanted: $(cd requirements && echo *.txt)"
[ "$(uname -s)" = Linux ] || fail "found $(uname -s), wanted Linux: use a Debian or Ubuntu machine or VM"

# command:package for what the sandbox and the tests call
declare -A needed=([mmdebstrap]=mmdebstrap [systemd-nspawn]=systemd-container [ssh]=openssh-client [gcc]=gcc [git]=git)
missing=()
for command in "${!needed[@]}"; do
    command -v "$command" >/dev/null || missing+=("${needed[$command]}")
done
# Without Debian's keys an Ubuntu machine could not verify the Debian tree of the sandbox.
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
python=
for candidate in python3 python3.13 python3.12 python3.11; do
    # A name may be there and not work: version managers put such stand-ins on PATH.
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
done
[ -n "$python" ] || fail "found $(python3 --version 2>&1), wanted Python 3.11 or newer (Debian 12, Ubuntu 24.04)"
"$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)

if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || fail "needs ${missing[*]}; apt-get not found, install them by hand"
    sudo=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || fail "needs ${missing[*]}; run as root, or install sudo"
        sudo=(sudo)
    fi
    echo "bootstrap: installing ${missing[*]}"
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

stamp=.venv/$1.sha256
if ! sha256sum --check --status "$stamp" 2>/dev/null; then
    echo "bootstrap: making .venv from $lock"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement "$lock"
    sha256sum "$lock" >"$stamp"
fi
