#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs them, one for each core at a time.
#   run.sh                  each for 10^7 runs or one hour, whichever ends first
#   run.sh --runs N         each N times, or for an hour
#   run.sh --seconds N      each for N seconds
#   run.sh --seed N         begins with that random number: without a corpus, a run repeats another. CI does,
#                           so that no change is refused for what an earlier run could have found
#   run.sh [...] NAME...    only these targets
# Prints runs and coverage (edges of the program; libFuzzer's cov) of each. Exit status 1: a target has
# failed, and its input is named. Without clang and its fuzzer: skipped, by name.
set -euo pipefail
export UBSAN_OPTIONS=halt_on_error=1
cd "$(dirname "$0")/../.."
runs=10000000 seconds=3600 seed=0 targets=()
while [ $# -gt 0 ]; do
  case "$1" in
    --runs) runs="${2:?number}"; shift ;;
    --seconds) seconds="${2:?number}" runs=-1; shift ;;
    --seed) seed="${2:?number}"; shift ;;
    -h | --help) sed -n '2,11s/^# \?//p' "$0"; exit 0 ;;
    -*) echo "run.sh: unknown option $1 (--runs N, --seconds N, --seed N, names of targets)" >&2; exit 2 ;;
    *) targets+=("$1") ;;
  esac
  shift
done
all=(events store_msg block codec layout transfer tensors shards config adapter tokenizer template trace report
  profile ask params keys secret options tcp tcp_tls xfer blobs peer legs
  http escape grammar reply)
[ ${#targets[@]} -gt 0 ] || targets=("${all[@]}")
if ! echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return !d && n; }' |
  clang -fsanitize=fuzzer -x c - -o /dev/null 2>/dev/null; then
  echo "# skipped: fuzz targets (no clang with libFuzzer)"
  exit 0
fi
build="${TANDEM_BUILD:-build}-fuzz"
[ -d "$build" ] || CC=clang CFLAGS=-fsanitize=fuzzer-no-link meson setup "$build" -Dfuzz=true -Dtests=disabled \
  -Dgpu=disabled -Db_sanitize=address,undefined -Db_lundef=false >/dev/null
ninja -C "$build" "${targets[@]/#/tests/fuzz/fuzz_}" >"$build/build.log" 2>&1 || {
  tail -20 "$build/build.log"
  exit 1
}

run() { # NAME
  local t="$1" seeds=(tests/fuzz/seeds/"$1") # what to begin with, where the tree has it
  mkdir -p "$build/corpus/$t"
  [ -d "${seeds[0]}" ] || seeds=()
  [ "$t" != config ] || for f in tests/model/golden/*/config.json; do
    cp "$f" "$build/corpus/$t/$(basename "$(dirname "$f")")"
  done
  if "$build/tests/fuzz/fuzz_$t" -seed="$seed" -runs="$runs" -max_total_time="$seconds" -max_len=4096 -timeout=60 \
    -close_fd_mask=3 -artifact_prefix="$build/$t-" "$build/corpus/$t" "${seeds[@]}" 2>"$build/$t.log"; then
    sed -n 's/^#\([0-9]*\)\tDONE *cov: \([0-9]*\).*/\1 runs, coverage \2/p' "$build/$t.log" | sed "s/^/ok fuzz_$t: /"
  else
    echo "not ok fuzz_$t: see $build/$t.log"
    tail -20 "$build/$t.log"
    return 1
  fi
}

failed=0 running=0
for t in "${targets[@]}"; do
  run "$t" &
  running=$((running + 1))
  if [ "$running" -ge "$(nproc)" ]; then
    wait -n || failed=1
    running=$((running - 1))
  fi
done
while [ "$running" -gt 0 ]; do
  wait -n || failed=1
  running=$((running - 1))
done
exit $failed
