#!/usr/bin/env bash
# The suites and benches of a CUDA device, on a machine that has one; without, they are skipped by name.
# Last line: "N passed, N failed, N skipped".
#   gpu.sh                 builds with the CUDA backend, runs the kernels' suites and the engine's on the
#                          device, the kernels' under compute-sanitizer, too, where it is there and knows the
#                          device
#   gpu.sh --bench         and the benches: kernels, and the engine with the shape of a Llama of 8 billion
#                          parameters
#   gpu.sh --cluster       and the cluster suites that serve a model, with --device cuda
#   gpu.sh --pack FILE     builds, packs the programs and the libraries that they need (a .tar.gz), and does
#                          nothing more
#   gpu.sh --packed FILE   runs what was packed: for a machine that has CUDA and this tree, and installs
#                          nothing
set -euo pipefail
cd "$(dirname "$0")/.."

pack="" packed="" bench="" cluster=""
while [ $# -gt 0 ]; do
  case "$1" in
    --pack) pack="$(realpath "${2:?file}")"; shift ;;
    --packed) packed="$(realpath "${2:?file}")"; shift ;;
    --bench) bench=1 ;;
    --cluster) cluster=1 ;;
    *) echo "gpu.sh: unknown option $1 (--bench, --cluster, --pack FILE, --packed FILE)" >&2; exit 2 ;;
  esac
  shift
done

build="${TANDEM_BUILD:-build-gpu}"
if [ -z "$packed" ]; then
  bash deploy/install-deps.sh --test
  [ -d "$build" ] || meson setup "$build" -Dgpu=enabled -Dtests=enabled -Dwerror=true --buildtype=release >/dev/null
  ninja -C "$build" >"$build/build.log" 2>&1 || {
    tail -40 "$build/build.log"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
  }
else
  build="$(mktemp -d)"
  trap 'rm -rf "$build"' EXIT
  tar -xzf "$packed" -C "$build"
  export LD_LIBRARY_PATH="$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" UCX_MODULE_DIR="$build/lib/ucx"
fi
build="$(realpath "$build")"

if [ -n "$pack" ]; then
  into="$(mktemp -d)"
  trap 'rm -rf "$into"' EXIT
  mkdir -p "$into/lib/ucx"
  (cd "$build" && find cli router prefill decode kvstore kernels/cuda tests/kernels/test_kernels_device* \
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

export TANDEM_DEVICE=cuda CK_TAP_LOG_FILE_NAME=- CK_VERBOSITY=silent
passed=0 failed=0 skipped=0
suite() { # name, command...: counts its TAP
  local name="$1" out ok skip bad
  shift
  out=$("$@" 2>&1) || true
  if [[ "$out" == *"Device not supported"* ]]; then # compute-sanitizer, under some hypervisors
    skipped=$((skipped + 1))
    echo "$name: skipped: device not supported"
    return
  fi
  ok=$(grep -c '^ok' <<<"$out") || true
  skip=$(grep -ciE '^ok.*# *skip' <<<"$out") || true
  bad=$(grep -c '^not ok' <<<"$out") || true
  if [ "$((ok + bad))" -eq 0 ] || [[ "$out" == *"ERROR SUMMARY: "[1-9]* ]]; then
    bad=$((bad + 1))
    tail -20 <<<"$out"
  fi
  grep -E '^not ok' <<<"$out" || true
  passed=$((passed + ok - skip)) skipped=$((skipped + skip)) failed=$((failed + bad))
  echo "$name: $((ok - skip)) passed, $bad failed, $skip skipped"
}
unit=("$build"/tests/kernels/test_kernels_device "$build"/tests/kernels/test_kernels_device_attention
  "$build"/tests/kernels/test_kernels_device_packed "$build"/tests/kernels/test_kernels_ranks)
n_devices=$(nvidia-smi -L 2>/dev/null | wc -l) || true
[ "$n_devices" -lt 4 ] || export TANDEM_RANK_DEVICES=next # else the suites' ranks, up to four, share one
export TANDEM_SOURCE_ROOT="$PWD"
for t in "${unit[@]}"; do suite "$(basename "$t")" "$t"; done
present=$((skipped == 0))
for golden in deploy/demo-model/tandem-demo tests/model/golden/*/; do
  TANDEM_GOLDEN="$golden" suite "engine $(basename "$golden")" "$build/tests/engine/test_engine"
  TANDEM_RANKS=2x2 TANDEM_GOLDEN="$golden" suite "engine on 2x2 ranks $(basename "$golden")" \
    "$build/tests/engine/test_engine"
  TANDEM_GOLDEN="$golden" suite "ranks $(basename "$golden")" "$build/tests/engine/test_ranks"
done
for t in lora weights; do suite "engine with $t" "$build/tests/engine/test_$t"; done
if [ "$present" -eq 1 ] && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck; do
    for t in "${unit[@]}"; do
      CK_FORK=no suite "$tool $(basename "$t")" timeout 300 compute-sanitizer --tool "$tool" "$t"
    done
  done
fi
if [ "$present" -eq 1 ] && [ -n "$cluster" ]; then
  export TANDEM_BUILD_ROOT="$build" PYTHONDONTWRITEBYTECODE=1
  for t in test_families test_lora test_bytes test_golden; do
    suite "cluster $t" python3 "tests/cluster/$t.py"
  done
fi
if [ "$present" -eq 1 ] && [ -n "$bench" ]; then
  "$build/cli/tandem" bench kernels --device cuda
  "$build/cli/tandem" bench kernels --device cuda --batch-invariant off
  for weights in as-stored int8 fp8 int4; do
    "$build/cli/tandem" bench engine --device cuda --dummy 8b --weights "$weights"
  done
  for n in 2 4 8; do
    [ "$n_devices" -lt "$n" ] || "$build/cli/tandem" bench engine --device cuda --dummy 8b --tensor-parallel "$n"
  done
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
