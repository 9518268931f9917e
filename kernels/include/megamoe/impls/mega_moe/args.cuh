// Arguments of the mega-kernel, one block passed by value; the host builds the same bytes.
#pragma once
#include "megamoe/layout/offsets.h"
#include "megamoe/ptx/memory.cuh"

namespace megamoe::impls {

// Scales of x: one a token, or one a token and 128 columns of hidden. A kernel is compiled for one of them: the first's K
// loops of linear 1 have nothing to multiply.
#ifdef MEGAMOE_BLOCK128
constexpr bool kBlockScales = true;
#else
constexpr bool kBlockScales = false;
#endif

// Tasks that expand a panel of weights to E4M3; 0 where the main loop reads packed ones (expanded.cuh is compiled with MEGAMOE_EXPAND).
#ifdef MEGAMOE_EXPAND
constexpr u32 kExpandParts = MEGAMOE_EXPAND;
#else
constexpr u32 kExpandParts = 0;
#endif

// Whether a warp of its own moves the rows of pulls; else the scheduler's does between its tickets.
constexpr bool kHasPuller = kExpandParts != 0;

// What a rank that gave up leaves in host memory; `status` is stored last.
struct FaultRecord {
    u32 status;  // 0: none, 1: timeout, 2: stopped because a peer gave up, 3: layers differ, 4: too many tokens
    u32 rank, phase, whom, generation;
    u32 seen_shape[5], own_shape[4];
    u64 seen, expected;
};
static_assert(sizeof(FaultRecord) == 72, "the host's bytes of the record");

// What a role did from when to when, for the instance compiled with MEGAMOE_TRACE: nanoseconds of the chip's clock.
enum class TraceRole : u32 { math = 0, rows = 1, scheduler = 2, pull = 3, cycles = 4 };
struct TraceEvent {
    TraceRole role;
    u32 phase, expert, row_block, index, generation;
    u64 start, end;
};
static_assert(sizeof(TraceEvent) == 40, "the host's bytes of an event");
constexpr u32 kTraceEvents = 1024;  // of a CTA; later ones are counted and dropped
constexpr u32 kTraceSums = 8;       // sums of cycles, the last of them

struct MegaMoeArgs {
    ptx::TensorMap ring1, ring2;      // E4M3 rows of L1 and L2 input in this rank's workspace
    const u64* bases;                 // [num_ranks] workspace of every rank, as mapped here
    FaultRecord* record;              // host memory, mapped
    float* stash;                     // [CTAs][kStashFloats], of this device alone (prefill)
    u8* panels;                       // [panel_slots] expanded weights of a column block, of this device alone (expanded)
    const void* x;                    // BF16 [num_tokens, hidden]; null: E4M3 and scales are in the workspace already
    const void* ids;                  // [num_tokens, top_k]
    const float* weights;             // [num_tokens, top_k]
    u16* out;                         // BF16 [num_tokens, hidden]
    const u8* w13;                    // packed `sm90_moe`, gate and up interleaved
    const u8* w2;
    const float* w13_scale;           // [local experts, rows of w13 in whole blocks], in the order of w13's rows
    const float* w2_scale;            // [local experts, rows of w2 in whole blocks]
    const float* b13;                 // as w13_scale, or null
    const float* b2;                  // as w2_scale, or null
    u32* received;                    // [local experts], rows are added; or null
    TraceEvent* trace;                // [CTAs][kTraceEvents]; read by an instance that is compiled with MEGAMOE_TRACE
    u64 timeout_ns, shape_hash;
    u64 base;                         // bases[rank]: known without a load
    Offsets at;                       // 28 words of 8 bytes
    WorkspaceLimits limits;           // 6 words
    LayerShape shape;                 // 9 words
    TileShape tile;                   // 11 words
    u32 rank, num_local_experts, num_tokens, id_bytes;
    u32 formats;                      // for the message on a mismatch
    // h = g / (1 + 2^(steepness g)) (u + shift), g and u clamped to the limit (infinity: not)
    float limit, steepness, shift;
    u32 weight_before;
    u32 refused;                      // tokens that this rank wanted to bring and does not: above the bound; 0: none
    u32 panel_slots, panels_ahead;    // how many panels are kept, and how far ahead they are expanded
    u32 refuses;                      // whether this rank fails a call to which a rank wanted to bring more than the bound
};

}  // namespace megamoe::impls
