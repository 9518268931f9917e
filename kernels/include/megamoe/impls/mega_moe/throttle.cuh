// Tests only: an instance compiled with MEGAMOE_THROTTLE_GBPS lets pulls and scatters of this rank wait by the chip's clock,
// so that both together stay below that rate, as if the link were that slow. There no math warps pull, since whoever moves
// rows asks for the link piece by piece. The normal instances hold none of it.
#pragma once
#include "megamoe/impls/mega_moe/shared.cuh"

namespace megamoe::impls {

#ifdef MEGAMOE_THROTTLE_GBPS
constexpr bool kThrottled = true;
#else
constexpr bool kThrottled = false;
#endif

// When the next `bytes` may start, ns of the chip's clock; 0: at once, and nothing is counted. By one thread.
// The rank's transfers queue up in one word: when the link will be free. Time that it lay idle is no credit, but for
// what several threads claim of it at the same moment.
__device__ __forceinline__ u64 claim_link(const Context& c, u32 bytes) {
#ifdef MEGAMOE_THROTTLE_GBPS
    unsigned long long* free_at = reinterpret_cast<unsigned long long*>(c.base() + c.s.at.exited + 2 * sizeof(u64));
    constexpr u32 kParts = 8;  // of a nanosecond; more would not fit the clock's 61 bits
    const u64 now = ptx::global_timer() * kParts, cost = static_cast<u64>(bytes) * kParts / MEGAMOE_THROTTLE_GBPS;
    const u64 before = atomicAdd(free_at, cost);
    if (before >= now) return before / kParts;
    atomicMax(free_at, now + cost);
#endif
    return 0;
}

// By a converged warp, before it stores `bytes` to a peer.
__device__ __forceinline__ void wait_for_link(const Context& c, u32 bytes) {
#ifdef MEGAMOE_THROTTLE_GBPS
    if (ptx::thread_index() % 32 == 0) {
        const u64 start = claim_link(c, bytes);
        while (ptx::global_timer() < start && !c.aborted()) __nanosleep(20);
    }
    __syncwarp();
#endif
}

}  // namespace megamoe::impls
