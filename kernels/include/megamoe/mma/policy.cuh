// What fixes a mainloop at compile time: weight format, tile, scale granularity, pipeline depth.
// Promotion interval (128 of K), scale groups and K order are the same in every policy, so that a token's bits depend
// neither on the tile nor on the mainloop.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::mma {

enum class WeightFormat { kFp8, kFp4 };
enum class ScaleGranularity { kToken, kBlock128 };

constexpr int kBlockK = 128;           // one K step: 128 bytes of E4M3 a row, one 128B-swizzle row
constexpr int kSwizzleRowBytes = 128;  // bytes of a row in shared memory

// Scales of a tile are copied from the 16-byte boundary before its first row: up to 3 rows more.
constexpr int kScaleSlack = 4;

// Packed FP4 weights `sm90_ss`: blocks of 128 rows x 128 of K: codes [4][128 rows][16 bytes] (groups of 32 of K), then
// relative exponents [128] uint16, 4 bits a group. Block (row block, k) lies at (row block * num_k_blocks + k).
constexpr int kSsBlockRows = 128, kSsBlockCodeBytes = 128 * 64, kSsBlockBytes = kSsBlockCodeBytes + 128 * 2;

// Packed FP4 weights `sm90_rs`: blocks of 64 rows x 128 of K: codes [2][128 threads][16 bytes], then relative exponents
// [32] of two rows. Block (row block, k) lies at (row block * num_k_blocks + k).
constexpr int kRsBlockRows = 64, kRsBlockCodeBytes = 64 * 64, kRsBlockBytes = kRsBlockCodeBytes + 64 * 2;

// SS: tokens on M, weights on N. Two math warpgroups, each `kMBlocks` x 64 rows, all `kNBlocks` x 128 columns.
// A unit is one 64 x 128 product over one K step; the units of a K step pass through one set of partial sums.
template <WeightFormat kFormat_, ScaleGranularity kGranularity_, int kMBlocks_, int kNBlocks_, int kStages_>
struct SsPolicy {
    static constexpr WeightFormat kFormat = kFormat_;
    static constexpr ScaleGranularity kGranularity = kGranularity_;
    static constexpr int kMBlocks = kMBlocks_, kNBlocks = kNBlocks_, kUnitN = 128, kStages = kStages_;
    static constexpr int kUnits = kMBlocks * kNBlocks;
    static constexpr int kTileM = 2 * 64 * kMBlocks, kTileN = kNBlocks * kUnitN;
    static constexpr bool kDecode = kFormat == WeightFormat::kFp4, kScaled = kGranularity == ScaleGranularity::kBlock128;
    static constexpr int kXBytes = kTileM * kBlockK, kWBytes = kTileN * kBlockK;
    static constexpr int kStageBytes = kXBytes + kWBytes;  // the scales lie behind all stages
    static constexpr int kScaleBytes = kScaled ? (kTileM + kScaleSlack + 31) / 32 * 128 : 0;
    static constexpr int kFeatureScaleSets = 8;  // by tile number; more than kStages + 1 tiles are never open
    static constexpr int kFeatureScaleBytes = kDecode ? kFeatureScaleSets * kTileN * 4 : 0;
    static constexpr int kSmemBytes = kStages * (kStageBytes + kScaleBytes + 16) + kFeatureScaleBytes;
    // Registers a thread of the math, and of the other, warpgroups; see the kernel for the sum.
    static constexpr int kMathRegisters = kDecode ? 200 : 232, kOtherRegisters = kDecode ? 56 : 40;
    static constexpr int kOtherWarpgroups = kDecode ? 2 : 1;
    // Two decoding warpgroups: with one row block they take K steps in turn, with two each takes its row block.
    static constexpr bool kDecodeInTurn = kNBlocks == 1;
    static_assert(kUnits == 2, "one or four units of accumulators do not fit the register budget that was measured");
    static_assert(!kDecode || (kStages + 1 < kFeatureScaleSets && kStages % 2 == 0), "two decoders take turns at slots");
    static_assert(kSmemBytes <= 227 * 1024, "shared memory of one CTA");
};

// When the RS mainloop loads the scales of a K step: while its products run, or behind them, into the registers of the
// weights just multiplied.
enum class ScaleLoad { kEarly, kLate };

// RS: weights on M from registers (64 rows a warpgroup), tokens on N. A ring slot holds `kStepsPerStage` K steps.
template <ScaleGranularity kGranularity_, int kTokens_, int kStages_>
struct RsPolicy {
    static constexpr ScaleGranularity kGranularity = kGranularity_;
    static constexpr int kWarpgroups = 4, kTokens = kTokens_, kStepsPerStage = 2, kStages = kStages_;
    static constexpr int kTileFeatures = kWarpgroups * kRsBlockRows;
    static constexpr bool kScaled = kGranularity == ScaleGranularity::kBlock128;
    static constexpr ScaleLoad kScaleLoad = ScaleLoad::kEarly;
    static constexpr int kXBytes = kTokens * kBlockK, kWBytes = kWarpgroups * kRsBlockBytes;  // a K step
    static constexpr int kScaleBytes = kScaled ? (kTokens + kScaleSlack + 31) / 32 * 128 : 0;  // a K step
    static constexpr int kStageBytes = (kStepsPerStage * (kXBytes + kWBytes + kScaleBytes) + 1023) / 1024 * 1024;
    static constexpr int kSmemBytes = kStages * (kStageBytes + 16);
    static constexpr int kMathRegisters = 112, kOtherRegisters = 32;
    static_assert(kTokens % 8 == 0 && kTokens <= 48, "wider token tiles belong to SS");
    static_assert(kSmemBytes <= 227 * 1024, "shared memory of one CTA");
};

// Position in a ring of kStages slots and the parity of its current round.
template <int kStages>
class PipelineState {
public:
    static constexpr bool kFewRegisters = false;
    __device__ __forceinline__ int stage() const { return stage_; }
    __device__ __forceinline__ uint32_t parity() const { return parity_; }
    __device__ __forceinline__ void advance() {
        if (++stage_ == kStages) {
            stage_ = 0;
            parity_ ^= 1;
        }
    }

private:
    int stage_ = 0;
    uint32_t parity_ = 0;
};
// The same in one register, for a few instructions more.
template <int kStages>
class PackedPipelineState {
public:
    static constexpr bool kFewRegisters = true;
    __device__ __forceinline__ int stage() const { return static_cast<int>(slots_ % kStages); }
    __device__ __forceinline__ uint32_t parity() const { return slots_ / kStages & 1; }
    __device__ __forceinline__ void advance() { ++slots_; }
    __device__ __forceinline__ uint32_t word() const { return slots_; }
    __device__ __forceinline__ void set_word(uint32_t word) { slots_ = word; }

private:
    static_assert((kStages & (kStages - 1)) == 0, "the count of slots may wrap around");
    uint32_t slots_ = 0;
};

}  // namespace megamoe::mma
