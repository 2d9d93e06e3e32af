#!/bin/bash
# Mooncake Fig. 8: mean time that a prefill takes, without cache and with one that keeps all, at MFU 0.60.
# Workers' time for each request.
. "$(dirname "$0")/common.sh"
BED="--prefill 1 --decode 1 --max-tokens 1 --plan split --policy least-loaded --profile $(mooncake_node 0.6)
     --kv-bytes 327680 --page-tokens 512"
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
"$TANDEM" trace convert "$TRACE" --format azure --output "$t/no-blocks.csv"
none=$(sim "$t/no-blocks.csv" $BED --block-tokens 512 --pages 1000 --json | busy)
all=$(sim "$TRACE" $BED --pages 400000 --json | busy)
columns prefill here: 'paper (read off the plot):'
cells 'no cache' "$(seconds "$none")" '~1.65 s'
cells 'everything cached' "$(seconds "$all")" '~1.05 s'
cells ratio "$(ratio "$none" "$all")" 1.56
