#!/bin/sh
# Makes an environment TARGET with Weights & Biases that takes everything else from the environment BASE.
# usage: scripts/trackers.sh BASE TARGET
set -eu
base=$1 target=$2
"$base/bin/python" -m venv "$target"
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
shared=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$shared')" > "$site/zz_base.pth"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
  --requirement "$(dirname "$0")/../requirements/trackers.txt"
"$target/bin/python" -c 'import wandb'
