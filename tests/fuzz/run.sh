#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs each: run.sh [RUNS]   (default 10^7 for binary formats, a tenth
#                                                                   for JSON)
set -euo pipefail
export UBSAN_OPTIONS=halt_on_error=1
cd "$(dirname "$0")/../.."
runs="${1:-10000000}"
build="${TANDEM_BUILD:-build}-fuzz"
[ -d "$build" ] || CC=clang CFLAGS=-fsanitize=fuzzer-no-link meson setup "$build" -Dfuzz=true -Dtests=disabled \
  -Db_sanitize=address,undefined -Db_lundef=false >/dev/null
targets=(events store_msg block codec layout transfer tensors config adapter tokenizer template trace report profile)
ninja -C "$build" "${targets[@]/#/tests/fuzz/fuzz_}" >"$build/build.log" 2>&1 || {
  tail -20 "$build/build.log"
  exit 1
}
failed=0
for t in "${targets[@]}"; do
  n=$runs
  case "$t" in tensors|config|adapter|tokenizer|template|trace|report|profile) n=$((runs / 10)) ;; esac
  mkdir -p "$build/corpus/$t"
  seeds=(tests/fuzz/seeds/"$t") # what to begin with, where the tree has it
  [ -d "${seeds[0]}" ] || seeds=()
  if [ "$t" = config ]; then
    for f in tests/model/golden/*/config.json; do cp "$f" "$build/corpus/$t/$(basename "$(dirname "$f")")"; done
  fi
  if "$build/tests/fuzz/fuzz_$t" -runs="$n" -max_len=4096 -close_fd_mask=3 "$build/corpus/$t" "${seeds[@]}" \
    2>"$build/$t.log"; then
    echo "ok fuzz_$t $n runs"
  else
    echo "not ok fuzz_$t"; tail -20 "$build/$t.log"; failed=1
  fi
done
exit $failed
