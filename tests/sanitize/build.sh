#!/bin/sh
# Builds the stress program: build.sh OUTPUT [compiler flags...], for instance
#   build.sh /tmp/stress -fsanitize=thread            build.sh /tmp/weak -fsanitize=thread -DMEGAMOE_WEAKEN=3
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
output=$1
shift
exec "${CXX:-g++}" -std=c++20 -O1 -g -ffp-contract=off -pthread -I "$root/kernels/host" -I "$root/kernels/include" "$@" \
    "$root/tests/sanitize/stress.cpp" "$root/kernels/host/engine.cpp" "$root/kernels/host/tasks.cpp" \
    "$root/kernels/host/pack.cpp" "$root/kernels/host/isa_avx2.cpp" "$root/kernels/host/isa_scalar.cpp" -o "$output"
