#!/bin/bash
# Mooncake's early rejection (technical report, Table 3): 8 prefill and 1 decode node at twice the rate, TBT
# 100 ms, TTFT 30 s. Who refuses what, when, and how much prefill was done for requests that were not within
# their limits. tandem and mooncake refuse at arrival, by predictions in which lengths are learned online;
# least-loaded never does.
. "$(dirname "$0")/common.sh"
BED="--prefill 8 --decode 1 --rate 2 --profile $(mooncake_node 0.6) --kv-bytes 327680 --pool-bytes 418G --port-gb-s 100
     --ttft-ms 30000 --tpot-ms 100 --max-tokens 2048 --max-batch 2048"
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
columns policy refused: 'within limits:' goodput: 'prefill of requests outside:'
row() {
  name=$1
  shift
  sim "$TRACE" $BED "$@" --output "$t/report.json" >/dev/null
  python3 - "$name" "$t/report.json" <<'P'
import json, sys
r = json.load(open(sys.argv[2]))
q = r["requests"]
late = [i for i, ms in enumerate(q["e2e_ms"])
        if ms is not None and (q["ttft_ms"][i] > 30000 or (q["tpot_ms"][i] or 0) > 100)]
print(f"| {sys.argv[1]} | {r['refused']:,} | {r['met']:,} | {r['goodput']['at_rate']:.2f}/s "
      f"| {sum(q['prefill_ms'][i] for i in late) / 1e3:,.0f} s |")
P
}
row 'least-loaded (never refuses)' --policy least-loaded --plan split
row 'mooncake (at arrival, by predicted load)' --policy mooncake --plan split
row 'tandem, all split' --plan split
row tandem
