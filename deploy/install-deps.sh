#!/usr/bin/env bash
# Installs what tandem needs on Debian 12 and is missing. Run as root, or with sudo at hand. Safe to repeat.
#   install-deps.sh          to build and run
#   install-deps.sh --test   also what the tests use
set -euo pipefail

packages=(
  gcc libc6-dev meson ninja-build pkg-config
  libgrpc-dev protobuf-compiler protobuf-c-compiler libprotobuf-c-dev
  libucx-dev librocksdb-dev libzstd-dev zlib1g-dev libjansson-dev libpcre2-dev libutf8proc-dev
  libssl-dev libmicrohttpd-dev libhttp-parser-dev libxxhash-dev
)
if [ "${1:-}" = "--test" ]; then
  packages+=(
    check g++ iproute2 procps python3 python3-venv python3-grpcio python3-protobuf clang libclang-rt-14-dev clang-format
  )
fi

missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f '${Status}\n' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "install-deps: run as root, or install sudo; missing: ${missing[*]}" >&2
    exit 1
  }
  as_root=(sudo)
fi
echo "install-deps: installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
