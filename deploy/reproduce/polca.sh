#!/bin/bash
# POLCA (ASPLOS '24): 30 % more machines under the power budget of 40, with 30 % more load; clocks go down in
# steps, or there is only the brake. The load is the Azure conversation trace COPIES times at once, each
# request up to a minute later by chance: its own hour, from 4 to 8 requests a second and back, is the row's.
# (--rate would squeeze that hour into minutes, and a clock takes 40 s.) So many copies bring the row of 40 to
# the paper's peak, 79 % of what its machines draw at most. SEEDS such hours, taken together; peaks are their
# mean, and brakes are so many in so many of them.
. "$(dirname "$0")/common.sh"
COPIES=${COPIES:-5} SEEDS=${SEEDS:-5} WATTS=5830
t=$(mktemp -d)
trap 'rm -rf "$t"' EXIT
copies() {
  python3 - "$AZURE" "$@" <<'P'
import datetime, random, sys
head, *lines = open(sys.argv[1]).read().splitlines()
copies, out = float(sys.argv[2]), []
random.seed(int(sys.argv[3]))
while copies > 0:  # of the last one a part
    for line in lines if copies >= 1 else random.sample(lines, round(copies * len(lines))):
        at, rest = line.split(",", 1)
        out.append((datetime.datetime.fromisoformat(at[:26]) + datetime.timedelta(seconds=random.uniform(0, 60)), rest))
    copies -= 1
print(head)
for at, rest in sorted(out):
    print(f"{at:%Y-%m-%d %H:%M:%S.%f},{rest}")
P
}
for seed in $(seq "$SEEDS"); do
  copies "$COPIES" "$seed" >"$t/load.$seed.csv"
  copies "$(python3 -c "print(1.3 * $COPIES)")" "$seed" >"$t/more.$seed.csv"
done

# One row. Of a table's first row times, of the others how much longer they are; under polca also those of the
# requests that were decoded by workers whose clocks went first, and by the others (the paper's low and high
# priority).
show() {
  python3 - "$t/$base" "$t/$name" "$budget" "$SEEDS" <<'P'
import json, os, sys
base, runs = ([json.load(open(f"{at}.{i + 1}.json")) for i in range(int(sys.argv[4]))] for at in sys.argv[1:3])
name, powers = os.path.basename(sys.argv[2]), [r["settings"]["power"] for r in runs]
UNITS = {"ttft_ms": (1, ".0f", "ms"), "tpot_ms": (1, ".1f", "ms"), "e2e_ms": (1000, ".2f", "s")}
def percentiles(runs, key, workers):
    columns = [r["requests"] for r in runs]
    v = sorted(x for q in columns for x, w in zip(q[key], q["decode"]) if x is not None and w in workers)
    return [v[(len(v) - 1) * p // 100] for p in (50, 99)]
def times(workers):
    for key, (scale, form, unit) in UNITS.items():
        here, there = percentiles(runs, key, workers), percentiles(base, key, range(len(base[0]["workers"])))
        if runs == base:
            yield ", ".join(format(x / scale, form) for x in here) + " " + unit
        else:
            yield ", ".join(f"{round(100 * (x / y - 1), 1) + 0.0:+.1f}" for x, y in zip(here, there)) + " %"
def line(*head, workers):
    print("|", " | ".join([*head, *times(workers)]), "|")
def mean(values):
    return sum(values) / len(runs)
n, first, brakes = len(runs[0]["workers"]), powers[0]["first"], [p["brakes"] for p in powers]
line(name, f"{mean(100 * p['peak_share'] * p['budget_w'] / float(sys.argv[3]) for p in powers):.1f} %",
     f"{sum(brakes)} in {sum(b > 0 for b in brakes)}", f"{mean(sum(p['level_s'][1:]) for p in powers):,.0f} s",
     f"{mean(r['joules_per_token'] for r in runs):.1f}", workers=range(n))
if name.endswith("polca") and runs[0]["workers"][0]["role"] == "both":
    line("- decoded where clocks go first", "", "", "", "", workers=range(n - first, n))
    line("- decoded by the others", "", "", "", "", workers=range(n - first))
P
}
# row NAME LOAD OPTIONS
row() {
  name=$1 load=$2
  shift 2
  for seed in $(seq "$SEEDS"); do
    sim "$t/$load.$seed.csv" "$@" --profile dgx-a100-70b --block-tokens 512 --max-tokens 1024 --port-gb-s 25 \
      --output "$t/$name.$seed.json" >/dev/null || exit 1
  done
  show
}
# table NAME BUDGET PREFILL DECODE PREFILL DECODE: the row itself, and the larger one in its place.
table() {
  budget=$2 base=40
  echo
  columns "$1" peak: 'brakes, in hours:' 'lowered, of an hour:' J/token: \
    'TTFT p50, p99:' 'TPOT p50, p99:' 'latency p50, p99:'
  row 40 load --power-budget "$budget" --prefill "$3" --decode "$4" --power-control brake
  row '52, nothing done' more --power-budget $((100 * budget)) --prefill "$5" --decode "$6"
  row '52, polca' more --power-budget "$budget" --prefill "$5" --decode "$6"
  row '52, brake' more --power-budget "$budget" --prefill "$5" --decode "$6" --power-control brake
}
# The budget, in watts, of which what the row of 40 drew at most in the last table is 79 %.
its_budget() {
  python3 - "$t" "$SEEDS" <<'P'
import json, sys
powers = [json.load(open(f"{sys.argv[1]}/40.{i + 1}.json"))["settings"]["power"] for i in range(int(sys.argv[2]))]
print(round(sum(p["peak_share"] * p["budget_w"] for p in powers) / len(powers) / 0.79))
P
}
table coupled $((40 * WATTS)) 0 40 0 52
table split $((40 * WATTS)) 26 14 34 18
own=$(its_budget)
echo "$own W" >&2
table 'split, its own budget' "$own" 26 14 34 18
row '52, polca, all at once' more --power-budget "$own" --prefill 34 --decode 18 --power-first 52
