// Weight tiles times rows. Included by every isa_*.cpp inside its namespace, after its V: a vector of kLanes floats.
// NOTES: the order of additions per output element is the contract of isa.h; every path below keeps it.

// A chunk is what one decoding function yields of a k: four vectors. More sums, tables and temporaries at once would exceed
// the registers.
inline constexpr u32 kChunkColumns = 4 * kLanes;
inline constexpr u32 kVectors = kTileColumns / kLanes;

inline constexpr u32 step_bytes(WeightFormat format) { return kTileColumns * code_bits(format) / 8; }

// A chunk of the 64 weights of one k to `use(vector, weights)`.
template <WeightFormat kFormat, int kChunk, typename Use>
inline __attribute__((always_inline)) void decode_chunk(const u8* codes, Use use) {
    constexpr u32 first = kChunk * kChunkColumns;
    if constexpr (kFormat == WeightFormat::mxfp4) {
        decode_e2m1_chunk<kChunk>(codes, use);
    } else if constexpr (kFormat == WeightFormat::fp8_block) {
        decode_e4m3_chunk(codes + first, use);
    } else if constexpr (kFormat == WeightFormat::bf16) {
        for (u32 i = 0; i < 4; ++i) use(i, load_bf16(reinterpret_cast<const u16*>(codes) + first + kLanes * i));
    } else {
        for (u32 i = 0; i < 4; ++i) use(i, load(reinterpret_cast<const float*>(codes) + first + kLanes * i));
    }
}

// A chunk of one row over one group, and the chunks after it.
template <WeightFormat kFormat, int kChunk>
inline __attribute__((always_inline)) void one_row_chunks(const u8* codes, const float* x, V* total, const V* scale) {
    V part[4];
    for (int i = 0; i < 4; ++i) part[i] = zero();
#pragma GCC unroll 2
    for (u32 k = 0; k < kGroupDepth; ++k) {
        const V xk = broadcast(x[k]);
        decode_chunk<kFormat, kChunk>(codes + k * step_bytes(kFormat), [&](int i, V w) { part[i] = fma(w, xk, part[i]); });
    }
    for (int i = 0; i < 4; ++i) total[4 * kChunk + i] = fma(part[i], scale[4 * kChunk + i], total[4 * kChunk + i]);
    if constexpr ((kChunk + 1) * kChunkColumns < kTileColumns) one_row_chunks<kFormat, kChunk + 1>(codes, x, total, scale);
}

// All 64 weights of one k to the panel.
template <WeightFormat kFormat, int kChunk>
inline __attribute__((always_inline)) void panel_chunks(const u8* codes, float* to) {
    decode_chunk<kFormat, kChunk>(codes, [&](int i, V w) { store(to + kChunk * kChunkColumns + kLanes * i, w); });
    if constexpr ((kChunk + 1) * kChunkColumns < kTileColumns) panel_chunks<kFormat, kChunk + 1>(codes, to);
}

template <WeightFormat kFormat>
inline void decode_scales(const u8* scales, u32 group, V (&s)[kVectors]) {
    if constexpr (kFormat == WeightFormat::mxfp4) {
        const u8* codes = scales + group * kTileColumns;
        if (plain_ue8m0_64(codes)) {
            for (u32 i = 0; i < kVectors; ++i) s[i] = decode_plain_ue8m0(codes + kLanes * i);
        } else {
            for (u32 i = 0; i < kVectors; ++i) s[i] = decode_ue8m0(codes + kLanes * i);
        }
    } else if constexpr (kFormat == WeightFormat::fp8_block) {
        const V scale = broadcast(reinterpret_cast<const float*>(scales)[group / 4]);
        for (u32 i = 0; i < kVectors; ++i) s[i] = scale;
    } else {
        for (u32 i = 0; i < kVectors; ++i) s[i] = broadcast(1.0f);
    }
}

