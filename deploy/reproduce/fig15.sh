#!/bin/bash
# Mooncake Fig. 15's shape: share of requests within TTFT 10 s and TBT 100 ms by the split of 16 nodes. The
# paper's trace is not public: one is made with its mean lengths (15,300 and 149 tokens). SYNTH, RATE: other
# requests.
. "$(dirname "$0")/common.sh"
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
SYNTH=${SYNTH:---requests 3000 --prompt 11975 --prompt-sigma 0.7 --output-tokens 117 --arrivals poisson}
"$TANDEM" trace synth --output "$t/trace.jsonl" $SYNTH >/dev/null || exit 1
BED="--profile $(mooncake_node 0.6) --kv-bytes 327680 --pool-bytes 418G --port-gb-s 100 --ttft-ms 10000
     --tpot-ms 100 --rate ${RATE:-7}"
row() {
  name=$1
  shift
  for p in 5 6 7 8 9 10 11; do met "$t/trace.jsonl" $BED --prefill $p --decode $((16 - p)) "$@"; done >"$t/shares"
  mapfile -t shares <"$t/shares"
  cells "$name" "${shares[@]}"
}
columns policy 5P11D: 6P10D: 7P9D: 8P8D: 9P7D: 10P6D: 11P5D:
row mooncake --policy mooncake --plan split
row 'tandem, all split' --plan split
row tandem
cells paper '77 %' '' '99 %' '99 %' '99 %' '' '86 %'
