#!/usr/bin/env bash
# Create the development environment: scripts/setup.sh [VENV] (default .venv). An interrupted set-up continues when repeated.
# PYTHON selects the interpreter. TORCH_INDEX_URL selects torch's wheels, for example https://download.pytorch.org/whl/cpu.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

fail() { printf 'set-up: %s\n' "$@" >&2; exit 1; }

# The interpreter
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) ||
  fail "$python does not run: install Python 3.11, 3.12 or 3.13, or name one: make setup PYTHON=/path/to/python3.12"
case $version in
  3.11 | 3.12 | 3.13) ;;
  *)
    for other in python3.13 python3.12 python3.11; do
      if "$other" -c '' 2> /dev/null; then fail "$python is Python $version, not 3.11 to 3.13; use: make setup PYTHON=$other"; fi
    done
    fail "$python is Python $version: install Python 3.11, 3.12 or 3.13, then: make setup PYTHON=/path/to/python3.12"
    ;;
esac

# The environment
if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
  fail "$venv is not a virtual environment: name another folder: make setup VENV=..."
fi
made_for=$("$venv/bin/python" -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true)
if [ "$made_for" != "$version" ]; then
  echo "set-up: creating $venv with Python $version"
  "$python" -m venv --clear "$venv" || fail "$python -m venv failed; on Debian and Ubuntu: apt install python$version-venv"
fi
rm -f "$venv/.installed"
# pip writes RECORD last: a package without it was interrupted, and pip would take it for installed.
for folder in "$venv"/lib/python*/site-packages/*.dist-info; do
  if [ -d "$folder" ] && [ ! -s "$folder/RECORD" ]; then rm -rf "$folder"; fi
done

# Everything but torch, twenty packages at a time, so that progress shows and finished packages are kept
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
awk -v folder="$parts" '
  /^[A-Za-z0-9]/ { if (count++ % 20 == 0) part = sprintf("%s/%03d.txt", folder, count / 20) }
  part { print > part }' requirements/lock.txt requirements/lock-dev.txt
progress() { printf 'set-up: %3d of %d packages, %d:%02d min  %s\n' "$done" "$total" $((SECONDS / 60)) $((SECONDS % 60)) "$1"; }
done=0 total=$(cat "$parts"/*.txt | grep -c '==')
for part in "$parts"/*.txt; do
  names=$(sed -n 's/^\([A-Za-z0-9][^=]*\)==.*/\1/p' "$part")
  progress "next: $(head -n 1 <<< "$names") to $(tail -n 1 <<< "$names")"
  "$venv/bin/python" -m pip install --quiet --require-hashes --no-deps --only-binary :all: --requirement "$part"
  done=$((done + $(grep -c '==' "$part")))
done
progress "next: $(grep '^torch==' requirements/torch.txt) (200 MB; some GB with CUDA)"

# torch, whose other dependencies are there already, and the platform itself
# On a terminal pip draws a bar for its download.
"$venv/bin/python" -m pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} --requirement requirements/torch.txt
PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
"$venv/bin/python" -m pip check > /dev/null ||
  { "$venv/bin/python" -m pip check || true; fail "the lock files do not match pyproject.toml: run make lock, then make setup"; }
touch "$venv/.installed"
echo "set-up: done in $((SECONDS / 60)):$(printf %02d $((SECONDS % 60))) min; source $venv/bin/activate"
