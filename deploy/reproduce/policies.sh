#!/bin/bash
# Goodput of every policy on the conversation trace, 8 + 8 H200 with an 8B model. SEEDS: means of so many runs
# that differ by the noise of their steps. (One at high rates takes seconds under a policy that never
# refuses.)
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1}
POLICIES='tandem mooncake headroom mixed-pool cache-aware least-loaded round-robin random'
columns rate: $(printf '%s: ' $POLICIES)
sim "$TRACE" --noise 0.05 --max-tokens 2048 --ttft-ms 2000 --tpot-ms 30 --json \
  --sweep "rate=1|2|4|8|12|16,policy=${POLICIES// /|},seed=1..$SEEDS" | python3 -c '
import json, sys
of = {}
for point in json.load(sys.stdin)["points"]:
    s, r = point["report"]["settings"], point["report"]
    of.setdefault(s["rate"], {}).setdefault(s["policy"], []).append(r["goodput"]["at_rate"])
for rate, policies in of.items():
    print("|", " | ".join([f"{rate:g}"] + [f"{sum(v) / len(v):.3f}" for v in policies.values()]), "|")'
