// Thread-block clusters: rank, barrier, and the shared memory of the other blocks; one instruction a wrapper.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

// Rank of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t v;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return v;
}
// Arrives at the cluster's barrier; writes before it are visible to who waits.
__device__ __forceinline__ void cluster_arrive_release() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Waits for every thread of the cluster.
__device__ __forceinline__ void cluster_wait_acquire() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Address of what lies at `p` in this block's shared window, in that of block `rank` of the cluster.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t p, uint32_t rank) {
    uint32_t v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(p), "r"(rank));
    return v;
}
// 4 bytes from the shared memory of a block of the cluster.
__device__ __forceinline__ uint32_t load_cluster_u32(uint32_t p) {
    uint32_t v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
    return v;
}
// 8 bytes to the shared memory of a block of the cluster.
__device__ __forceinline__ void store_cluster_v2(uint32_t p, uint32_t x, uint32_t y) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(p), "r"(x), "r"(y) : "memory");
}

}  // namespace megamoe::ptx
