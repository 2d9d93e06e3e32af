#!/usr/bin/env bash
# From a fresh Debian 12 to a streamed answer: installs what is missing, builds, starts a cluster (router,
# prefill, decode and store as processes) on the demo model, asks it something, and leaves it running.
set -euo pipefail
cd "$(dirname "$0")/.."

bash deploy/install-deps.sh
build="${TANDEM_BUILD:-build}"
[ -d "$build" ] || meson setup "$build" >/dev/null
echo "building ..." >&2
ninja -C "$build" >"$build/build.log" 2>&1 || { tail -40 "$build/build.log" >&2; exit 1; }

tandem="$build/cli/tandem"
run_dir="${TANDEM_RUN_DIR:-$PWD/$build/quickstart}"
listen="${TANDEM_ROUTER:-127.0.0.1:7470}"
"$tandem" down --run-dir "$run_dir" >/dev/null 2>&1 || true
"$tandem" up --model deploy/demo-model/tandem-demo --run-dir "$run_dir" --listen "$listen" --plan split \
  --pool-bytes 128M --store-dram 128M --detach

echo >&2
question="${*:-Tell me a story about a fox and a lantern.}"
echo "> $question" >&2
"$tandem" generate --router "$listen" --temperature 0 "$question"
cat >&2 <<TEXT

The cluster goes on running. Try:
  $tandem chat --router $listen
  $tandem status --router $listen
  $tandem down --run-dir $run_dir
TEXT
