#!/usr/bin/env bash
# Compiles, without tests and with warnings as errors, what the suite's own build (gcc, debugoptimized,
# everything) does not show: gcc release without the GPU backend, clang debug, and the libraries alone
# (-Dcluster=false). Checks clang-format, too. Exit status 0: all is well.
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
mapfile -t sources < <(git ls-files '*.c' '*.cc' '*.h' '*.cu' '*.cuh' 2>/dev/null)
if [ ${#sources[@]} -eq 0 ] || ! command -v clang-format >/dev/null; then
  echo "# skipped: clang-format (no git checkout, or no clang-format)"
elif clang-format --dry-run -Werror "${sources[@]}"; then
  echo "ok clang-format ${#sources[@]} files"
else
  echo "not ok clang-format"
  status=1
fi
# gcc 12 at -O3 takes for unset what json_unpack sets, and what another variable says is set
variant release gcc --buildtype=release -Dgpu=disabled -Dc_args=-Wno-error=maybe-uninitialized || status=1
variant clang clang --buildtype=debug -Dgpu=disabled || status=1
variant libraries gcc -Dcluster=false -Dgpu=disabled || status=1
exit $status
