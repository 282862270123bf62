#!/bin/sh
# Makes ./.venv: reasoning-gym and the platform in one environment. PYTHON= chooses the interpreter.
# BASE= names an environment that has the platform (default: .venv of the repository, from `make setup`).
# Three of reasoning-gym's dependencies have no wheels; one of them needs a C compiler.
set -eu
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
"${PYTHON:-python3}" -m venv .venv
pip=".venv/bin/pip --disable-pip-version-check --quiet"
built="$pip install --require-hashes --no-deps --only-binary :all: --no-binary cellpylib,pycosat,zss --requirement"
BASE=${BASE:-$root/.venv}
case "$BASE" in /*) ;; *) BASE="$root/$BASE" ;; esac
$built lock.txt
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$("$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n%s\n' "$base" "$root" > "$site/zz_platform.pth" # after its own packages
.venv/bin/python -c 'import reasoning_gym, rft_platform; print("reasoning-gym", reasoning_gym.__version__)'
