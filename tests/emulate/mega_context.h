// The mega-kernel's context on a CPU.
#pragma once
#include "cuda_on_cpu.h"
#include "megamoe/impls/mega_moe/shared.cuh"

namespace megamoe::impls {

constexpr u32 kGeneration = 5;

// Runs body(context) in THREADS threads of a CTA of the rank that `args` name. `beside`: bytes of shared memory behind the state.
template <class Body>
const char* with_context(const MegaMoeArgs* args, u32 seed, Body body, u32 beside = 0) {
    return emulated::run(1, THREADS, sizeof(SharedState) + beside, 0, seed, [&] {
        SharedState& s = *reinterpret_cast<SharedState*>(emulated::block().shared);
        if (emulated::current->index == 0) {
            s.base = args->base;
            s.at = args->at;
            s.generation = kGeneration;
            s.num_chunks = 1;
            s.aborted = s.chunk = s.first_token = 0;
            s.num_tokens = args->num_tokens;
        }
        __syncthreads();
        body(Context{*args, s});
    });
}

}  // namespace megamoe::impls
