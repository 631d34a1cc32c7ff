#!/bin/sh
# Installs what `rollmill bench gateway --peers DIR` measures beside us: LiteLLM's proxy, in an environment of its own.
# usage: scripts/setup_gateway_peers.sh DIR          PYTHON picks the interpreter
set -eu
test -x "$1/bin/python" || "${PYTHON:-python3}" -m venv "$1"
"$1/bin/python" -m pip --disable-pip-version-check install -q "litellm[proxy]"
"$1/bin/python" -c 'import importlib.metadata as m; print("litellm", m.version("litellm"))'
