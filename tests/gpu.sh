#!/usr/bin/env bash
# What a CUDA device has to show, in stages, on a machine that has one; without a device all is skipped by
# name. Last line: "N passed, N failed, N skipped". A suite passes if it exits with 0 and has run all tests
# that it planned.
#   gpu.sh                 builds with the CUDA backend, then runs smoke, kernels, goldens and benches
#   gpu.sh --stage LIST    runs these stages, in this order; they are listed below
#   gpu.sh --limit S       seconds for each stage; what has not ended by then has failed (default 480)
#   gpu.sh --out DIR       keeps what each suite printed, and table.txt, which grows as suites end
#   gpu.sh --pack FILE     builds, packs the programs and the libraries that they need (a .tar.gz), and does
#                          nothing more
#   gpu.sh --packed FILE   runs what was packed: for a machine that has CUDA and this tree, and installs
#                          nothing
# TANDEM_BUILD=DIR: what was built there, as it is.
# Stages: smoke       each kernel once at the bench's shapes; the demo model's tokens
#         kernels     each operation beside its specification in plain C
#         goldens     every small model of tests/model/golden through the engine; adapters; packed weights
#         benches     kernels, and the engine with the shape of a Llama of 8 billion parameters
#         cluster     suites that start a cluster, with --device cuda, and one that kills workers
#         sanitizers  the kernels' suites under compute-sanitizer, where it knows the device
#         ranks       the engine on 2x2 ranks, and ranks of any number beside one
set -euo pipefail
root="$(realpath "$(dirname "$0")/..")"

usage() {
  sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$root/tests/gpu.sh"
}
fail() {
  echo "gpu.sh: $*" >&2
  exit 2
}
pack="" packed="" limit=480 out="" stages="smoke,kernels,goldens,benches"
while [ $# -gt 0 ]; do
  case "$1" in
    --pack | --packed | --stage | --limit | --out) [ $# -ge 2 ] || fail "$1 needs a value" ;;&
    --pack) pack="$(realpath -m "$2")"; shift ;;
    --packed) packed="$(realpath -m "$2")"; shift ;;
    --stage) stages="$2"; shift ;;
    --limit) limit="$2"; shift ;;
    --out) out="$(realpath -m "$2")"; shift ;;
    --help) usage; exit 0 ;;
    *) fail "unknown option $1; --help lists all" ;;
  esac
  shift
done
for s in ${stages//,/ }; do
  case "$s" in
    smoke | kernels | goldens | benches | cluster | sanitizers | ranks) ;;
    *) fail "--stage: there is no stage '$s'; --help lists all" ;;
  esac
done
[[ "$limit" =~ ^[1-9][0-9]*$ ]] || fail "--limit: '$limit' is no number of seconds"

[ -z "${TANDEM_BUILD:-}" ] || TANDEM_BUILD="$(realpath "$TANDEM_BUILD")"
cd "$root"
made=() # directories that go at the end
declare -A names=() # suites that run, by process
tidy() {
  [ "${#names[@]}" -eq 0 ] || kill "${!names[@]}" 2>/dev/null || true
  [ "${#made[@]}" -eq 0 ] || rm -rf "${made[@]}"
}
trap tidy EXIT
trap 'exit 130' INT TERM
build="${TANDEM_BUILD:-build-gpu}"
if [ -n "$packed" ]; then
  build="$(mktemp -d)"
  made+=("$build")
  tar -xzf "$packed" -C "$build"
  export LD_LIBRARY_PATH="$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" UCX_MODULE_DIR="$build/lib/ucx"
elif [ -z "${TANDEM_BUILD:-}" ]; then
  bash deploy/install-deps.sh --test
  [ -d "$build" ] || meson setup "$build" -Dgpu=enabled -Dtests=enabled -Dwerror=true >/dev/null
  ninja -C "$build" >"$build/build.log" 2>&1 || {
    tail -40 "$build/build.log"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
  }
fi
build="$(realpath "$build")"

