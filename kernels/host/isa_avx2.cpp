// The arithmetic in AVX2 with FMA. The pragma gives each function its target; nothing else is built for it.
#if defined(__x86_64__)

#include <immintrin.h>

#include "isa.h"
#include "megamoe/common/codes.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

#include "simd_avx2.h"

namespace megamoe::host::avx2 {
namespace {
#include "tile_body.h"
#include "row_body.h"
}  // namespace
const Isa& get() { return table("avx2"); }
}  // namespace megamoe::host::avx2

#pragma GCC pop_options

namespace megamoe::host {
const Isa& isa_avx2() { return avx2::get(); }
}  // namespace megamoe::host

#endif
