/* The passes of codecs over their values, fused. See [Note: kernels] in kernels.py.

Each function computes the same bits as the plain form in codec.py. Products of a code and a scale
are exact there, and the compiler may not contract or reorder anything else. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { INT8, INT4, BFLOAT16 };

/* A run of values that are encoded: where it begins in the memory that holds the values, and in the
tile, where zeros pad it to `padded` values. */
typedef struct {
    int64_t at, slot, numel, padded;
} run_t;

#define INFINITE 0x7F800000u
#define BFLOAT16_NAN 0x7FC0
#define BFLOAT16_LARGEST 0x1.FEp+127f

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The bits of the largest magnitude. Those of infinity and NaN are larger than any number's. */
static uint32_t largest(const float *restrict gradient, const float *restrict residual, int64_t numel)
{
    uint32_t found = 0;
    for (int64_t i = 0; i < numel; i++) {
        uint32_t bits = bits_of(gradient[i] + residual[i]) & 0x7FFFFFFFu;
        found = bits > found ? bits : found;
    }
    return found;
}

static int is_zero(const float *values, int64_t numel)
{
    int found = 0;
    for (int64_t i = 0; i < numel; i++)
        found |= values[i] != 0;
    return !found;
}

/* Round a scale up to fewer bits, and limit it to the valid range. */
static inline float rounded_up(float scale, uint32_t dropped, float largest_scale)
{
    float rounded = from_bits((bits_of(scale) + dropped) & ~dropped);
    rounded = rounded < largest_scale ? rounded : largest_scale;
    return rounded > 1e-36f ? rounded : 0;
}

static float scale_of(int kind, uint32_t magnitude)
{
    if (kind == INT8)
        return rounded_up(from_bits(magnitude) / 127, 0xFF, 0x1.0204p+121f);
    return rounded_up(from_bits(magnitude) / 7, 0xFFFF, 0x1.24p+125f);
}

static inline int code_of(float value, float scale, float inverse, float *rest)
{
    float code = rintf(value * inverse);
    *rest = value - code * scale;
    return (int)code;
}

static void encode_bfloat16(const float *restrict gradient, float *restrict residual,
                            uint16_t *restrict codes, int64_t numel)
{
    for (int64_t i = 0; i < numel; i++) {
        float value = gradient[i] + residual[i];
        float clamped = value > BFLOAT16_LARGEST ? BFLOAT16_LARGEST : value;
        clamped = clamped < -BFLOAT16_LARGEST ? -BFLOAT16_LARGEST : clamped;
        uint32_t bits = bits_of(clamped);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFFu; /* to nearest even */
        residual[i] = value - from_bits(rounded);
        codes[i] = rounded >> 16;
    }
}

/* Encode the block of the tile that begins at `slot`. Only its first `numel` values are not zeros. */
static void encode_block(int kind, const float *restrict gradient, float *restrict residual,
                         uint8_t *message, int64_t slot, int64_t numel, int64_t block, int64_t tile)
{
    if (kind == BFLOAT16) {
        uint16_t *codes = (uint16_t *)message + slot;
        encode_bfloat16(gradient, residual, codes, numel);
        memset(codes + numel, 0, (block - numel) * sizeof *codes);
        return;
    }
    float scale = scale_of(kind, largest(gradient, residual, numel));
    float inverse = scale > 0 ? 1 / scale : 0;
    if (kind == INT8) {
        int8_t *restrict codes = (int8_t *)message + tile / block * 4 + slot;
        ((float *)message)[slot / block] = scale;
        for (int64_t i = 0; i < numel; i++)
            codes[i] = code_of(gradient[i] + residual[i], scale, inverse, residual + i);
        memset(codes + numel, 0, block - numel);
        return;
    }
    int8_t *restrict codes = (int8_t *)message + tile / block * 2;
    ((uint16_t *)message)[slot / block] = bits_of(scale) >> 16;
    if (slot < tile / 2) {
        codes += slot;
        for (int64_t i = 0; i < numel; i++)
            codes[i] = code_of(gradient[i] + residual[i], scale, inverse, residual + i);
        memset(codes + numel, 0, block - numel);
    } else {
        codes += slot - tile / 2;
        for (int64_t i = 0; i < numel; i++)
            codes[i] += 16 * code_of(gradient[i] + residual[i], scale, inverse, residual + i);
    }
}

static void fill_with_nan(int kind, uint8_t *message, int64_t block, int64_t tile)
{
    if (kind == INT8)
        for (int64_t i = 0; i < tile / block; i++)
            ((float *)message)[i] = NAN;
    else
        for (int64_t i = 0; i < (kind == INT4 ? tile / block : tile); i++)
            ((uint16_t *)message)[i] = BFLOAT16_NAN;
}