if [ -n "$pack" ]; then
  into="$(mktemp -d)"
  made+=("$into")
  mkdir -p "$into/lib/ucx"
  (cd "$build" && find cli router gateway prefill decode kvstore kernels/cuda tests/kernels/test_kernels_device* \
    tests/kernels/test_kernels_ranks tests/engine/test_engine tests/engine/test_ranks tests/engine/test_lora \
    tests/engine/test_weights -maxdepth 1 -type f -executable -exec cp --parents -t "$into" {} +)
  find "$into" -type f -exec strip -q {} + 2>/dev/null || true
  find "$into" -type f -executable -exec ldd {} + 2>/dev/null | awk '$3 ~ /^\// {print $3}' | sort -u |
    grep -Ev '/(libc|libm|libdl|librt|libpthread|libcuda|libcublas|libcublasLt|libcudart|libgcc_s|libstdc\+\+)\.so' |
    xargs -r cp -L -t "$into/lib"
  cp -L /usr/lib/x86_64-linux-gnu/ucx/*.so.0 "$into/lib/ucx/"
  tar -czf "$pack" -C "$into" .
  ls -sh "$pack"
  exit 0
fi

if [ -z "$out" ]; then
  out="$(mktemp -d)"
  made+=("$out")
fi
mkdir -p "$out"
: >"$out/table.txt"
export TANDEM_DEVICE=cuda CK_TAP_LOG_FILE_NAME=- CK_VERBOSITY=silent TANDEM_SOURCE_ROOT="$PWD"
n_devices=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
[ "$n_devices" -lt 4 ] || export TANDEM_RANK_DEVICES=next # else the suites' ranks, up to four, share one
passed=0 failed=0 skipped=0 ends=0
say() { echo "$*" | tee -a "$out/table.txt"; }

# judge NAME EXIT_CODE SECONDS: counts the TAP of a suite, in $out/NAME.log.
judge() {
  local name="$1" code="$2" log="$out/$1.log" planned ok skip bad why=""
  planned=$(sed -n 's/^1\.\.\([0-9]\+\).*/\1/p' "$log" | tail -1)
  ok=$(grep -c '^ok' "$log") || true
  skip=$(grep -ciE '^ok.*# *skip' "$log") || true
  bad=$(grep -c '^not ok' "$log") || true
  if grep -q 'Device not supported' "$log"; then # compute-sanitizer, under some hypervisors
    skipped=$((skipped + 1))
    say "$name: skipped: device not supported"
    return
  fi
  if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
    why="ran out of time"
  elif [ -z "$planned" ] || [ "$planned" -ne $((ok + bad)) ]; then
    why="ran $((ok + bad)) of ${planned:-unknown} tests, exit code $code"
  elif [ "$code" -ne 0 ] && [ "$bad" -eq 0 ]; then
    why="exit code $code"
  fi
  [ -z "$why" ] || bad=$((bad + 1))
  [ "$bad" -eq 0 ] || grep -vE '^(ok|1\.\.)' "$log" | cut -c 1-400 | tail -30 | sed 's/^/    /' || true
  passed=$((passed + ok - skip)) skipped=$((skipped + skip)) failed=$((failed + bad))
  say "$name: $((ok - skip)) passed, $bad failed, $skip skipped, $3 s${why:+ ($why)}"
}

# Suites run side by side, a few at a time, in processes of their own. suite NAME COMMAND...
declare -A starts=() # by process, as names
parallel=$(($(nproc) / 2))
[ "$parallel" -ge 1 ] || parallel=1
reap() { # whichever ends first
  local code=0 pid=""
  wait -n -p pid "${!names[@]}" || code=$?
  judge "${names[$pid]}" "$code" $((SECONDS - starts[$pid]))
  unset "names[$pid]" "starts[$pid]"
}
suite() {
  local name="$1" left
  shift
  [ "${#names[@]}" -lt "$parallel" ] || reap
  left=$((ends - SECONDS))
  [ "$left" -ge 1 ] || left=1
  timeout --kill-after 5 "$left" "$@" >"$out/$name.log" 2>&1 &
  names[$!]="$name" starts[$!]="$SECONDS"
}
finish() { while [ "${#names[@]}" -gt 0 ]; do reap; done; }

