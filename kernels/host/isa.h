// The arithmetic of the engine behind function pointers: one table per instruction set, chosen once at run time.
#pragma once

#include "megamoe/common/types.h"
#include "packed_layout.h"

namespace megamoe::host {

enum class Activation : u32 { silu = 0, swiglu_clamp = 1, swiglu_oai = 2 };

// out[row][0..64) = sum over k of x[row][k] * w[k][column], in this order for every output element, whatever the number of
// rows: within a group of 32 k one after the other from zero, then total = fma(part, scale, total).
struct TileArguments {
    const float* x;
    u64 x_stride;           // floats
    u32 num_rows;
    u32 num_groups;
    const u8* codes;        // of the tile
    const u8* scales;       // mxfp4: 64 codes per group; fp8_block: FP32 per four groups; else unused
    float* out;
    u64 out_stride;         // floats
};

// One row of up to 128 intermediate columns (a multiple of 8).
struct ActivationArguments {
    const float* gate;
    const float* up;
    float* out;
    u32 num_columns;
    Activation activation;
    bool has_limit;
    float limit;
    float alpha;
    float factor;           // routing weight where it is applied before the second product, else 1
    bool use_factor;
    enum class Round : u32 { none, bf16, e4m3 } round;
};

struct Isa {
    const char* name;
    void (*tile[4])(const TileArguments&);  // by WeightFormat
    void (*activate)(const ActivationArguments&);
    // Largest magnitude of n floats, NaN left out.
    float (*amax)(const float* values, u32 n);
    void (*quantize_e4m3)(const float* values, u32 n, float inverse_scale, u8* codes);
    void (*dequantize_e4m3)(const u8* codes, u32 n, float scale, float* values);
    void (*bf16_to_float)(const u16* values, u32 n, float* out);
    void (*float_to_bf16)(const float* values, u32 n, u16* out);
    // out = factor * (values + bias), or values + factor * bias where `before`.
    void (*scale_row)(const float* values, const float* bias, u32 n, float factor, bool before, float* out);
    // sum += slot
    void (*add_bf16)(float* sum, const u16* slot, u32 n);
    void (*add_float)(float* sum, const float* slot, u32 n);
};

const Isa& isa_scalar();
#if defined(__x86_64__)
const Isa& isa_avx2();
const Isa& isa_avx512();
#endif

// The best table that this CPU runs, or the one named ("scalar", "avx2", "avx512"); nullptr if it cannot run.
const Isa* find_isa(const char* name);

}  // namespace megamoe::host
