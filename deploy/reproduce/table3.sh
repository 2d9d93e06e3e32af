#!/bin/bash
# Mooncake's early rejection (technical report, Table 3): 8 prefill and 1 decode node at twice the rate, TBT 100 ms, TTFT 30 s. Who refuses what,
# when, and how much prefill was done for requests that were not within their limits. tandem and mooncake refuse at arrival, by
# predictions in which lengths are learned online; least-loaded never does.
. "$(dirname "$0")/common.sh"
BED="--prefill 8 --decode 1 --rate 2 --profile $(mooncake_node 0.6) --kv-bytes 327680 --pool-bytes 418G --port-gb-s 100 --ttft-ms 30000
     --tpot-ms 100 --max-tokens 2048 --max-batch 2048"
printf '%-14s %9s %9s %9s %14s\n' policy refused met goodput 'wasted prefill'
for policy in least-loaded mooncake tandem; do
  sim "$TRACE" $BED --policy $policy --plan split --output /tmp/table3.$$ >/dev/null
  python3 - $policy /tmp/table3.$$ <<'P'
import json, sys
r = json.load(open(sys.argv[2]))
q = r["requests"]
late = [i for i, ms in enumerate(q["e2e_ms"]) if ms is not None and (q["ttft_ms"][i] > 30000 or (q["tpot_ms"][i] or 0) > 100)]
print(f"{sys.argv[1]:14} {r['refused']:9} {r['met']:9} {r['goodput']['at_rate']:7.2f}/s {sum(q['prefill_ms'][i] for i in late) / 1e3:12.0f} s")
P
  rm -f /tmp/table3.$$
done
