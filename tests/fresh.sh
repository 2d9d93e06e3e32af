#!/usr/bin/env bash
# Proves that no install step is missing: runs the README's two commands in a bare Debian 12 tree made by
# debootstrap.
#   fresh.sh [DIR]     as root; DIR keeps the tree (default: a temporary one). Uses the mirror that apt is
#                      configured for.
set -euo pipefail
project="$(cd "$(dirname "$0")/.." && pwd)"
tree="${1:-$(mktemp -d)}"
command -v debootstrap >/dev/null || {
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends debootstrap >/dev/null
}
mirror="$(awk '/^deb /{for(i=2;i<=NF;i++)if($i~/^http/){print $i;exit}}' /etc/apt/sources.list 2>/dev/null || true)"
[ -n "$mirror" ] || mirror="$(awk '/^URIs:/{print $2;exit}' /etc/apt/sources.list.d/*.sources)"
[ -x "$tree/bin/bash" ] || debootstrap --variant=minbase --include=ca-certificates bookworm "$tree" "$mirror" >/dev/null
cp -a /etc/apt/. "$tree/etc/apt/"
cp /etc/resolv.conf "$tree/etc/resolv.conf"
mount --bind "$tree" "$tree" # so that / inside is a mount point, which network namespaces need
mount --bind /proc "$tree/proc"
mount --bind /dev "$tree/dev"
mount -t tmpfs tmpfs "$tree/dev/shm" 2>/dev/null || true
mount -t sysfs sysfs "$tree/sys" 2>/dev/null || true
trap 'umount -l "$tree/proc" "$tree/sys" "$tree/dev/shm" "$tree/dev" "$tree" 2>/dev/null || true' EXIT
rm -rf "$tree/tandem"
git clone -q "$project" "$tree/tandem"
in_tree() {
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root http_proxy="${http_proxy:-}" https_proxy="${https_proxy:-}" \
    chroot "$tree" bash -c "cd /tandem && $1"
}
start=$SECONDS
in_tree 'bash deploy/quickstart.sh && build/cli/tandem down --run-dir build/quickstart'
echo "quickstart, first run: $((SECONDS - start)) s" >&2
start=$SECONDS
in_tree 'bash deploy/quickstart.sh && build/cli/tandem down --run-dir build/quickstart'
echo "quickstart, second run: $((SECONDS - start)) s" >&2
start=$SECONDS
in_tree 'bash tests/run.sh'
echo "tests: $((SECONDS - start)) s" >&2
