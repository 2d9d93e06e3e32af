#!/bin/bash
# tandem's side of the table beside Dynamo 1.1.1's offline replay, with its polynomial engine: a chunk 16.5 ms + 15.18 us a token + 0.421 ns
# a token squared, whatever stands before it (a chunk of 8,192 takes as long here, shorter ones up to a tenth longer); a step 5.74 ms + 54 ms
# by the share of the pool in use. 16,384 blocks of 64 tokens a worker, 8 workers, arrivals at 1, 2 and 4 times the trace's rate.
# LIMITS="--ttft-ms 600 --tpot-ms 20" holds both to limits. Dynamo's command is in docs/reproductions.md.
. "$(dirname "$0")/common.sh"
BED="--profile 16501.42,18.632,0:5740,0.05151,0 --page-tokens 64 --pages 16384 --kv-bytes 131072 --chunk-tokens 8192
     --max-rows 8192 --max-batch 256"
printf '%-22s %6s %32s %32s %8s\n' '' reuse 'TTFT mean/p50/p90/p99' 'TPOT p50/p90/p99' goodput
row() {
  name=$1
  shift
  set -- $(sim "$TRACE" $BED "$@" --json |
    field cached_share ttft_ms.mean ttft_ms.p50 ttft_ms.p90 ttft_ms.p99 tpot_ms.p50 tpot_ms.p90 tpot_ms.p99 goodput.at_rate)
  printf '%-22s %6.3f %8.0f%8.0f%8.0f%8.0f %10.2f%8.2f%8.2f %8.3f\n' "$name" "$@"
}
for x in 1 2 4; do
  row "8 aggregated x$x" --prefill 0 --decode 8 --rate $x $LIMITS
  row "4+4 x$x" --prefill 4 --decode 4 --rate $x $LIMITS
  row "4+4, 4 stores x$x" --prefill 4 --decode 4 --rate $x --stores 4 --store-dram 1T $LIMITS
done
