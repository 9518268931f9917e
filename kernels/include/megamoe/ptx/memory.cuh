// Global and shared memory accesses, bulk and tensor copies: one instruction a wrapper.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

// The 128-byte tensor descriptor of a TMA copy, as the driver encodes it.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// 1-D bulk copy, global to shared, completing on a barrier; 16-byte aligned, `bytes` a multiple of 16.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
// Asks for `bytes` (a multiple of 16) from a 16-byte aligned address to come into L2.
__device__ __forceinline__ void prefetch_l2(const void* src, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}
// 2-D tensor copy, global to shared, completing on a barrier.
__device__ __forceinline__ void tensor_load_2d(uint32_t dst, const TensorMap* map, uint32_t bar, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y)
        : "memory");
}
// 3-D tensor copy, global to shared, completing on a barrier.
__device__ __forceinline__ void tensor_load_3d(uint32_t dst, const TensorMap* map, uint32_t bar, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// A cache policy for copies of what is read once: such lines leave L2 first.
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t v;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(v));
    return v;
}
// 3-D tensor copy under a cache policy, global to shared, completing on a barrier.
__device__ __forceinline__ void tensor_load_3d(uint32_t dst, const TensorMap* map, uint32_t bar, int x, int y, int z,
                                               uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}
// Asks for a tensor descriptor to come into the cache that copies read it from.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// 5-D tensor copy with the three middle coordinates zero, global to shared, completing on a barrier.
__device__ __forceinline__ void tensor_load_5d(uint32_t dst, const TensorMap* map, uint32_t bar, int x, int w) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %5, %5, %5, %4}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(w), "r"(0)
        : "memory");
}
// 16 bytes that are read once: no L1 line. Not `.nc`: stays behind an earlier fence.
__device__ __forceinline__ uint4 load_global_v4_no_allocate(const void* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
// 2 bytes that are read once: no L1 line.
__device__ __forceinline__ uint32_t load_global_u16_no_allocate(const void* p) {
    uint16_t v;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
// 16 bytes from shared memory.
__device__ __forceinline__ uint4 load_shared_v4(uint32_t p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));
    return v;
}
// 8 bytes from shared memory.
__device__ __forceinline__ uint2 load_shared_v2(uint32_t p) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p));
    return v;
}
// 4 bytes from shared memory.
__device__ __forceinline__ float load_shared_f32(uint32_t p) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(p));
    return v;
}
// 4 bytes from shared memory.
__device__ __forceinline__ uint32_t load_shared_u32(uint32_t p) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p));
    return v;
}
// 4 bytes to shared memory.
__device__ __forceinline__ void store_shared_f32(uint32_t p, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(p), "f"(x) : "memory");
}
// 4 bytes to shared memory.
__device__ __forceinline__ void store_shared_u32(uint32_t p, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(x) : "memory");
}
// 8 bytes to shared memory.
__device__ __forceinline__ void store_shared_v2(uint32_t p, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(p), "r"(x), "r"(y) : "memory");
}
// 16 bytes to shared memory.
__device__ __forceinline__ void store_shared_v4(uint32_t p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// 4 bytes to global memory.
__device__ __forceinline__ void store_global_u32(void* p, uint32_t x) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
// 2 bytes to global memory.
__device__ __forceinline__ void store_global_u16(void* p, uint16_t x) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(x) : "memory");
}
// 4 bytes to global memory.
__device__ __forceinline__ void store_global_f32(void* p, float x) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
// 16 bytes to global memory.
__device__ __forceinline__ void store_global_v4(void* p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// Two FP32 to packed BF16, round to nearest even; `lo` in the low half.
__device__ __forceinline__ uint32_t pack_bf16x2(float lo, float hi) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
// The chip's nanosecond clock (coarse).
__device__ __forceinline__ uint64_t global_timer() {
    uint64_t v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}
// The SM's cycle counter.
__device__ __forceinline__ uint64_t cycle_counter() {
    uint64_t v;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(v));
    return v;
}

}  // namespace megamoe::ptx
