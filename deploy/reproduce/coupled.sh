#!/bin/bash
# Mooncake Fig. 1: split against coupled workers with chunked prefill, under TBT limits of 100, 200 and 300 ms
# and a TTFT of 30 s; 16 nodes. The paper's coupled workers do not know the limits: what they do is counted
# against the limits afterwards. tandem's own batching knows them.
. "$(dirname "$0")/common.sh"
BED="--profile $(mooncake_node 0.6) --kv-bytes 327680 --pool-bytes 418G --port-gb-s 100 --max-tokens 2048
     --rate ${RATE:-2}"
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
COUPLED="--prefill 0 --decode 16 --policy least-loaded"
for chunk in 512 2048; do sim "$TRACE" $BED $COUPLED --chunk-tokens $chunk --output "$t/$chunk.json" >/dev/null; done
within() {
  python3 - "$t/$1.json" "$2" <<'P'
import json, sys
q = json.load(open(sys.argv[1]))["requests"]
limit = float(sys.argv[2])
met = [ttft is not None and ttft <= 30000 and (tpot or 0) <= limit for ttft, tpot in zip(q["ttft_ms"], q["tpot_ms"])]
print(f"{100 * sum(met) / len(met):.1f} %")
P
}
columns TBT 'coupled, chunks of 512:' 'coupled, 2,048:' 'coupled, cut by the limit:' \
  'split 8 + 8 (mooncake):' 'tandem 8 + 8:'
for tbt in 100 200 300; do
  LIMITS="--ttft-ms 30000 --tpot-ms $tbt"
  cells "$tbt ms" "$(within 512 $tbt)" "$(within 2048 $tbt)" \
    "$(met "$TRACE" $BED $LIMITS $COUPLED --chunk-tokens 2048)" \
    "$(met "$TRACE" $BED $LIMITS --prefill 8 --decode 8 --plan split --policy mooncake)" \
    "$(met "$TRACE" $BED $LIMITS --prefill 8 --decode 8)"
done
