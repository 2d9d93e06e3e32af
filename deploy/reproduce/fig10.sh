#!/bin/bash
# Mooncake Fig. 10: one pool for all nodes against a pool for each: 10 prefill nodes with 3 M tokens each, answers of one token.
. "$(dirname "$0")/common.sh"
BED="--prefill 10 --decode 1 --max-tokens 1 --plan split --order fcfs --profile $(mooncake_node 0.6) --kv-bytes 327680 --page-tokens 512
     --pages 5859 --port-gb-s 12.5"
printf '%-44s %6s %10s %10s\n' '' reuse prefill TTFT
row() {
  name=$1
  shift
  sim "$TRACE" $BED "$@" --json >/tmp/fig10.$$
  printf '%-44s %6.3f %7.0f ms %7.0f ms\n' "$name" $(field cached_share <"/tmp/fig10.$$") \
    $(busy <"/tmp/fig10.$$") \
    $(field ttft_ms.mean <"/tmp/fig10.$$")
  rm -f "/tmp/fig10.$$"
}
row 'global pool (mooncake --peers)' --policy mooncake --peers
row 'local pools, least time' --policy mooncake
row 'local pools, longest match first (the trap)' --policy cache-aware
row 'local pools, load only' --policy least-loaded
row 'tandem --peers' --policy tandem --peers
row 'tandem' --policy tandem
