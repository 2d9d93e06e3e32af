#!/bin/bash
# Mooncake Fig. 9: share of blocks found by the size of one pool, in the order of the requests alone. 5,859 blocks are 3 M tokens.
. "$(dirname "$0")/common.sh"
"$TANDEM" bench eviction --trace "$TRACE" --capacity 1000,5859,10000,30000,50000,100000