/* Encode values plus their residual, and write the rounding error to the residual.

kind, block: the codec; tile: the number of values in the tile; keeps_unused: whether runs that are
all zeros are sent as zeros, and keep their residual. */
void encode(int kind, const float *values, float *residual, uint8_t *message, const run_t *runs,
            int64_t count, int64_t block, int64_t tile, int keeps_unused)
{
    for (int64_t k = 0; k < count; k++)
        if (largest(values + runs[k].at, residual + runs[k].slot, runs[k].numel) >= INFINITE) {
            fill_with_nan(kind, message, block, tile);
            return;
        }
    for (int64_t k = 0; k < count; k++) {
        run_t run = runs[k];
        int is_unused = keeps_unused && is_zero(values + run.at, run.numel);
        for (int64_t i = 0; i < run.padded; i += block) {
            int64_t numel = is_unused || i >= run.numel ? 0 : least(block, run.numel - i);
            encode_block(kind, values + run.at + i, residual + run.slot + i, message, run.slot + i,
                         numel, least(block, run.padded - i), tile);
        }
    }
}

static inline float sum_of(float present, float decoded, int adds, float divisor)
{
    float sum = adds ? present + decoded : decoded;
    return divisor == 1 ? sum : sum / divisor;
}

/* Decode the first `numel` values of the block that begins at `slot`. */
static void decode_block(int kind, float *restrict out, const uint8_t *message, int64_t slot,
                         int64_t numel, int64_t block, int64_t tile, int adds, float divisor)
{
    const uint16_t *halves = (const uint16_t *)message;
    if (kind == BFLOAT16) {
        for (int64_t i = 0; i < numel; i++)
            out[i] = sum_of(out[i], from_bits((uint32_t)halves[slot + i] << 16), adds, divisor);
        return;
    }
    if (kind == INT8) {
        const int8_t *restrict codes = (const int8_t *)message + tile / block * 4 + slot;
        float scale = ((const float *)message)[slot / block];
        for (int64_t i = 0; i < numel; i++)
            out[i] = sum_of(out[i], codes[i] * scale, adds, divisor);
        return;
    }
    const int8_t *restrict codes = (const int8_t *)message + tile / block * 2;
    float scale = from_bits((uint32_t)halves[slot / block] << 16);
    if (slot < tile / 2) {
        codes += slot; /* low codes are -7..7, and high ones are in units of 16 */
        for (int64_t i = 0; i < numel; i++)
            out[i] = sum_of(out[i], (((codes[i] + 8) & 15) - 8) * scale, adds, divisor);
    } else {
        codes += slot - tile / 2;
        for (int64_t i = 0; i < numel; i++)
            out[i] = sum_of(out[i], ((codes[i] + 8) >> 4) * scale, adds, divisor);
    }
}

/* Decode a message to `out`, or add it to the values there if `adds`. Then divide by `divisor`. */
void decode(int kind, float *out, const uint8_t *message, const run_t *runs, int64_t count,
            int64_t block, int64_t tile, int adds, float divisor)
{
    for (int64_t k = 0; k < count; k++)
        for (int64_t i = 0; i < runs[k].numel; i += block)
            decode_block(kind, out + runs[k].at + i, message, runs[k].slot + i,
                         least(block, runs[k].numel - i), block, tile, adds, divisor);
}

/* Zigzag encode integers, and divide them into four planes: all bytes of equal significance
together. */
void to_planes(const int32_t *restrict values, uint8_t *restrict planes, int64_t numel)
{
    for (int64_t i = 0; i < numel; i++) {
        uint32_t zigzag = ((uint32_t)values[i] << 1) ^ (uint32_t)(values[i] >> 31);
        planes[i] = zigzag;
        planes[numel + i] = zigzag >> 8;
        planes[2 * numel + i] = zigzag >> 16;
        planes[3 * numel + i] = zigzag >> 24;
    }
}

/* Add the integers in four planes to `values`, wrapping around. */
void add_planes(const uint8_t *restrict planes, uint32_t *restrict values, int64_t numel)
{
    for (int64_t i = 0; i < numel; i++) {
        uint32_t zigzag = planes[i] | (uint32_t)planes[numel + i] << 8
            | (uint32_t)planes[2 * numel + i] << 16 | (uint32_t)planes[3 * numel + i] << 24;
        values[i] += (zigzag >> 1) ^ (0 - (zigzag & 1));
    }
}
