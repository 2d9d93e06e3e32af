#!/bin/bash
# Mooncake Fig. 1: split against coupled workers with chunked prefill, under TBT limits of 100, 200 and 300 ms and a TTFT of 30 s; 16 nodes.
. "$(dirname "$0")/common.sh"
BED="--profile $(mooncake_node 0.6) --kv-bytes 327680 --pool-bytes 418G --port-gb-s 100 --max-tokens 2048 --ttft-ms 30000 --rate ${RATE:-2}"
met() { sim "$TRACE" $BED "$@" --json | python3 -c 'import json, sys; r = json.load(sys.stdin); print("%.1f %%" % (100 * r["attainment"]))'; }
printf '%-8s %12s %12s %18s %12s\n' TBT 'coupled, 512' 'coupled, 2k' 'split 8+8' 'tandem 8+8'
for tbt in 100 200 300; do
  printf '%5s ms %12s %12s %18s %12s\n' $tbt "$(met --prefill 0 --decode 16 --policy least-loaded --chunk-tokens 512 --tpot-ms $tbt)" \
    "$(met --prefill 0 --decode 16 --policy least-loaded --chunk-tokens 2048 --tpot-ms $tbt)" \
    "$(met --prefill 8 --decode 8 --plan split --policy mooncake --tpot-ms $tbt)" \
    "$(met --prefill 8 --decode 8 --tpot-ms $tbt)"
done
