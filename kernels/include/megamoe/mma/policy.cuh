// What fixes a mainloop at compile time: weight format, tile, promotion, scale granularity, pipeline depth.
#pragma once
#include <cstdint>

namespace megamoe::mma {

enum class WeightFormat { kFp8, kFp4 };
enum class ScaleGranularity { kToken, kBlock128 };

constexpr int kBlockK = 128;           // one K step: 128 bytes of E4M3 a row, one 128B-swizzle row
constexpr int kSwizzleRowBytes = 128;  // bytes of a row in shared memory

// Packed FP4 weights `sm90_rs`: blocks of 64 rows x 128 of K: codes [2][128 threads][16 bytes], then relative exponents
// [32] of two rows. Block (row block, k) lies at (row block * num_k_blocks + k).
constexpr int kRsBlockCodeBytes = 64 * 64, kRsBlockBytes = kRsBlockCodeBytes + 64 * 2;

// SS: tokens on M, weights on N. Two math warpgroups, each `kMBlocks` x 64 rows, all `kNBlocks` x kUnitN columns.
// A unit is one 64 x kUnitN product over one K step; it is promoted into FP32 when it is done, so the promotion
// interval is 128 of K for every tile.
template <WeightFormat kFormat_, ScaleGranularity kGranularity_, int kMBlocks_, int kNBlocks_, int kUnitN_,
          int kPartials_, int kStages_, bool kXInRegisters_ = false,
          int kDecodersPerStep_ = 1, int kHandoff_ = -1>
struct SsPolicy {
    static constexpr WeightFormat kFormat = kFormat_;
    static constexpr ScaleGranularity kGranularity = kGranularity_;
    static constexpr int kMBlocks = kMBlocks_, kNBlocks = kNBlocks_, kUnitN = kUnitN_;
    static constexpr int kPartials = kPartials_, kStages = kStages_;
    static constexpr bool kXInRegisters = kXInRegisters_;  // read X once a K step, not once a unit
    static constexpr int kDecodersPerStep = kDecodersPerStep_;  // of two decoding warpgroups: 1 in turns, 2 both
    static constexpr int kHandoff = kHandoff_;  // -1: no turns
    static constexpr int kUnits = kMBlocks * kNBlocks;
    static constexpr int kTileM = 2 * 64 * kMBlocks;
    static constexpr int kTileN = kNBlocks * kUnitN;
    static constexpr int kXBytes = kTileM * kBlockK;
    static constexpr int kWBytes = kTileN * kBlockK;
    static constexpr int kScaleBytes = kTileM * 4;
    static constexpr int kStageBytes = kXBytes + kWBytes;  // scales lie behind all stages
    static constexpr int kSmemBytes = kStages * (kStageBytes + kScaleBytes) + 1024;
    static_assert(kPartials == 1 || kUnits % kPartials == 0, "units of a K step are dealt to the partials in turn");
};

// RS: weights on M from registers (64 rows a warpgroup, `kWarpgroups` of them), tokens on N; promoted every K step.
// A ring slot holds `kStepsPerStage` K steps.
template <ScaleGranularity kGranularity_, int kWarpgroups_, int kTokens_, int kStepsPerStage_, int kStages_>
struct RsPolicy {
    static constexpr ScaleGranularity kGranularity = kGranularity_;
    static constexpr int kWarpgroups = kWarpgroups_, kTokens = kTokens_;
    static constexpr int kStepsPerStage = kStepsPerStage_, kStages = kStages_;
    static constexpr int kXBytes = kTokens * kBlockK;           // a K step
    static constexpr int kScaleBytes = (kTokens * 4 + 127) / 128 * 128;  // a K step
    static constexpr int kWBytes = kWarpgroups * kRsBlockBytes;  // a K step
    static constexpr int kStageXBytes = kStepsPerStage * kXBytes;
    static constexpr int kStageBytes =
        (kStepsPerStage * (kXBytes + kWBytes + kScaleBytes) + 1023) / 1024 * 1024;  // X, W, scales
    static constexpr int kSmemBytes = kStages * kStageBytes;
    static_assert(kTokens % 8 == 0);
};

// Position in a ring of kStages slots and the parity of its current round.
template <int kStages>
struct PipelineState {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace megamoe::mma
