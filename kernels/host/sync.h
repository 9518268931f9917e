// Memory orders of the protocol, by edge, and atomic access to words of the workspace.
//
// Every edge pairs a release with the acquire named beside it. There is no other ordering in the data path and no
// seq_cst. Building with MEGAMOE_WEAKEN=<edge number> drops that release: the stress test must then fail, which is how
// the table proves that none of its lines is idle.
#pragma once

#include <atomic>

#include "megamoe/common/types.h"

#ifndef MEGAMOE_WEAKEN
#define MEGAMOE_WEAKEN 0
#endif

namespace megamoe::host {

enum class Edge : u32 {
    publish_arrive = 1,  // x and scales of a publish task   -> the last arriver, which publishes for all
    publish = 2,         // x, lists, counts, header         -> every reader of the flag (pulls, schedule)
    pool = 3,            // a pulled row and its meta        -> L1 of the row block
    ring1 = 4,           // L1 has read its input            -> the pull that overwrites the unit's slot
    hidden = 5,          // h of an L1 task                  -> L2 of the row block
    ring2 = 6,           // L2 has read its input            -> the L1 that overwrites the unit's slot
    scatter = 7,         // slots of an L2 task              -> the last finisher of the row block, which tags
    tag = 8,             // slots of the whole row           -> combine on the source rank
};

constexpr std::memory_order release_of(Edge edge) {
    return MEGAMOE_WEAKEN == static_cast<int>(edge) ? std::memory_order_relaxed : std::memory_order_release;
}
constexpr std::memory_order acquire_release_of(Edge edge) {
    return MEGAMOE_WEAKEN == static_cast<int>(edge) ? std::memory_order_acquire : std::memory_order_acq_rel;
}

template <typename Word>
std::atomic_ref<Word> word_at(u64 address) {
    return std::atomic_ref<Word>(*reinterpret_cast<Word*>(address));
}

template <typename T>
T* pointer_at(u64 address) {
    return reinterpret_cast<T*>(address);
}

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace megamoe::host
