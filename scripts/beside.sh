#!/bin/sh
# Makes an environment TARGET with the packages of requirements/NAME.txt that takes everything else from the environment BASE.
# usage: scripts/beside.sh BASE TARGET NAME
set -eu
base=$1 target=$2 name=$3
"$base/bin/python" -m venv "$target"
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
shared=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$shared')" > "$site/zz_base.pth"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
  --requirement "$(dirname "$0")/../requirements/$name.txt"
