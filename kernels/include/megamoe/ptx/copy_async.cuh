// Copies from global to shared memory by single threads, 16 bytes each: one instruction a wrapper.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

// Copies `bytes` (0 to 16) and fills the rest of 16 with zeros; `src` is not read where bytes is 0.
__device__ __forceinline__ void copy_async_16(uint32_t dst, const void* src, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
// Waits for all copies of this thread.
__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace megamoe::ptx
