// Tiles in AVX-512 (with VBMI: Ice Lake, Zen 4 and later). Work on single rows stays that of AVX2: it is not what takes time.
#if defined(__x86_64__)

#include <immintrin.h>

#include "isa.h"
#include "megamoe/common/codes.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")

#include "simd_avx512.h"

namespace megamoe::host::avx512 {
namespace {
#include "tile_body.h"
}  // namespace
void put_tiles(Isa& isa) {
    isa.tile[static_cast<u32>(WeightFormat::fp32)] = tile<WeightFormat::fp32>;
    isa.tile[static_cast<u32>(WeightFormat::bf16)] = tile<WeightFormat::bf16>;
    isa.tile[static_cast<u32>(WeightFormat::fp8_block)] = tile<WeightFormat::fp8_block>;
    isa.tile[static_cast<u32>(WeightFormat::mxfp4)] = tile<WeightFormat::mxfp4>;
}
}  // namespace megamoe::host::avx512

#pragma GCC pop_options

namespace megamoe::host {

const Isa& isa_avx512() {
    static const Isa value = [] {
        Isa isa = isa_avx2();
        isa.name = "avx512";
        avx512::put_tiles(isa);
        return isa;
    }();
    return value;
}

}  // namespace megamoe::host

#endif