// One row: decoded weights go straight into the products.
template <WeightFormat kFormat>
void tile_one_row(const TileArguments& a) {
    V total[kVectors];
    for (u32 i = 0; i < kVectors; ++i) total[i] = zero();
    const u8* codes = a.codes;
    for (u32 group = 0; group < a.num_groups; ++group) {
        const float* x = a.x + group * kGroupDepth;
        V scale[kVectors];
        decode_scales<kFormat>(a.scales, group, scale);
        one_row_chunks<kFormat, 0>(codes, x, total, scale);
        codes += kGroupDepth * step_bytes(kFormat);
    }
    for (u32 i = 0; i < kVectors; ++i) store(a.out + kLanes * i, total[i]);
}

// kRows rows by two vectors of columns of one group from the decoded panel.
template <int kRows>
inline void panel_rows(const float* panel, const float* scale, const float* x, u64 x_stride, float* out, u64 out_stride) {
    V part[kRows][2];
    for (int r = 0; r < kRows; ++r) part[r][0] = part[r][1] = zero();
    for (u32 k = 0; k < kGroupDepth; ++k) {
        const V w0 = load(panel + k * kTileColumns), w1 = load(panel + k * kTileColumns + kLanes);
        for (int r = 0; r < kRows; ++r) {
            const V xk = broadcast(x[r * x_stride + k]);
            part[r][0] = fma(w0, xk, part[r][0]);
            part[r][1] = fma(w1, xk, part[r][1]);
        }
    }
    const V s0 = load(scale), s1 = load(scale + kLanes);
    for (int r = 0; r < kRows; ++r) {
        float* to = out + r * out_stride;
        store(to, fma(part[r][0], s0, load(to)));
        store(to + kLanes, fma(part[r][1], s1, load(to + kLanes)));
    }
}

template <int kRows>
inline void panel_block(const float* panel, const float* scale, const float* x, u64 x_stride, float* out, u64 stride) {
    for (u32 column = 0; column < kTileColumns; column += 2 * kLanes) {
        panel_rows<kRows>(panel + column, scale + column, x, x_stride, out + column, stride);
    }
}

// Many rows: a group of the tile is decoded once into a panel that stays in the first-level cache.
template <WeightFormat kFormat>
void tile(const TileArguments& a) {
    if (a.num_rows == 1) return tile_one_row<kFormat>(a);
    alignas(64) float panel[kGroupDepth * kTileColumns];
    alignas(64) float scale[kTileColumns];
    for (u32 row = 0; row < a.num_rows; ++row) {
        for (u32 column = 0; column < kTileColumns; column += kLanes) {
            store(a.out + row * a.out_stride + column, zero());
        }
    }
    const u32 blocks = ceil_div(a.num_rows, 6);
    const u32 base = a.num_rows / blocks, longer = a.num_rows % blocks;  // blocks of nearly equal height
    const u8* codes = a.codes;
    for (u32 group = 0; group < a.num_groups; ++group) {
        for (u32 k = 0; k < kGroupDepth; ++k, codes += step_bytes(kFormat)) {
            panel_chunks<kFormat, 0>(codes, panel + k * kTileColumns);
        }
        V s[kVectors];
        decode_scales<kFormat>(a.scales, group, s);
        for (u32 i = 0; i < kVectors; ++i) store(scale + kLanes * i, s[i]);
        u32 row = 0;
        for (u32 block = 0; block < blocks; ++block) {
            const u32 height = base + (block < longer ? 1 : 0);
            const float* x = a.x + row * a.x_stride + group * kGroupDepth;
            float* out = a.out + row * a.out_stride;
            switch (height) {
                case 1: panel_block<1>(panel, scale, x, a.x_stride, out, a.out_stride); break;
                case 2: panel_block<2>(panel, scale, x, a.x_stride, out, a.out_stride); break;
                case 3: panel_block<3>(panel, scale, x, a.x_stride, out, a.out_stride); break;
                case 4: panel_block<4>(panel, scale, x, a.x_stride, out, a.out_stride); break;
                case 5: panel_block<5>(panel, scale, x, a.x_stride, out, a.out_stride); break;
                default: panel_block<6>(panel, scale, x, a.x_stride, out, a.out_stride); break;
            }
            row += height;
        }
    }
}
