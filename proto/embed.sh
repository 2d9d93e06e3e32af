#!/bin/sh
# embed.sh IN OUT NAME: a file as a C array, static const unsigned char NAME[].
{
  echo "static const unsigned char $3[] = {"
  od -An -v -tu1 "$1" | sed 's/  */,/g; s/^,//; s/$/,/'
  echo "};"
} > "$2"
