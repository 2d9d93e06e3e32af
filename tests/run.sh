#!/usr/bin/env bash
# Installs what is missing, builds, runs the tests. Last line: "N passed, N failed, N skipped".
#   run.sh                 the default suite: seventeen minutes on two idle cores, besides the build
#   run.sh --long NAME     also what takes long: faults (100 kills, 100 freezes, 200,000 transfers in virtual
#                          time), replan (1,000 lost workers), pools (100 workers come and go), chaos (10,000
#                          faults under load), store (damage and kill -9 of the store, disks that others
#                          fill), transfer (32 + 32 peers, more kills), soak (an hour), scheduler (10^6
#                          passes over random requests, losses and reports: 5 minutes of one core), pauses
#                          (routers and machines that stand still for 10 s), memory (10^7 requests),
#                          predicted (errors of predicted TTFT on the CPU engine and the time of a refusal,
#                          at the promised bounds), routers (several of them and clients that come back,
#                          simulated and live, at the promised bounds), pack (start times with packed
#                          weights, a builder of them that stands still), overlap (what of a transfer is
#                          exposed, by length of the prompt), fairness (floods of 10 minutes each by two and
#                          three tenants, simulated and live), reproductions (all tables of
#                          docs/reproductions.md, half an hour of one core), sweep (goodput against load on
#                          all beds, deploy/reproduce/goodput.py: half a day on two cores), security (attacks
#                          on clusters, longer and on more connections), streams (10,000 over HTTP, 10,000
#                          over gRPC), harness (lm-eval and aiperf against tandem up, eight minutes),
#                          fuzz (10^7 runs a parser), all
#   run.sh --routers N     with --long replan, pools, chaos or faults: the load goes through N routers
#   run.sh --sanitize asan|tsan   the suite under AddressSanitizer+UBSan, or the unit and cluster suites under
#                                 ThreadSanitizer
#   run.sh --suite NAME    only that suite
set -euo pipefail
cd "$(dirname "$0")/.."

long="" sanitize="" routers=1 suites=()
while [ $# -gt 0 ]; do
  case "$1" in
    --long) long="${2:-all}"; shift ;;
    --routers) routers="${2:?number}"; shift ;;
    --sanitize) sanitize="${2:?asan or tsan}"; shift ;;
    --suite) suites+=(--suite "${2:?name}"); shift ;;
    *) echo "run.sh: unknown option $1 (--long NAME, --routers N, --sanitize asan|tsan, --suite NAME)" >&2; exit 2 ;;
  esac
  shift
done

bash deploy/install-deps.sh --test

build="${TANDEM_BUILD:-build}${sanitize:+-$sanitize}"
setup=()
case "$sanitize" in
  "") setup=(-Dwerror=true) ;;
  # without -Dwerror: gcc warns of formats that can't be null where UBSan looks at them
  asan) setup=(-Db_sanitize=address,undefined) ;;
  tsan) setup=(-Db_sanitize=thread -Db_lundef=false)
        export TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1 die_after_fork=0"
        export UCX_MEM_MMAP_HOOK_MODE=none CK_FORK=no ;;
  *) echo "run.sh: --sanitize takes asan or tsan" >&2; exit 2 ;;
esac
again=() # the build may have been made without tests
[ ! -d "$build" ] || again=(--reconfigure)
meson setup "${again[@]}" "$build" -Dtests=enabled "${setup[@]}" >/dev/null
ninja -C "$build" >"$build/build.log" 2>&1 || { tail -40 "$build/build.log"; echo "0 passed, 1 failed"; exit 1; }

export TANDEM_LONG="$long" TANDEM_ROUTERS="$routers" TANDEM_SANITIZE="$sanitize"
status=0
timeout_factor=3 # time limits find what hangs; machines may be slow
[ -z "$sanitize" ] || timeout_factor=10
export CK_TIMEOUT_MULTIPLIER="$timeout_factor"
# Most programs wait more than they compute. Long runs judge promised times, and sanitizers compute: those one
# at a time.
cores="$(nproc)"
programs=$((cores < 4 ? 2 * cores : 8))
[ -z "$long$sanitize" ] || programs=1
meson test -C "$build" --no-rebuild --num-processes "$programs" --timeout-multiplier "$timeout_factor" \
  "${suites[@]}" || status=$?

if [ "$long" = fuzz ] || [ "$long" = all ]; then
  bash tests/fuzz/run.sh || status=1
fi

if [ "$long" = sweep ] || [ "$long" = all ]; then
  code=0
  TANDEM="$(cd "$build" && pwd)/cli/tandem" python3 deploy/reproduce/goodput.py || code=$?
  [ "$code" = 0 ] || [ "$code" = 77 ] || status=1 # 77: a trace is not there, and its name was printed
fi

# Every program writes TAP, or counts as one test by its exit status.
python3 - "$build/meson-logs/testlog.json" "$status" <<'PY'
import json, re, sys
passed = failed = skipped = 0
for line in open(sys.argv[1], encoding="utf-8"):
    t = json.loads(line)
    tap = re.findall(r"^(not ok|ok)\b(.*)$", t.get("stdout") or "", re.M)
    bad = sum(1 for word, rest in tap if word == "not ok")
    skip = sum(1 for word, rest in tap if re.search(r"#\s*skip", rest, re.I))
    passed += sum(1 for word, rest in tap if word == "ok") - skip
    skipped += skip
    failed += bad
    if t["result"] in ("OK", "EXPECTEDFAIL"):
        passed += not tap
    elif t["result"] == "SKIP":
        skipped += not tap
    else:
        failed += not bad
        print(f"FAILED {t['name']} ({t['result']})\n{(t.get('stdout') or '')[-3000:]}\n"
              f"{(t.get('stderr') or '')[-3000:]}")
if int(sys.argv[2]) and not failed:
    failed = 1
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(1 if failed or not passed else 0)
PY
