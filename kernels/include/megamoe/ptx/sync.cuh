// Ordering between CTAs and between ranks: acquire, release, proxy fences, bulk stores. One instruction a wrapper.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

// Reads of a counter of this GPU, and of a word that a peer may have written.
__device__ __forceinline__ uint32_t load_acquire_gpu(const void* p) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint64_t load_acquire_sys(const void* p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
// Reads that order nothing, but see what others write.
__device__ __forceinline__ uint64_t load_relaxed_sys(const void* p) {
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
// 16 bytes that a peer may have written: by the coherent path, at L2.
__device__ __forceinline__ uint4 load_relaxed_sys_v4(uint64_t address) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint64_t load_relaxed_gpu(const void* p) {
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_relaxed_gpu(void* p, uint64_t v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void store_release_sys(void* p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed_sys(void* p, uint64_t v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint32_t add_relaxed_gpu(void* p, uint32_t v) {
    uint32_t old;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
__device__ __forceinline__ uint64_t add_relaxed_gpu_u64(void* p, uint64_t v) {
    uint64_t old;
    asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
    return old;
}
__device__ __forceinline__ void add_relaxed_gpu_void(void* p, uint32_t v) {
    asm volatile("red.add.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t add_acquire_release_gpu(void* p, uint32_t v) {
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
__device__ __forceinline__ void add_release_gpu(void* p, uint32_t v) {
    asm volatile("red.add.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Returns what was there; stores `v` only over zero.
__device__ __forceinline__ uint64_t claim_word_gpu(void* p, uint64_t v) {
    uint64_t old;
    asm volatile("atom.cas.relaxed.gpu.global.b64 %0, [%1], 0, %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
    return old;
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Orders accesses through the ordinary path and through the asynchronous one (bulk copies, TMA), all state spaces.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// 1-D bulk copy, shared to global, in the thread's open group; 16-byte aligned, `bytes` a multiple of 16.
__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all groups of this thread have read their source.
__device__ __forceinline__ void bulk_wait_read_all() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until all groups of this thread are complete.
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Adds to a word of shared memory, without order; returns what was there.
__device__ __forceinline__ uint32_t add_shared_u32(uint32_t p, uint32_t v) {
    uint32_t old;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(p), "r"(v) : "memory");
    return old;
}
// Shared words that other warps change without a barrier.
__device__ __forceinline__ uint32_t load_shared_volatile(uint32_t p) {
    uint32_t v;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared_volatile(uint32_t p, uint32_t v) {
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory");
}

}  // namespace megamoe::ptx
