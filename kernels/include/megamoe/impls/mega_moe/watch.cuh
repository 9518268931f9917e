// Waiting for other CTAs and other ranks: every wait ends, and says whom it waited for.
//
// A wait that gives up only notes why in shared memory and raises the CTA's flag: little code, since it stands in loops
// that are short of registers (and a call would cost the roles their register budgets). The CTA tells host and peers
// when its roles have ended, which they do at once.
#pragma once
#include "megamoe/impls/mega_moe/shared.cuh"

namespace megamoe::impls {

__device__ __forceinline__ void note_fault(const Context& c, FaultStatus status, u32 phase, u32 whom, u64 seen, u64 expected) {
    c.s.fault = Fault{status, phase, whom, seen, expected};  // the last one to write wins; any of them is true
    __threadfence_block();
    ptx::store_shared_volatile(ptx::smem_address(&c.s.aborted), 1);
}

// The slow part of a wait, every few hundred looks: has someone given up, or is it time to? Looks at one peer's word.
// `grace`: waits for this rank's own work outlive the wait for a peer that holds it up, which can name the peer.
__device__ __forceinline__ bool must_stop(const Context& c, u32 turn, u32 phase, u32 whom, u64 seen, u64 expected, u64 grace) {
    if (c.aborted()) return true;
    const u64 address = c.base() + c.s.at.aborts + turn % c.args.limits.num_ranks * sizeof(u64);
    const u64 word = ptx::load_relaxed_sys(reinterpret_cast<const void*>(address));
    if (word != 0) {
        // a rank's word names whom it waited for; the one that stops because of it hands the name on
        note_fault(c, FaultStatus::aborted, abort_phase(word_value(word)), abort_whom(word_value(word)), word, 0);
        return true;
    }
    if (ptx::global_timer() < c.s.deadline + grace) return false;
    note_fault(c, FaultStatus::timeout, phase, whom, seen, expected);
    return true;
}

constexpr u32 kLooksPerCheck = 256;
constexpr u64 kGraceNs = 1'000'000'000;

// Waits for a counter of this rank. False: the call is lost.
__device__ __forceinline__ bool wait_counter(const Context& c, u64 address, u32 target, Phase phase) {
    for (u32 look = 1;; ++look) {
        const u32 seen = ptx::load_acquire_gpu(reinterpret_cast<const void*>(address));
        if (seen >= target) return true;
        if (look % kLooksPerCheck == 0 &&
            must_stop(c, look / kLooksPerCheck, static_cast<u32>(phase), c.args.rank, seen, target, kGraceNs))
            return false;
    }
}

// Waits for a control word that `whom` stores.
__device__ __forceinline__ bool wait_word(const Context& c, u64 address, u64 expected, Phase phase, u32 whom) {
    for (u32 look = 1;; ++look) {
        const u64 seen = ptx::load_acquire_sys(reinterpret_cast<const void*>(address));
        if (seen == expected) return true;
        if (look % kLooksPerCheck == 0 &&
            must_stop(c, look / kLooksPerCheck, static_cast<u32>(phase), whom, seen, expected, 0))
            return false;
    }
}

// By one thread, when the roles have ended on a fault: leaves the record of the rank's first one, and tells the peers.
__device__ __forceinline__ void report_fault(const Context& c) {
    const Fault fault = c.s.fault;
    const u64 own = c.base() + c.s.at.aborts + c.args.rank * sizeof(u64);
    const u32 reason = fault.status == FaultStatus::shape ? kAbortShape : fault.phase;
    const u64 word = control_word(c.s.generation, abort_value(reason, fault.whom));
    if (ptx::claim_word_gpu(reinterpret_cast<void*>(own), word) != 0) return;
    volatile FaultRecord* record = c.args.record;
    record->rank = c.args.rank;
    record->phase = fault.phase;
    record->whom = fault.whom;
    record->generation = c.s.generation;
    record->seen = fault.seen;
    record->expected = fault.expected;
    const u64 header = c.base() + c.s.at.headers + (static_cast<u64>(c.bank()) * c.args.limits.num_ranks + fault.whom) * kLine;
    for (u32 i = 0; i < 5; ++i)
        record->seen_shape[i] = fault.status == FaultStatus::shape ? __ldcg(&reinterpret_cast<const CountHeader*>(header)->shape[i]) : 0;
    record->own_shape[0] = c.args.shape.hidden;
    record->own_shape[1] = c.args.shape.intermediate;
    record->own_shape[2] = c.args.shape.num_experts;
    record->own_shape[3] = c.args.shape.top_k;
    ptx::fence_sys();
    record->status = static_cast<u32>(fault.status);
    if (fault.status == FaultStatus::aborted) return;
    for (u32 rank = 0; rank < c.args.limits.num_ranks; ++rank)
        if (rank != c.args.rank)
            ptx::store_release_sys(reinterpret_cast<void*>(c.peer(rank) + c.s.at.aborts + c.args.rank * sizeof(u64)), word);
}

// By one thread at the end of a call that is refused on every rank; the workspace goes on.
__device__ __forceinline__ void report_crowd(const Context& c, u32 whom) {
    const u64 at = c.base() + c.s.at.headers + (static_cast<u64>(c.bank()) * c.args.limits.num_ranks + whom) * kLine;
    volatile FaultRecord* record = c.args.record;
    record->rank = c.args.rank;
    record->whom = whom;
    record->seen = __ldcg(&reinterpret_cast<const CountHeader*>(at)->total_tokens);
    record->expected = c.args.limits.max_tokens;
    ptx::fence_sys();
    record->status = static_cast<u32>(FaultStatus::overflow);
}

}  // namespace megamoe::impls
