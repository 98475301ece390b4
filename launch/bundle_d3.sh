#!/usr/bin/env bash
# Makes ds_lgamp/view/page/d3.js from packages of npm: the parts of D3 that the page draws with, and their licences.
# For a newer D3, change the versions here and run it; needs npm.
set -euo pipefail
target=$(cd "$(dirname "$0")/.." && pwd)/ds_lgamp/view/page/d3.js
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
cd "$folder"
npm install --silent --no-save d3-scale@4.0.3 d3-selection@3.0.1 d3-zoom@3.0.1 esbuild@0.28.2
cat >entry.js <<'EOF'
export { scaleLinear } from "d3-scale";
export { select } from "d3-selection";
export { zoom, zoomIdentity } from "d3-zoom";
EOF
npx esbuild entry.js --bundle --minify --format=iife --global-name=d3 --target=es2020 --log-level=warning \
    --outfile=d3.js
{
    echo "/*"
    echo "Parts of D3 (d3js.org) and of what they need, bundled by launch/bundle_d3.sh: d3-scale 4.0.3, d3-selection"
    echo "3.0.1, d3-zoom 3.0.1. Their licence, and that of d3-ease, which d3-zoom needs:"
    echo
    cat node_modules/d3-zoom/LICENSE
    echo
    cat node_modules/d3-ease/LICENSE
    echo "*/"
    cat d3.js
} >"$target"
