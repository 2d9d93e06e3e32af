#!/bin/bash
# Mooncake (FAST '25) Fig. 5: mean time to first token by policy; 8 prefill nodes, MFU 0.5, 3 M tokens of
# cache each, 100 Gb/s.
. "$(dirname "$0")/common.sh"
BED="--prefill 8 --decode 1 --max-tokens 1 --plan split --order fcfs --profile $(mooncake_node 0.5)
     --kv-bytes 327680 --page-tokens 512 --pages 5859 --port-gb-s 12.5"
# Means over slightly different rates: near saturation it hangs on a few long prompts, and moves by a tenth
# with what happens to meet.
ttft() {
  for rate in 0.98 0.99 1 1.01 1.02; do sim "$TRACE" $BED "$@" --rate $rate --json | field ttft_ms.mean; done | mean
}
global=$(ttft --policy mooncake --peers)
local=$(ttft --policy mooncake)
load=$(ttft --policy least-loaded)
random=$(ttft --policy random)
tandem=$(ttft --policy tandem --peers)
columns policy as 'mean TTFT:' 'over global:' 'paper:'
row() { cells "$1" "\`$2\`" "$(seconds "$3")" "$(ratio "$3" "$global")" "$4"; }
row 'global, cache-aware' '--policy mooncake --peers' "$global" '1 (3.07 s)'
row 'local, cache-aware' '--policy mooncake' "$local" 1.17
row 'load balancing' '--policy least-loaded' "$load" 1.72
row random '--policy random' "$random" 6.40
row tandem '--policy tandem --peers' "$tandem" -
