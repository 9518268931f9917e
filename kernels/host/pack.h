// Canonical weights to the packed layout `cpu` and back, byte for byte.
#pragma once

#include "packed_layout.h"

namespace megamoe::host {

struct PackJob {
    PackedShape shape;
    u32 num_matrices;     // experts
    const u8* codes;      // canonical where packing, packed where unpacking
    const u8* scales;     // MXFP4 only
    u8* out_codes;
    u8* out_scales;
};

void pack(const PackJob& job, u32 num_threads);
void unpack(const PackJob& job, u32 num_threads);

}  // namespace megamoe::host
