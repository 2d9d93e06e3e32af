#!/bin/bash
# Mooncake Fig. 10: one pool for all nodes against a pool for each: 10 prefill nodes with 3 M tokens each,
# answers of one token. The last columns are the global pool's reuse and prefill time over a row's, as the
# paper gives them.
. "$(dirname "$0")/common.sh"
BED="--prefill 10 --decode 1 --max-tokens 1 --plan split --order fcfs --profile $(mooncake_node 0.6) --kv-bytes 327680
     --page-tokens 512 --pages 5859 --port-gb-s 12.5"
columns routing reuse: prefill: TTFT: "global pool's reuse over it:" "global pool's prefill over it:"
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
row() {
  name=$1
  shift
  sim "$TRACE" $BED "$@" --json >"$t/report.json"
  reuse=$(field cached_share <"$t/report.json") prefill=$(busy <"$t/report.json")
  : "${global_reuse:=$reuse}" "${global_prefill:=$prefill}"
  cells "$name" "$(ratio "$reuse" 1)" "$(seconds "$prefill")" "$(seconds "$(field ttft_ms.mean <"$t/report.json")")" \
    "$(ratio "$global_reuse" "$reuse")" "$(ratio "$global_prefill" "$prefill")"
}
row 'global pool (mooncake `--peers`)' --policy mooncake --peers
row 'local pools, least time (mooncake)' --policy mooncake
row 'local pools, longest match first' --policy cache-aware
row 'local pools, load only' --policy least-loaded
row 'tandem `--peers`' --policy tandem --peers
row tandem --policy tandem
