#!/bin/bash
# Builds every instance that run_product.py names into $DEST.
cd "$(dirname "$0")"
for t in 0 1; do
  ./build.sh product t4_$t -DFP4=1 -DMB=2 -DNB=1 -DSTAGES=4 -DTOKEN=$t
  ./build.sh product w4_$t -DFP4=1 -DMB=1 -DNB=2 -DSTAGES=4 -DTOKEN=$t
  ./build.sh product t8_$t -DFP4=0 -DMB=2 -DNB=1 -DSTAGES=4 -DTOKEN=$t
  ./build.sh product w8_$t -DFP4=0 -DMB=1 -DNB=2 -DSTAGES=4 -DTOKEN=$t
  for k in "8 5" "16 5" "24 5" "32 5" "48 4"; do set -- $k; ./build.sh product r$1_$t -DTOK=$1 -DSTAGES=$2 -DTOKEN=$t; done
done
