#!/bin/sh
# Makes ./.venv with openai 3.x and ./.venv-openai2 with openai 2.x. PYTHON= chooses the interpreter.
set -eu
cd "$(dirname "$0")"
for name in .venv:lock.txt .venv-openai2:lock-openai2.txt; do
  "${PYTHON:-python3}" -m venv "${name%%:*}"
  "${name%%:*}/bin/pip" install --quiet --disable-pip-version-check --require-hashes --no-deps \
    --requirement "${name##*:}"
done
