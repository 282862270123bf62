#!/bin/sh
# Makes ./.venv: AgentScope 1.x and the platform in one environment. PYTHON= chooses the interpreter.
# BASE= names an environment that has the platform already (`make setup` makes .venv): then AgentScope alone is
# installed, and everything else is taken from there.
set -eu
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
"${PYTHON:-python3}" -m venv .venv
pip=".venv/bin/pip --disable-pip-version-check --quiet"
locked="$pip install --require-hashes --no-deps --only-binary :all: --requirement"
if [ -n "${BASE:-}" ]; then
  case "$BASE" in /*) ;; *) BASE="$root/$BASE" ;; esac
  $locked lock.txt
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  base=$("$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n%s\n' "$base" "$root" > "$site/zz_platform.pth" # after its own packages: AgentScope's openai wins
else
  $locked "$root/requirements/lock.txt"
  $locked lock.txt # over it: AgentScope needs openai 2 and mcp 1
  $pip install --requirement "$root/requirements/torch.txt"
  $pip install --no-deps --no-build-isolation --editable "$root"
fi
.venv/bin/python -c 'import agentscope, openai, rft_platform.tuner as t; print("agentscope", agentscope.__version__, "openai", openai.__version__)'
