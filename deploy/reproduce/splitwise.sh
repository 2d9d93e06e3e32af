#!/bin/bash
# Splitwise's pool designs on the Azure conversation trace, equal power: 8 DGX-H100 draw what 14 DGX-A100 do. Highest rate (times the trace's)
# at which 90 % of requests are within TTFT and TPOT, with cost and energy there. HHcap: token machines held to 70 % of their power.
. "$(dirname "$0")/common.sh"
LIMITS=${LIMITS:-"--ttft-ms 1000 --tpot-ms 60"}
BED="$LIMITS --max-tokens 1024 --block-tokens 512 --port-gb-s 25 --requests ${REQUESTS:-6000}"
H="--profile dgx-h100-70b" A="--profile dgx-a100-70b" HA="--profile dgx-h100-70b --decode-profile dgx-a100-70b"
printf '%-34s %8s %9s %10s %10s\n' design rate 'req/s' 'J/token' 'price/h'
best() {
  name=$1 price=$2 low=0.5 high=64
  shift 2
  for _ in 1 2 3 4 5 6 7; do
    middle=$(python3 -c "print('%.4g' % (($low * $high) ** 0.5))")
    if sim "$AZURE" $BED --rate $middle "$@" --json >/tmp/splitwise.$$ &&
      python3 -c "import json, sys; sys.exit(json.load(open('/tmp/splitwise.$$'))['attainment'] < 0.9)"; then
      low=$middle
      cp /tmp/splitwise.$$ /tmp/splitwise.best.$$
    else
      high=$middle
    fi
  done
  printf '%-34s %8s %9.4s %10.4s %10s\n' "$name" $low $(field offered_rate joules_per_token </tmp/splitwise.best.$$) $price
  rm -f /tmp/splitwise.$$ /tmp/splitwise.best.$$
}
for policy in mixed-pool tandem; do
  best "HH 5+3 $policy" 17.3 $H --prefill 5 --decode 3 --policy $policy
  best "AA 9+5 $policy" 14 $A --prefill 9 --decode 5 --policy $policy
  best "HA 5+5 $policy" 15.8 $HA --prefill 5 --decode 5 --policy $policy
  best "H coupled 8 $policy" 17.3 $H --prefill 0 --decode 8 --policy $policy
done
