// What an MQA logits kernel is told: sizes fixed at compile time, and the arguments of a launch.
#pragma once
#include "megamoe/ptx/memory.cuh"

namespace megamoe::impls {

// kHeads, kHeadDim: of the queries. kQueries: rows of queries in one unit; kGroups: units of queries that a warpgroup
// multiplies with the same keys. kShared: the math warpgroups have own queries and read the same keys; otherwise they
// have the same queries and divide the keys. kTiles: tiles of 64 keys of a warpgroup in a slot of the ring.
// kAccumulators: 2 sums up one unit while the next is multiplied.
template <int kHeads_, int kHeadDim_, int kQueries_, int kGroups_, int kWarpgroups_, bool kShared_, int kTiles_,
          int kAccumulators_, int kStages_, bool kPaged_, bool kFp4_, bool kBf16_>
struct MqaPolicy {
    static constexpr int kHeads = kHeads_, kHeadDim = kHeadDim_, kQueries = kQueries_, kGroups = kGroups_;
    static constexpr int kWarpgroups = kWarpgroups_, kTiles = kTiles_, kAccumulators = kAccumulators_;
    static constexpr int kStages = kStages_;
    static constexpr bool kShared = kShared_, kPaged = kPaged_, kFp4 = kFp4_, kBf16 = kBf16_;
    static constexpr int kN = kHeads * kQueries;                              // columns of a unit
    static constexpr int kUnits = kTiles * kGroups;                           // of a warpgroup in a slot
    static constexpr int kKeys = 64 * kTiles * (kShared ? 1 : kWarpgroups);   // keys of a slot
    static constexpr int kQuerySets = kGroups * (kShared ? kWarpgroups : 1);  // units of queries in a block of rows
    static constexpr int kRows = kQueries * kQuerySets;                       // rows of a block
    static constexpr int kRowBytes = kFp4 ? kHeadDim / 2 : 128;               // of a key in a slot
    static constexpr int kKeyBytes = kKeys * kRowBytes, kScaleBytes = kKeys * 4;
    // Slots that are asked for at a time: of a paged cache as many as have 64 KB there.
    static constexpr int kReadBytes = kKeys * (kHeadDim / (kFp4 ? 2 : 1) + 4);
    static constexpr int kSlotsOf64KB = (65536 + kReadBytes - 1) / kReadBytes;
    static constexpr int kInFlight = kPaged && kSlotsOf64KB < kStages ? kSlotsOf64KB : kStages;
    static constexpr int kQueryBytes = kQuerySets * kN * 128;                 // of a block, E4M3, 128B swizzle
    static constexpr int kThreads = 128 * (kWarpgroups + 1);
    // A block has as many registers as the compiler gives a thread, times its threads; beyond that setmaxnreg hangs.
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kMathRegisters = 224, kOtherRegisters = 56;

    static_assert(kWarpgroups == 2, "other numbers were slower, or had too few registers");
    static_assert(kWarpgroups * kMathRegisters + kOtherRegisters <= (kWarpgroups + 1) * kLaunchRegisters, "registers");
    static_assert(kHeads == 8 || kHeads == 16 || kHeads == 32 || kHeads == 64, "heads fill whole columns of 8");
    static_assert(kHeadDim == 32 || kHeadDim == 64 || kHeadDim == 128, "K steps of 32, rows of at most 128 bytes");
    static_assert(kN <= 256 && kN * kAccumulators <= 256, "accumulators of a thread");
    static_assert(kUnits % kAccumulators == 0, "a slot's units take the accumulators in turn");
    static_assert(!kFp4 || kGroups == 1, "keys in registers are multiplied with one unit of queries");
    static_assert(kKeys <= 256, "a slot is one box of a tensor map");
    static_assert(!kPaged || 256 % kKeys == 0, "slots divide a split of the schedule");
};

struct MqaArgs {
    ptx::TensorMap q;       // E4M3 [rows * heads, head dim]
    ptx::TensorMap keys;    // values [pages, page, head dim]; not paged: one page
    ptx::TensorMap scales;  // not paged: 4 bytes a key [1, keys]
    const uint8_t* q_codes;       // FP4: [rows, heads, head dim / 2]
    const uint32_t* q_exponents;  // FP4: [rows, heads], one byte for 32 of the head dim
    const float* weights;         // [rows, heads]
    const int* starts;            // not paged: first key of a row
    const int* ends;              // not paged: behind the last key of a row; paged: lengths, of a batch or of a row
    const int* block_table;       // paged: [batches, block_table_stride] pages
    const int* schedule;          // paged: [CTAs + 1][2] batch and split of 256 keys where a CTA begins
    uint8_t* out;                 // FP32 or BF16 logits
    const uint8_t* page_scales;   // paged: scales of page 0, 4 bytes a key
    int64_t out_stride, weights_stride;  // elements
    int64_t page_bytes;           // paged: from page to page
    int num_rows;                 // not paged: rows; paged: batches
    int num_keys;                 // paged: as many as a row of the block table has room for
    int num_columns;              // of out
    int next_n;                   // paged: rows of a batch
    int block_table_stride;
    int num_pages;
    int page, page_shift;         // paged: keys of a page, and its logarithm
    int clean;                    // whether columns outside of a row's window become -inf
    int compressed;               // whether column 0 is the row's first key
    int lengths_of_rows;          // paged: whether `ends` has a length for each row
};

}  // namespace megamoe::impls
