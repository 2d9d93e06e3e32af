#!/bin/bash
# Mooncake Fig. 15's shape: share of requests within TTFT 10 s and TBT 100 ms by the split of 16 nodes. The paper's trace is not public here:
# one is synthesized with its mean lengths (15,300 and 149 tokens) and sessions.
. "$(dirname "$0")/common.sh"
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
"$TANDEM" trace synth --output "$t/trace.jsonl" ${SYNTH:---requests 4000} >/dev/null || exit 1
BED="--profile $(mooncake_node 0.6) --kv-bytes 327680 --pool-bytes 418G --port-gb-s 100 --ttft-ms 10000 --tpot-ms 100 --rate ${RATE:-1}"
for p in 5 6 7 8 9 10 11; do
  printf '%2dP%2dD  ' $p $((16 - p))
  for policy in mooncake tandem; do
    printf '%s %s  ' $policy "$(sim "$t/trace.jsonl" $BED --prefill $p --decode $((16 - p)) --policy $policy --plan split --json |
      python3 -c 'import json, sys; r = json.load(sys.stdin); print("%.1f %%" % (100 * r["attainment"]))')"
  done
  echo
done
