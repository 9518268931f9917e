// Work on single rows: activation, quantisation, conversions, sums. Included like tile_body.h.

// e^x: x = n ln 2 + r, a polynomial in r, then 2^n in two steps so that overflow and underflow come out right.
inline F8 exponential(F8 x) {
    const F8 bounded = max2(broadcast(-105.0f), min2(broadcast(105.0f), x));
    const F8 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const F8 n = fma(bounded, broadcast(1.44269504088896341f), magic) - magic;
    F8 r = fma(n, broadcast(-0.693145751953125f), bounded);
    r = fma(n, broadcast(-1.42860682030941723e-6f), r);
    F8 p = broadcast(1.0f / 5040.0f);
    p = fma(p, r, broadcast(1.0f / 720.0f));
    p = fma(p, r, broadcast(1.0f / 120.0f));
    p = fma(p, r, broadcast(1.0f / 24.0f));
    p = fma(p, r, broadcast(1.0f / 6.0f));
    p = fma(p, r, broadcast(0.5f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    const F8 half = fma(n, broadcast(0.5f), magic) - magic;
    return p * power_of_two(half) * power_of_two(n - half);
}

inline F8 one_over_one_plus_exp(F8 minus_x) {
    return broadcast(1.0f) / (broadcast(1.0f) + exponential(minus_x));
}

float amax(const float* values, u32 n) {
    F8 top = zero();
    u32 i = 0;
    for (; i + 8 <= n; i += 8) {
        const F8 m = magnitude(load(values + i));
        top = max2(top, select(m, zero(), is_nan_mask(m)));
    }
    float result = max_of_all(top);
    for (; i < n; ++i) {
        const float m = bits_float(magnitude_bits(values[i]));
        result = m > result ? m : result;
    }
    return result;
}

void activate(const ActivationArguments& a) {
    for (u32 i = 0; i < a.num_columns; i += 8) {
        F8 gate = load(a.gate + i), up = load(a.up + i);
        if (a.has_limit && a.activation != Activation::silu) {
            gate = min2(broadcast(a.limit), gate);
            up = max2(broadcast(-a.limit), min2(broadcast(a.limit), up));
        }
        F8 h;
        if (a.activation == Activation::swiglu_oai) {
            h = gate * one_over_one_plus_exp(gate * broadcast(-a.alpha)) * (up + broadcast(1.0f));
        } else {
            h = gate / (broadcast(1.0f) + exponential(zero() - gate)) * up;
        }
        if (a.use_factor) h = h * broadcast(a.factor);
        store(a.out + i, h);
    }
    if (a.round == ActivationArguments::Round::bf16) {
        for (u32 i = 0; i < a.num_columns; i += 8) {
            u16 codes[8];
            store_bf16(codes, load(a.out + i));
            store(a.out + i, load_bf16(codes));
        }
    } else if (a.round == ActivationArguments::Round::e4m3) {
        const float scale = e4m3_scale(amax(a.out, a.num_columns));
        const F8 inverse = broadcast(1.0f / scale), factor = broadcast(scale);
        for (u32 i = 0; i < a.num_columns; i += 8) {
            store(a.out + i, round_e4m3(load(a.out + i) * inverse) * factor);
        }
    }
}

void quantize_e4m3(const float* values, u32 n, float inverse_scale, u8* codes) {
    const F8 inverse = broadcast(inverse_scale);
    u32 i = 0;
    for (; i + 8 <= n; i += 8) {
        float rounded[8];
        store(rounded, round_e4m3(load(values + i) * inverse));
        for (int j = 0; j < 8; ++j) codes[i + j] = e4m3_encode(rounded[j]);
    }
    for (; i < n; ++i) codes[i] = e4m3_quantize(values[i], inverse_scale);
}

void dequantize_e4m3(const u8* codes, u32 n, float scale, float* values) {
    const F8 factor = broadcast(scale);
    u32 i = 0;
    for (; i + 16 <= n; i += 16) {
        F8 first, second;
        decode_e4m3_16(codes + i, first, second);
        store(values + i, first * factor);
        store(values + i + 8, second * factor);
    }
    for (; i < n; ++i) values[i] = e4m3_decode(codes[i]) * scale;
}

void bf16_to_float(const u16* values, u32 n, float* out) {
    u32 i = 0;
    for (; i + 8 <= n; i += 8) store(out + i, load_bf16(values + i));
    for (; i < n; ++i) out[i] = bf16_decode(values[i]);
}

void float_to_bf16(const float* values, u32 n, u16* out) {
    u32 i = 0;
    for (; i + 8 <= n; i += 8) store_bf16(out + i, load(values + i));
    for (; i < n; ++i) out[i] = bf16_encode(values[i]);
}

void scale_row(const float* values, const float* bias, u32 n, float factor, bool before, float* out) {
    for (u32 i = 0; i < n; i += 8) {  // n is a multiple of 8: rows of a tile
        const F8 v = load(values + i), b = load(bias + i);
        store(out + i, before ? fma(broadcast(factor), b, v) : broadcast(factor) * (v + b));
    }
}

void add_bf16(float* sum, const u16* slot, u32 n) {
    u32 i = 0;
    for (; i + 8 <= n; i += 8) store(sum + i, load(sum + i) + load_bf16(slot + i));
    for (; i < n; ++i) sum[i] += bf16_decode(slot[i]);
}

void add_float(float* sum, const float* slot, u32 n) {
    u32 i = 0;
    for (; i + 8 <= n; i += 8) store(sum + i, load(sum + i) + load(slot + i));
    for (; i < n; ++i) sum[i] += slot[i];
}

const Isa& table(const char* name) {
    static const Isa value{name,
                           {tile<WeightFormat::fp32>, tile<WeightFormat::bf16>, tile<WeightFormat::fp8_block>,
                            tile<WeightFormat::mxfp4>},
                           activate,
                           amax,
                           quantize_e4m3,
                           dequantize_e4m3,
                           bf16_to_float,
                           float_to_bf16,
                           scale_row,
                           add_bf16,
                           add_float};
    return value;
}