# bench NAME OPTIONS...: a part of tandem bench, alone on the machine; its rows are shown when it has ended.
bench() {
  local name="$1" left=$((ends - SECONDS)) code=0
  shift
  [ "$n_devices" -gt 0 ] || {
    skipped=$((skipped + 1))
    say "$name: skipped: there is no device"
    return 0
  }
  [ "$left" -ge 1 ] || left=1
  timeout --kill-after 5 "$left" "$build/cli/tandem" bench "$@" >"$out/$name.log" 2>&1 || code=$?
  cat "$out/$name.log" | tee -a "$out/table.txt"
  if [ "$code" -eq 0 ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    say "$name: exit code $code"
  fi
}

demo=deploy/demo-model/tandem-demo
unit=(test_kernels_device test_kernels_device_attention test_kernels_device_packed test_kernels_ranks)

stage_smoke() {
  TANDEM_GOLDEN="$demo" suite smoke-demo "$build/tests/engine/test_engine"
  finish
  bench smoke-kernels kernels --device cuda --seconds 0.01
}
stage_kernels() {
  for t in "${unit[@]}"; do suite "$t" "$build/tests/kernels/$t"; done
}
stage_goldens() {
  for golden in "$demo" tests/model/golden/*/; do
    TANDEM_GOLDEN="$golden" suite "engine-$(basename "$golden")" "$build/tests/engine/test_engine"
  done
  for t in lora weights; do suite "engine-with-$t" "$build/tests/engine/test_$t"; done
}
stage_ranks() {
  for golden in "$demo" tests/model/golden/*/; do
    TANDEM_RANKS=2x2 TANDEM_GOLDEN="$golden" suite "engine-2x2-$(basename "$golden")" \
      "$build/tests/engine/test_engine"
    TANDEM_GOLDEN="$golden" suite "ranks-$(basename "$golden")" "$build/tests/engine/test_ranks"
  done
}
experts=vocab=151936,hidden=2048,layers=48,heads=32,kv_heads=4,head_dim=128,ffn=768,experts=128,used=8
stage_benches() {
  bench bench-small engine --device cuda --dummy 8b --only "prefill+batch 1," --trace "$out/bench-small.json"
  bench bench-64 engine --device cuda --dummy 8b --only "batch 64" --trace "$out/bench-64.json"
  bench bench-kernels kernels --device cuda
  bench bench-kernels-any-order kernels --device cuda --batch-invariant off
  bench bench-any-order engine --device cuda --dummy 8b --batch-invariant off --only "prefill+batch 64"
  bench bench-kv-fp8 engine --device cuda --dummy 8b --kv-dtype fp8 --only "batch 1,+batch 64"
  bench bench-fp8 engine --device cuda --dummy 8b --weights fp8 --only "prefill 2048+batch 1,"
  bench bench-experts engine --device cuda --dummy "$experts" --only "batch 1,+batch 64"
  bench bench-large engine --device cuda --dummy 8b --only "batch 128+batch 256"
  for n in 2 4 8; do
    [ "$n_devices" -lt "$n" ] || bench "bench-ranks-$n" engine --device cuda --dummy 8b --tensor-parallel "$n"
  done
}
stage_cluster() {
  export TANDEM_BUILD_ROOT="$build" PYTHONDONTWRITEBYTECODE=1
  for t in test_families test_lora test_bytes test_golden test_faults; do
    suite "cluster-$t" python3 "tests/cluster/$t.py"
    finish # a cluster's times are not for a shared machine
  done
}
stage_sanitizers() {
  command -v compute-sanitizer >/dev/null || {
    skipped=$((skipped + 1))
    say "sanitizers: skipped: there is no compute-sanitizer"
    return 0
  }
  for tool in memcheck racecheck initcheck; do
    for t in "${unit[@]}"; do
      CK_FORK=no suite "$tool-$t" compute-sanitizer --error-exitcode 1 --tool "$tool" "$build/tests/kernels/$t"
    done
  done
}

if [ "$n_devices" -eq 0 ] && [ -z "${TANDEM_BUILD:-}" ]; then
  say "skipped: there is no device (nvidia-smi lists none): ${stages//,/, }"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
for s in ${stages//,/ }; do
  began=$SECONDS ends=$((SECONDS + limit))
  say "--- $s"
  "stage_$s"
  finish
  say "--- $s took $((SECONDS - began)) s"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
