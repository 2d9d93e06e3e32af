#!/bin/bash
# Mooncake Fig. 9: per cent of blocks found by the size of one pool, in the order of the requests alone; and
# as a share of the most that can be found. 5,859 blocks are 3 M tokens.
. "$(dirname "$0")/common.sh"
columns blocks: lru: "tandem's order:" optimum: 'lru, of all:' "tandem's, of all:"
"$TANDEM" bench eviction --trace "$TRACE" --capacity 1000,5859,10000,30000,50000,100000 --json | python3 -c '
import json, re, sys
hits = {}
for line in sys.stdin:
    row = json.loads(line)
    found = re.fullmatch("hits with (.*) blocks, (.*)", row["name"])
    if found:
        hits.setdefault(int(found[1]), {})[found[2]] = row["value"]
most = max(of["optimum"] for of in hits.values())
for n, of in hits.items():
    lru, tandem, optimum = (of[k] for k in ("lru", "tandem", "optimum"))
    print(f"| {n:,} | {lru:.2f} | {tandem:.2f} | {optimum:.2f} | {100 * lru / most:.1f} % "
          f"| {100 * tandem / most:.1f} % |")'
