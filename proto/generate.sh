#!/bin/sh
# generate.sh PROTOC_C OUT_DIR FILE...: C for messages. In C a text is bytes with a length, since it may
# contain U+0000, which protobuf-c's strings can't. On the wire both are the same; others see strings.
set -e
protoc_c=$1 out=$2
shift 2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
for file in "$@"; do
  sed -E 's/\bstring ([a-z_]+ = [0-9]+;)/bytes \1/' "$file" > "$dir/${file##*/}"
done
cd "$dir"
"$protoc_c" --proto_path=. --c_out="$out" *.proto
