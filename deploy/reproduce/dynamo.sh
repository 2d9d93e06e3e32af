#!/bin/bash
# tandem's side of the tables beside Dynamo 1.1.1's offline replay with its polynomial engine: a step takes
# 16.5 ms + 15.18 us a prompt token + 0.421 ns of their square, whatever stands before them, and, if sequences
# decode, 5.74 ms + 54.01 ms p - 25.74 ms p^2 more, where p is the share of the pool in use. 16,384 blocks of
# 64 tokens a worker, 8 workers, arrivals at 1, 2 and 4 times the trace's rate. Dynamo's command is in
# docs/reproductions.md.
. "$(dirname "$0")/common.sh"
BED="--page-tokens 64 --pages 16384 --kv-bytes 131072 --chunk-tokens 8192 --max-rows 8192 --max-batch 256"
SAME="--profile 16501.42,15.18344,0:5740,0.0515079,0:0.0004209989,-2.34103e-8,1"
# Under limits: without squares and with what steps with both share; a chunk of 8,192 takes as long, shorter
# ones up to a tenth longer.
MODEL="--profile 16501.42,18.632,0:5740,0.05151,0"

# Share of prompt tokens that one LRU pool of so many blocks of 512 tokens finds, in the order of the
# requests; their last token is computed.
lru() {
  python3 - "$TRACE" "$1" <<'P'
import collections, json, sys
pool, hits, tokens = collections.OrderedDict(), 0, 0
for t in map(json.loads, open(sys.argv[1])):
    n, ids = t["input_length"], t["hash_ids"]
    found = next((i for i, b in enumerate(ids[:(n - 1) // 512]) if b not in pool), (n - 1) // 512)
    hits, tokens = hits + 512 * found, tokens + n
    for b in reversed(ids[:n // 512]):
        pool[b] = True
        pool.move_to_end(b)
    while len(pool) > int(sys.argv[2]):
        pool.popitem(last=False)
print("%.4f" % (hits / tokens))
P
}
ALL=$(lru 16384)
echo "one LRU pool of the blocks of 8 workers finds $ALL of the prompt tokens, of 4 workers $(lru 8192)"

printf '\nwithout limits; reuse of all prompt tokens\n%-22s %6s %6s %32s %24s\n' \
  '' reuse 'of LRU' 'TTFT mean/p50/p90/p99' 'TPOT p50/p90/p99'
row() {
  name=$1
  shift
  set -- $(sim "$TRACE" $BED $SAME "$@" --json |
    field offered.cached_share ttft_ms.mean ttft_ms.p50 ttft_ms.p90 ttft_ms.p99 tpot_ms.p50 tpot_ms.p90 tpot_ms.p99)
  printf '%-22s %6.3f %6.3f %8.0f%8.0f%8.0f%8.0f %8.2f%8.2f%8.2f\n' "$name" $1 $(ratio $1 $ALL) "${@:2}"
}
for x in 1 2 4; do
  row "8 aggregated x$x" --prefill 0 --decode 8 --rate $x
  row "4+4 x$x" --prefill 4 --decode 4 --rate $x
done

printf '\nunder limits; shares of all requests and of all prompt tokens\n%-34s %8s %8s %9s %9s %9s %8s\n' \
  '' within tokens refused tokens goodput reuse
limited() {
  name=$1
  shift
  set -- $(sim "$TRACE" $BED $MODEL "$@" --json |
    field offered.met_share offered.met_token_share offered.refused_share offered.refused_token_share goodput.at_rate \
      offered.cached_share)
  printf '%-34s %8.3f %8.3f %9.3f %9.3f %9.2f %8.3f\n' "$name" "$@"
}
for limits in 1:600:20 2:600:20 4:600:20 1:1711:9.29 2:1790:12.94 4:1929:27.88; do
  IFS=: read -r x ttft tpot <<<"$limits"
  for policy in tandem mooncake; do
    limited "x$x, $ttft and $tpot ms, $policy" --prefill 4 --decode 4 --rate $x --ttft-ms $ttft \
      --tpot-ms $tpot --policy $policy
  done
  limited "x$x, tandem, split plans" --prefill 4 --decode 4 --rate $x --ttft-ms $ttft --tpot-ms $tpot --plan split
  limited "x$x, tandem, 8 aggregated" --prefill 0 --decode 8 --rate $x --ttft-ms $ttft --tpot-ms $tpot
done
