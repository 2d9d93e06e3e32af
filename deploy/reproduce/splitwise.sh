#!/bin/bash
# Splitwise's pool designs on the Azure conversation trace, equal power: 8 DGX-H100 draw what 14 DGX-A100 do.
# Highest load at which 90 % of the requests are within TTFT and TPOT, with cost and energy there.
. "$(dirname "$0")/common.sh"
LIMITS=${LIMITS:-"--ttft-ms 1000 --tpot-ms 60"}
BED="$LIMITS --max-tokens 1024 --block-tokens 512 --port-gb-s 25 --requests ${REQUESTS:-6000}"
H="--profile dgx-h100-70b" A="--profile dgx-a100-70b" HA="--profile dgx-h100-70b --decode-profile dgx-a100-70b"
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
columns design policy requests/s: 'over mixed-pool:' J/token: price/h:
best() {
  local design=$1 price=$2 policy=$3 low=0.5 high=64 # the policy may have options
  shift 3
  for _ in 1 2 3 4 5 6 7 8 9; do
    middle=$(python3 -c "print('%.4g' % (($low * $high) ** 0.5))")
    if sim "$AZURE" $BED --rate $middle --policy $policy "$@" --json >"$t/report.json" &&
      python3 -c "import json, sys; sys.exit(json.load(open('$t/report.json'))['attainment'] < 0.9)"; then
      low=$middle
      cp "$t/report.json" "$t/best.json"
    else
      high=$middle
    fi
  done
  set -- $(field offered_rate joules_per_token <"$t/best.json")
  [ "$policy" != mixed-pool ] || mixed[$design]=$1
  cells "$design" "\`$policy\`" "$(printf %.1f $1)" "$(ratio $1 "${mixed[$design]}")" "$(printf %.2f $2)" $price
}
declare -A mixed
for policy in mixed-pool tandem 'tandem --plan split'; do
  best 'HH, 5 + 3 H100' 17.3 "$policy" $H --prefill 5 --decode 3
  best 'AA, 9 + 5 A100' 14 "$policy" $A --prefill 9 --decode 5
  best 'HA, 5 H100 + 5 A100' 15.8 "$policy" $HA --prefill 5 --decode 5
done
for policy in mixed-pool tandem; do best '8 H100 coupled' 17.3 $policy $H --prefill 0 --decode 8; done
