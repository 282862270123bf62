#!/bin/sh
# Installs the packages of package-lock.json into ./node_modules. Needs Node.js 20 or later with npm.
set -eu
cd "$(dirname "$0")"
npm ci --silent --no-fund --no-audit --ignore-scripts
