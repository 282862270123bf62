#!/bin/sh
# Installs the packages of package-lock.json into ./node_modules. Needs Node.js 20 or later with npm.
set -eu
cd "$(dirname "$0")"
if ! command -v npm > /dev/null; then
  echo "examples/openai_node: npm is not installed, so the test of the client for Node is skipped" >&2
  exit 0
fi
npm ci --silent --no-fund --no-audit --ignore-scripts \
  || echo "examples/openai_node: npm could not install the client, so its test is skipped" >&2
