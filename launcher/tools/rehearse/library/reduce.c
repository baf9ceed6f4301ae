/* See reduce.h. In 64-bit integers, or in double for floating point: rounded once. */
#include "reduce.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

/* ncclDataType_t */
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };

size_t type_bytes(int type) {
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    int count = sizeof bytes / sizeof *bytes;
    return type >= 0 && type < count ? bytes[type] : 0;
}

static double of_half(uint16_t half) {
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    double value = exponent == 0    ? ldexp(mantissa, -24)
                   : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                    : ldexp(1024 + mantissa, exponent - 25);
    return half & 0x8000 ? -value : value;
}

/* To the nearest, ties to even. */
static uint16_t to_half(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value))
        return 0x7e00;
    value = fabs(value);
    if (value >= 65520)
        return sign | 0x7c00;
    int exponent;
    frexp(value, &exponent); /* value = f * 2^exponent, f in [0.5, 1) */
    int scale = exponent - 11 < -24 ? -24 : exponent - 11;
    unsigned digits = (unsigned)nearbyint(ldexp(value, -scale));
    /* Below 1024: subnormal; a carry to 2048 moves into the exponent by itself. */
    return sign | (uint16_t)(digits + ((unsigned)(scale + 24) << 10));
}

static double of_bfloat(uint16_t high) {
    uint32_t bits = (uint32_t)high << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bfloat(double value) {
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    if (isnan(single))
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define COMBINE(total, value) \
    (operation == PRODUCT   ? (total) * (value) \
     : operation == MAXIMUM ? ((value) > (total) ? (value) : (total)) \
     : operation == MINIMUM ? ((value) < (total) ? (value) : (total)) \
                            : (total) + (value))

/* Elements of TYPE, added up in WIDE. */
#define REDUCE(TYPE, WIDE, LOAD, STORE) \
    for (size_t i = 0; i < count; i++) { \
        WIDE total = 0; \
        for (int rank = 0; rank < size; rank++) { \
            TYPE element; \
            memcpy(&element, inputs[rank] + i * sizeof element, sizeof element); \
            WIDE value = LOAD(element); \
            total = rank ? COMBINE(total, value) : value; \
        } \
        TYPE stored = (TYPE)STORE(operation == AVERAGE ? total / (WIDE)size : total); \
        memcpy(out + i * sizeof stored, &stored, sizeof stored); \
    } \
    return true

bool reduce(int type, int operation, int size, const char *const *inputs, char *out, size_t count) {
    if (operation < SUM || operation > AVERAGE)
        return false;
    switch (type) {
    case INT8: REDUCE(int8_t, int64_t, , );
    case UINT8: REDUCE(uint8_t, uint64_t, , );
    case INT32: REDUCE(int32_t, int64_t, , );
    case UINT32: REDUCE(uint32_t, uint64_t, , );
    case INT64: REDUCE(int64_t, int64_t, , );
    case UINT64: REDUCE(uint64_t, uint64_t, , );
    case FLOAT16: REDUCE(uint16_t, double, of_half, to_half);
    case FLOAT32: REDUCE(float, double, , );
    case FLOAT64: REDUCE(double, double, , );
    case BFLOAT16: REDUCE(uint16_t, double, of_bfloat, to_bfloat);
    default: return false; /* fp8 */
    }
}
