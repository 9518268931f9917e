// Waiting for other CTAs and other ranks: every wait ends, and says whom it waited for.
#pragma once
#include "megamoe/impls/mega_moe/shared.cuh"

namespace megamoe::impls {

enum class FaultStatus : u32 { none = 0, timeout = 1, aborted = 2, shape = 3 };

// Leaves the record of the first failure of this rank, and tells the peers and the CTA.
__device__ __forceinline__ void give_up(const Context& c, FaultStatus status, u32 phase, u32 whom, u64 seen, u64 expected,
                                     const u32* seen_shape = nullptr) {
    const u64 own = c.base + c.s.at.aborts + c.args.rank * sizeof(u64);
    const u32 reason = status == FaultStatus::shape ? kAbortShape : phase;
    const u64 word = control_word(c.s.generation, abort_value(reason, whom));
    if (ptx::claim_word_gpu(reinterpret_cast<void*>(own), word) == 0) {
        volatile FaultRecord* record = c.args.record;
        record->rank = c.args.rank;
        record->phase = phase;
        record->whom = whom;
        record->generation = c.s.generation;
        record->seen = seen;
        record->expected = expected;
        for (u32 i = 0; i < 5; ++i) record->seen_shape[i] = seen_shape ? seen_shape[i] : 0;
        ptx::fence_sys();
        record->status = static_cast<u32>(status);
        if (status != FaultStatus::aborted) {
            for (u32 rank = 0; rank < c.args.limits.num_ranks; ++rank)
                if (rank != c.args.rank)
                    ptx::store_release_sys(reinterpret_cast<void*>(c.peer(rank) + c.s.at.aborts + c.args.rank * sizeof(u64)), word);
        }
    }
    ptx::store_shared_volatile(ptx::smem_address(&c.s.aborted), 1);
}

// The slow part of a wait, every few hundred looks: has someone given up, or is it time to?
// `grace`: waits for this rank's own work outlive the wait for a peer that holds it up, which can name the peer.
__device__ __forceinline__ bool must_stop(const Context& c, u32 phase, u32 whom, u64 seen, u64 expected, u64 grace) {
    if (c.aborted()) return true;
    for (u32 rank = 0; rank < c.args.limits.num_ranks; ++rank) {
        const u64 word = ptx::load_relaxed_sys(reinterpret_cast<void*>(c.base + c.s.at.aborts + rank * sizeof(u64)));
        if (word != 0) {
            // a rank's word names whom it waited for; the one that stops because of it hands the name on
            const u32 value = word_value(word);
            give_up(c, FaultStatus::aborted, abort_phase(value), abort_whom(value), word, 0);
            return true;
        }
    }
    if (ptx::global_timer() < c.s.deadline + grace) return false;
    give_up(c, FaultStatus::timeout, phase, whom, seen, expected);
    return true;
}

constexpr u32 kLooksPerCheck = 256;
constexpr u64 kGraceNs = 1'000'000'000;

// Waits for a counter of this rank; `meanwhile` is called between looks. False: the call is lost.
template <class Meanwhile>
__device__ __forceinline__ bool wait_counter(const Context& c, u64 address, u32 target, Phase phase, Meanwhile&& meanwhile) {
    for (u32 look = 1;; ++look) {
        const u32 seen = ptx::load_acquire_gpu(reinterpret_cast<const void*>(address));
        if (seen >= target) return true;
        meanwhile();
        if (look % kLooksPerCheck == 0 && must_stop(c, static_cast<u32>(phase), c.args.rank, seen, target, kGraceNs)) return false;
    }
}

// Waits for a control word that `whom` stores.
__device__ __forceinline__ bool wait_word(const Context& c, u64 address, u64 expected, Phase phase, u32 whom) {
    for (u32 look = 1;; ++look) {
        const u64 seen = ptx::load_acquire_sys(reinterpret_cast<const void*>(address));
        if (seen == expected) return true;
        if (look % kLooksPerCheck == 0 && must_stop(c, static_cast<u32>(phase), whom, seen, expected, 0)) return false;
    }
}

}  // namespace megamoe::impls
