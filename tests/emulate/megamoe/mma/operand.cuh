// Operands of a K step: no test multiplies yet.
#pragma once
#include "megamoe/mma/policy.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe::mma {

inline uint64_t swizzled_descriptor(uint32_t address) { return address; }
template <int N>
void pin(float (&)[N]) {}
template <int N>
void issue_unit(float (&)[N / 2], uint64_t, uint64_t) {
    emulated::fail("a product");
}

}  // namespace megamoe::mma
