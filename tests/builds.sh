#!/usr/bin/env bash
# Compiles, without tests and with warnings as errors, what the suite's own build (gcc, debugoptimized, everything) does not show:
# gcc release without the GPU backend, clang debug, and the libraries alone (-Dcluster=false). Exit status 0: all compile.
set -euo pipefail
cd "$(dirname "$0")/.."
top="${TANDEM_BUILD:-build}-variants"

variant() { # NAME CC OPTIONS...
  local dir="$top/$1" cc="$2"
  shift 2
  if ! command -v "$cc" >/dev/null; then
    echo "# skipped: $dir (no $cc)"
    return 0
  fi
  [ -d "$dir" ] || CC="$cc" meson setup "$dir" -Dtests=disabled -Dwerror=true "$@" >/dev/null
  if ninja -C "$dir" >"$dir/build.log" 2>&1; then
    echo "ok $dir $cc $*"
  else
    tail -40 "$dir/build.log"
    echo "not ok $dir $cc $*"
    return 1
  fi
}

status=0
# gcc 12 at -O3 takes for unset what json_unpack sets, and what another variable says is set
variant release gcc --buildtype=release -Dgpu=disabled -Dc_args=-Wno-error=maybe-uninitialized || status=1
variant clang clang --buildtype=debug -Dgpu=disabled || status=1
variant libraries gcc -Dcluster=false -Dgpu=disabled || status=1
exit $status
