#!/bin/sh
# Makes ./.venv: the agent's own environment, apart from the platform's. PYTHON= chooses the interpreter.
set -eu
cd "$(dirname "$0")"
"${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement lock.txt
