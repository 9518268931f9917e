#!/bin/bash
# build.sh SOURCE OUTPUT -D...: cubin with spills and warnings shown
src=$1; out=$2; shift 2
nvcc -std=c++20 -gencode=arch=compute_90a,code=sm_90a -O3 -Xptxas -v -cubin -I"$(dirname "$0")/../../kernels/include" "$@" -o "${DEST:-.}/$out.cubin" "$(dirname "$0")/$src.cu" 2>&1 | grep -v -E '^$|bytes gmem|Compiling|Function prop|Compile time| 0 bytes stack frame, 0 bytes spill st' | sed "s/^/$out: /"
