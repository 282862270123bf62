#!/bin/sh
# Makes an environment TARGET with openai 2.x that takes everything else from the environment BASE.
# usage: scripts/openai2.sh BASE TARGET
set -eu
base=$1 target=$2
"$base/bin/python" -m venv "$target"
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
shared=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$shared')" > "$site/zz_base.pth" # after its own packages: the older openai wins
lock=$(dirname "$0")/../examples/openai_loop/lock-openai2.txt
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --ignore-installed --require-hashes --no-deps \
  --requirement "$lock"
"$target/bin/python" -c 'import openai; assert openai.__version__.startswith("2."), openai.__version__'
