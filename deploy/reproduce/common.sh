# What the scripts beside this one share. TANDEM: the binary; TRACE, AZURE: the two public traces. A script
# prints a table as docs/reproductions.md has it, column for column; tables.py compares the two.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
TANDEM=${TANDEM:-$ROOT/build/cli/tandem}
TRACE=${TRACE:-$ROOT/../shared/traces/mooncake_conversation.jsonl}
AZURE=${AZURE:-$ROOT/../shared/traces/azure_2023_conv.csv}
for f in "$TANDEM" "$TRACE" "$AZURE"; do
  [ -r "$f" ] || { echo "$0: $f is not there" >&2; exit 77; }
done

sim() { "$TANDEM" simulate "$@"; }
# Fields of a report's JSON on standard input: field ttft_ms.mean answered
field() {
  python3 -c '
import json, sys
r = json.load(sys.stdin)
def at(path):
    v = r
    for k in path.split("."):
        v = v[k]
    return v
print(*(f"{at(p):.6g}" for p in sys.argv[1:]))' "$@"
}
# Milliseconds that workers were busy for each answer.
busy() {
  python3 -c '
import json, sys
r = json.load(sys.stdin)
print("%.6g" % (sum(w["busy_ms"] for w in r["workers"]) / r["answered"]))'
}
# The mean of the numbers on standard input.
mean() { python3 -c 'import sys; v = [float(x) for x in sys.stdin.read().split()]; print("%.6g" % (sum(v) / len(v)))'; }
ratio() { python3 -c "print('%.3f' % ($1 / $2))"; }
seconds() { python3 -c "print('%.3f s' % ($1 / 1000))"; } # of milliseconds
# Share of requests within both limits.
met() {
  sim "$@" --json | python3 -c 'import json, sys; print("%.1f %%" % (100 * json.load(sys.stdin)["attainment"]))'
}
# columns NAME ...: the head of a table; names that end in : are of figures.
columns() {
  local c head='' rule=''
  for c; do
    head+="| ${c%:} "
    [[ $c == *: ]] && rule+='|---:' || rule+='|---'
  done
  printf '%s|\n%s|\n' "$head" "$rule"
}
cells() { # a row
  printf '| %s ' "$@"
  echo '|'
}

# Mooncake's testbed: LLaMA3-70B on eight A800, by its equation 1 at a share of the peak of 8 x 312 TFLOP/s;
# 100 Gb/s between nodes.
mooncake_node() {
  python3 -c "
mfu = $1; peak = 8 * 312e12 * mfu
print('0,%.6g,%.6g:17000,0.0402,0' % (80 * 22 * 8192**2 / peak * 1e6, 80 * 4 * 8192 / peak * 1e6))"
}
