// Words of the control region: what ranks tell each other, and how a word proves that it belongs to this call.
#pragma once

#include "megamoe/common/types.h"

namespace megamoe {

// A control word is {generation 32, value 32}: one 64-bit store with release, compared for equality by the reader.
MEGAMOE_HOST_DEVICE constexpr u64 control_word(u32 generation, u32 value) {
    return (static_cast<u64>(generation) << 32) | value;
}
MEGAMOE_HOST_DEVICE constexpr u32 word_generation(u64 word) { return static_cast<u32>(word >> 32); }
MEGAMOE_HOST_DEVICE constexpr u32 word_value(u64 word) { return static_cast<u32>(word); }

inline constexpr u32 kFirstGeneration = 1;  // zeroed memory holds no valid word
inline constexpr u32 kPublished = 1;        // value of a count flag
inline constexpr u32 kSlotReady = 1;        // value of a slot's tag

// What one source publishes to one owner about each of its experts, and beside it for all of them. The flag is stored last,
// with release.
struct alignas(8) ExpertCount {
    u32 rows;   // of the source for the expert
    u32 first;  // entry of the source's list where they begin
};
static_assert(sizeof(ExpertCount) == 8, "ExpertCount is one 64-bit word");

struct CountHeader {
    u64 flag;           // control word
    u64 shape_hash;     // of the layer; both sides must agree
    u32 num_tokens;     // of the source in this generation
    u32 total_tokens;   // of the source in the whole call (all chunks)
    u32 num_chunks;     // generations that the source wants for its call
    u32 num_bad_ids;    // ids >= num_experts that the source met (treated as no expert)
    u32 shape[5];       // hidden, intermediate, num_experts, top_k, formats: for the message on a mismatch
};
static_assert(sizeof(CountHeader) <= 64, "CountHeader has a line of its own");

// One entry of a source's list: where the result goes, and with which weight.
struct ListEntry {
    u32 slot;  // token * top_k + k
    float weight;
};
static_assert(sizeof(ListEntry) == 8, "ListEntry is one 64-bit word");

// What the owner remembers of a row between its pull and its scatter.
struct RowMeta {
    u32 source;
    u32 slot;
    float weight;
    u32 unused;
};
static_assert(sizeof(RowMeta) == 16, "RowMeta is one 128-bit word");

// Value of an abort word: never 0, names whom the first rank to give up waited for and in which phase. Ranks that
// disagree about the layer, or that were interrupted by a signal, say so in place of the phase.
inline constexpr u32 kAbortShape = 0x40;
inline constexpr u32 kAbortInterrupt = 0x41;
MEGAMOE_HOST_DEVICE constexpr u32 abort_value(u32 phase, u32 whom) { return 0x80000000u | (phase << 16) | whom; }
MEGAMOE_HOST_DEVICE constexpr u32 abort_phase(u32 value) { return (value >> 16) & 0xffu; }
MEGAMOE_HOST_DEVICE constexpr u32 abort_whom(u32 value) { return value & 0xffffu; }

}  // namespace megamoe
