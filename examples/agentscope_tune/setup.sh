#!/bin/sh
# Makes ./.venv: AgentScope 1.x and the platform in one environment. PYTHON= chooses the interpreter.
# BASE= names an environment that has the platform already (`make setup` makes .venv): then AgentScope alone is
# installed, and everything else is taken from there.
set -eu
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
"${PYTHON:-python3}" -m venv .venv
pip=".venv/bin/pip --disable-pip-version-check --quiet"
if [ -n "${BASE:-}" ]; then
  case "$BASE" in /*) ;; *) BASE="$root/$BASE" ;; esac
  $pip install --requirement requirements.txt
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  base=$("$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n%s\n' "$base" "$root" > "$site/zz_platform.pth" # after its own packages: AgentScope's openai wins
else
  grep -vE '^(openai|mcp)==' "$root/constraints.txt" > .venv/constraints.txt # AgentScope wants openai 2 and mcp 1
  $pip install --constraint .venv/constraints.txt torch
  $pip install --constraint .venv/constraints.txt --editable "$root[agentscope]"
fi
.venv/bin/python -c 'import agentscope, openai, rft_platform.tuner as t; print("agentscope", agentscope.__version__, "openai", openai.__version__)'
