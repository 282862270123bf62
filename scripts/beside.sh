#!/bin/sh
# Makes an environment TARGET with the packages of the lock file LOCK that takes everything else from the environment BASE.
# --ignore-installed is for packages that BASE has in another version.
# usage: scripts/beside.sh BASE TARGET LOCK [PIP OPTION...]
set -eu
base=$1 target=$2 lock=$3
shift 3
"$base/bin/python" -m venv "$target"
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
shared=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$shared')" > "$site/zz_base.pth" # after its own packages, which therefore win
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps "$@" --requirement "$lock"
