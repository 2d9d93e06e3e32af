#!/bin/bash
# Goodput of eight workers on the conversation trace: 4 + 4 with every request split, 8 that do both phases,
# and tandem on 4 + 4.
. "$(dirname "$0")/common.sh"
goodput() { sim "$TRACE" --noise 0.05 --max-tokens 2048 "$@" --json | field goodput.at_rate; }
columns profile 'TTFT, TPOT' rate: 'all split:' 'all aggregated:' tandem: 'over the better:'
# rows NAME PROFILE TTFT TPOT RATE ...
rows() {
  name=$1 bed="--profile $2 --ttft-ms ${3}000 --tpot-ms $4" limits="$3 s, $4 ms"
  shift 4
  for rate; do
    split=$(goodput $bed --rate $rate --prefill 4 --decode 4 --plan split)
    both=$(goodput $bed --rate $rate --prefill 0 --decode 8)
    tandem=$(goodput $bed --rate $rate --prefill 4 --decode 4)
    printf '| %s | %s | %s | %.2f | %.2f | %.2f | %s |\n' "$name" "$limits" $rate $split $both $tandem \
      "$(python3 -c "print('%.3f' % ($tandem / max($split, $both)))")"
  done
}
rows 8B h200-8b 2 30 1 2 4 6 8
rows 8B h200-8b 2 100 4 6 8
rows '70B (TP4)' h200-70b 5 60 0.5 1 2 3
rows '70B (TP4)' h200-70b 5 200 1 2 3
