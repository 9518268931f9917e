// Weight tiles times rows. Included by isa_avx2.cpp and isa_scalar.cpp inside their namespace, after their F8.
// NOTES: the order of additions per output element is the contract of isa.h; every path below keeps it.

inline constexpr u32 step_bytes(WeightFormat format) { return kTileColumns * code_bits(format) / 8; }

// Half of the 64 weights of one k, eight at a time, to `use(vector, weights)`.
template <WeightFormat kFormat, int kHalf, typename Use>
inline __attribute__((always_inline)) void decode_half(const u8* codes, Use use) {
    if constexpr (kFormat == WeightFormat::mxfp4) {
        decode_e2m1_32<kHalf>(codes, use);
    } else if constexpr (kFormat == WeightFormat::fp8_block) {
        for (int i = 0; i < 2; ++i) {
            F8 first, second;
            decode_e4m3_16(codes + 32 * kHalf + 16 * i, first, second);
            use(2 * i, first);
            use(2 * i + 1, second);
        }
    } else if constexpr (kFormat == WeightFormat::bf16) {
        for (int i = 0; i < 4; ++i) use(i, load_bf16(reinterpret_cast<const u16*>(codes) + 32 * kHalf + 8 * i));
    } else {
        for (int i = 0; i < 4; ++i) use(i, load(reinterpret_cast<const float*>(codes) + 32 * kHalf + 8 * i));
    }
}

// 32 columns of one row over one group. Halves, because eight sums, tables and temporaries exceed the registers.
template <WeightFormat kFormat, int kHalf>
inline __attribute__((always_inline)) void one_row_half(const u8* codes, const float* x, F8* total, const F8* scale) {
    F8 part[4];
    for (int i = 0; i < 4; ++i) part[i] = zero();
#pragma GCC unroll 2
    for (u32 k = 0; k < kGroupDepth; ++k) {
        const F8 xk = broadcast(x[k]);
        decode_half<kFormat, kHalf>(codes + k * step_bytes(kFormat), [&](int i, F8 w) { part[i] = fma(w, xk, part[i]); });
    }
    for (int i = 0; i < 4; ++i) total[4 * kHalf + i] = fma(part[i], scale[4 * kHalf + i], total[4 * kHalf + i]);
}

template <WeightFormat kFormat>
inline void decode_scales(const u8* scales, u32 group, F8 (&s)[8]) {
    if constexpr (kFormat == WeightFormat::mxfp4) {
        const u8* codes = scales + group * kTileColumns;
        if (plain_ue8m0_64(codes)) {
            for (int i = 0; i < 8; ++i) s[i] = decode_plain_ue8m0(codes + 8 * i);
        } else {
            for (int i = 0; i < 8; ++i) s[i] = decode_ue8m0(codes + 8 * i);
        }
    } else if constexpr (kFormat == WeightFormat::fp8_block) {
        const F8 scale = broadcast(reinterpret_cast<const float*>(scales)[group / 4]);
        for (int i = 0; i < 8; ++i) s[i] = scale;
    } else {
        for (int i = 0; i < 8; ++i) s[i] = broadcast(1.0f);
    }
}

// One row: decoded weights go straight into the products.
template <WeightFormat kFormat>
void tile_one_row(const TileArguments& a) {
    F8 total[8];
    for (int i = 0; i < 8; ++i) total[i] = zero();
    const u8* codes = a.codes;
    for (u32 group = 0; group < a.num_groups; ++group) {
        const float* x = a.x + group * kGroupDepth;
        F8 scale[8];
        decode_scales<kFormat>(a.scales, group, scale);
        one_row_half<kFormat, 0>(codes, x, total, scale);
        one_row_half<kFormat, 1>(codes, x, total, scale);
        codes += kGroupDepth * step_bytes(kFormat);
    }
    for (int i = 0; i < 8; ++i) store(a.out + 8 * i, total[i]);
}

// kRows rows by 16 columns of one group from the decoded panel.
template <int kRows>
inline void panel_rows(const float* panel, const float* scale, const float* x, u64 x_stride, float* out, u64 out_stride) {
    F8 part[kRows][2];
    for (int r = 0; r < kRows; ++r) part[r][0] = part[r][1] = zero();
    for (u32 k = 0; k < kGroupDepth; ++k) {
        const F8 w0 = load(panel + k * kTileColumns), w1 = load(panel + k * kTileColumns + 8);
        for (int r = 0; r < kRows; ++r) {
            const F8 xk = broadcast(x[r * x_stride + k]);
            part[r][0] = fma(w0, xk, part[r][0]);
            part[r][1] = fma(w1, xk, part[r][1]);
        }
    }
    const F8 s0 = load(scale), s1 = load(scale + 8);
    for (int r = 0; r < kRows; ++r) {
        float* to = out + r * out_stride;
        store(to, fma(part[r][0], s0, load(to)));
        store(to + 8, fma(part[r][1], s1, load(to + 8)));
    }
}

template <int kRows>
inline void panel_block(const float* panel, const float* scale, const float* x, u64 x_stride, float* out, u64 stride) {
    for (u32 column = 0; column < kTileColumns; column += 16) {
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
        for (u32 column = 0; column < kTileColumns; column += 8) store(a.out + row * a.out_stride + column, zero());
    }
    const u32 blocks = ceil_div(a.num_rows, 6);
    const u32 base = a.num_rows / blocks, longer = a.num_rows % blocks;  // blocks of nearly equal height
    const u8* codes = a.codes;
    for (u32 group = 0; group < a.num_groups; ++group) {
        for (u32 k = 0; k < kGroupDepth; ++k, codes += step_bytes(kFormat)) {
            float* to = panel + k * kTileColumns;
            decode_half<kFormat, 0>(codes, [&](int i, F8 w) { store(to + 8 * i, w); });
            decode_half<kFormat, 1>(codes, [&](int i, F8 w) { store(to + 32 + 8 * i, w); });
        }
        F8 s[8];
        decode_scales<kFormat>(a.scales, group, s);
        for (int i = 0; i < 8; ++i) store(scale + 8 * i, s[i]);
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
