#!/bin/bash
# Mooncake (FAST '25) Fig. 5: mean time to first token by policy; 8 prefill nodes, MFU 0.5, 3 M tokens of cache each, 100 Gb/s.
. "$(dirname "$0")/common.sh"
BED="--prefill 8 --decode 1 --max-tokens 1 --plan split --order fcfs --profile $(mooncake_node 0.5) --kv-bytes 327680 --page-tokens 512
     --pages 5859 --port-gb-s 12.5"
# Means over slightly different rates: near saturation it hangs on a few long prompts, and moves by a tenth with what happens to meet.
ttft() { for rate in 0.98 0.99 1 1.01 1.02; do sim "$TRACE" $BED "$@" --rate $rate --json | field ttft_ms.mean; done | mean; }
global=$(ttft --policy mooncake --peers)
local=$(ttft --policy mooncake)
load=$(ttft --policy least-loaded)
random=$(ttft --policy random)
tandem=$(ttft --policy tandem --peers)
printf '%-34s %9s  %s\n' policy 'mean TTFT' 'over global'
row() { printf '%-34s %6.0f ms  %s  (paper %s)\n' "$1" "$2" "$(ratio "$2" "$global")" "$3"; }
row 'global (mooncake --peers)' "$global" 1
row 'local (mooncake)' "$local" 1.17
row 'load (least-loaded)' "$load" 1.72
row 'random' "$random" 6.40
row 'tandem --peers' "$tandem" '-'
