// The arithmetic without vector instructions, and the choice between the tables.
#include <cstring>

#include "isa.h"
#include "simd_scalar.h"

namespace megamoe::host::scalar {
namespace {
#include "tile_body.h"
#include "row_body.h"
}  // namespace
const Isa& get() { return table("scalar"); }
}  // namespace megamoe::host::scalar

namespace megamoe::host {

const Isa& isa_scalar() { return scalar::get(); }

const Isa* find_isa(const char* name) {
#if defined(__x86_64__)
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vbmi");
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2 && has_avx512 && (name[0] == '\0' || std::strcmp(name, "avx512") == 0)) return &isa_avx512();
    if (has_avx2 && (name[0] == '\0' || std::strcmp(name, "avx2") == 0)) return &isa_avx2();
#endif
    if (name[0] == '\0' || std::strcmp(name, "scalar") == 0) return &isa_scalar();
    return nullptr;
}

}  // namespace megamoe::host
