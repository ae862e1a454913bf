// Few tokens with 4-bit weights (int4.py has their order): out = activation(norm(x) @ W.T + bias) + residual.
//
// A multiprocessor gets about 43 weights a cycle and issues 128 lane instructions, so three instructions a weight are all
// there is, and every one of them is time in which the next launch waits. Here four weights are unpacked by one: nibbles
// are bytes where they stand, and integers of 8 bits are what the matrix unit multiplies most of (mma.m16n8k32). Every
// chunk of 32 elements of a token becomes integers of 15 bits under a power of two of its own, which a step of bfloat16 is
// coarser than; each goes as two bytes, upper and lower, and all sums are exact until they are scaled.
//
// A step is 128 elements. Lane (g, t) reads the chunk number t of the rows g and g + 8, 16 bytes each. The order of the sum
// is free, so slots 4 t ... 4 t + 3 and 16 + 4 t ... 16 + 4 t + 3 are nibbles of chunk t: of its words 0 and 1 in one
// product, 2 and 3 in the next. Lower nibbles of bytes have products of their own, and upper ones, which count 16 times as
// much, have theirs.
//
// Where a scale is for whole steps (OF_GROUP 4, 8 ...), so are the powers of two, and the right operand has two columns for
// each of four tokens, upper and lower bytes: lane (g, t) gets the sums of token t. Else every chunk may have a scale of its
// own, and the unit adds up all four: then there are two columns for each chunk of one token, zero for all other chunks, and
// lane (g, t) gets the sums of chunk t.
//
// Given by the compiler beside what few_tokens.h needs: ROW_STEPS (of a row), STEPS (of a piece), FLOAT_SCALES, HAS_ZEROS,
// OF_GROUP (chunks under one scale), GROUPS (of a row in a piece), HELD (what a warp needs of the tokens stays in its
// registers).

#define WHOLE (OF_GROUP % 4 == 0)
#define SHARES (WHOLE ? 1 : 4)
#define SETS (WHOLE ? (TOKENS + 3) / 4 : TOKENS)  // right operands
#define SCALED (WHOLE ? 1 : 4)                    // parts of a step with powers of two of their own

#include "few_tokens.h"

#define STEP_BYTES 1024
#define TOKEN_STEP 256  // bytes of a step of a token
#define EACH ((STEPS + WARPS - 1) / WARPS)
#define EVEN (STEPS % WARPS == 0 && ROW_STEPS % STEPS == 0)  // nobody has less to do: no question before every step

#if FLOAT_SCALES
typedef float Scale;
__device__ __forceinline__ float scale_of(Scale s) { return s; }
#else
typedef u16 Scale;
__device__ __forceinline__ float scale_of(Scale s) { return to_float(s); }
#endif
#define SCALES_AT (STEPS * STEP_BYTES)
#define ZEROS_AT (SCALES_AT + GROUPS * ROWS * (int)sizeof(Scale))
#define STAGE_BYTES ((ZEROS_AT + HAS_ZEROS * GROUPS * ROWS + 127) & ~127)

#define LOWER 0x0F0F0F0Fu
#define UPPER 0xF0F0F0F0u
#define BITS 13            // a chunk's largest element is at least 2^BITS, and less than twice as much
#define LEAST (BITS + 5u)  // exponents below it would not leave room for the scale's

// Of a chunk of a token, or of a step: what its codes' zero point of 8 adds to the sums of both bytes, 16 times, or with zero
// points of their own what each unit of them adds to the whole; and what 1/16 of an integer stands for.
struct __align__(16) Beside {
    int upper, lower;
    float whole, scale;
};

// What a step needs of a set of tokens: operands for lower and upper nibbles, and what is beside the sums that this lane
// gets.
struct Token {
    uint4 low, high;
    Beside beside;
};

// What a warp needs of a piece, for each of its steps and both rows.
struct Codes {
    uint4 row[EACH][2];
    Scale scale[EACH][2];
    unsigned char zero[EACH][2];
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few_tokens_int4(
    const u16* __restrict__ x, const unsigned char* __restrict__ words, const Scale* __restrict__ scales,
    const unsigned char* __restrict__ zeros, const u16* __restrict__ bias, const u16* __restrict__ residual,
    const u16* __restrict__ norm, Result* __restrict__ out, int n, int k, int groups, long long x_step,
    long long residual_step, long long out_step, float eps) {
    SHARED(shared);
    const Ring ring = ring_in(shared, STAGE_BYTES);
    unsigned char* tokens = ring.stages + STAGES * ring.stage_bytes;  // [TOKENS][ROW_STEPS][nibble][chunk][byte][16]
    Beside* beside = (Beside*)(tokens + TOKENS * ROW_STEPS * TOKEN_STEP);  // [TOKENS][ROW_STEPS][SCALED]
    float* parts = (float*)(beside + TOKENS * ROW_STEPS * SCALED);
    float* squares = parts + 2 * WARPS * TOKENS * SHARES * ROWS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float total[SETS][2] = {};
    Eight gains = {};

    auto copy = [&](unsigned char* stage, int tile, int piece, u64* full) {
        const int steps = min(STEPS, ROW_STEPS - piece * STEPS);
        const int first = piece * STEPS * 4 / OF_GROUP, scaled = min(GROUPS, groups - first) * ROWS;
        const u64 group = ((u64)tile * groups + first) * ROWS;
        arrive_expecting(full, steps * STEP_BYTES + scaled * ((int)sizeof(Scale) + HAS_ZEROS));
        bring(stage, words + ((u64)tile * ROW_STEPS + piece * STEPS) * STEP_BYTES, steps * STEP_BYTES, full);
        bring(stage + SCALES_AT, scales + group, scaled * (int)sizeof(Scale), full);
        if (HAS_ZEROS) bring(stage + ZEROS_AT, zeros + group, scaled, full);
    };
    auto ready = [&] {
        if (norm && 8 * threadIdx.x < k) gains = eight_of(*(const uint4*)(norm + 8 * threadIdx.x));
    };
    auto token_at = [&](int set, int step) {
        // columns are upper and lower bytes: of the first token, of the next ..., or of chunks of one of them
        const int read = WHOLE ? min(4 * set + (g >> 1), TOKENS - 1) : set;
        const int found = WHOLE ? min(4 * set + t, TOKENS - 1) : set;
        const bool mine = WHOLE || (g >> 1) == t;
        const unsigned char* from = tokens + (read * ROW_STEPS + step) * TOKEN_STEP + t * 32 + (g & 1) * 16;
        Token y;
        y.low = mine ? *(const uint4*)from : make_uint4(0u, 0u, 0u, 0u);
        y.high = mine ? *(const uint4*)(from + 128) : make_uint4(0u, 0u, 0u, 0u);
        y.beside = beside[(found * ROW_STEPS + step) * SCALED + (WHOLE ? 0 : t)];
        return y;
    };
    Token held[HELD ? PIECES * EACH : 1][SETS];
    auto begin = [&] {
        bring_tokens(x, x_step, norm, gains, k, ROW_STEPS * 128, squares, [&](int i, int at, const Eight& y) {
            const int step = at >> 7, chunk = (at >> 5) & 3, part = (at >> 3) & 3;
            const u32 together = 0xFFFFu << (lane & 16);  // a step is all there
            const int far = WHOLE ? 16 : 4;               // lanes under one power of two
            u32 largest = 0;  // as bits, of which those of what is no number are the largest
#pragma unroll
            for (int e = 0; e < 8; ++e) largest = max(largest, __float_as_uint(y.part[e]) & 0x7FFFFFFFu);
#pragma unroll
            for (int d = 1; d < far; d *= 2) largest = max(largest, __shfl_xor_sync(together, largest, d));
            const u32 exponent = max(largest >> 23, LEAST);
            const float factor = __uint_as_float((254u + BITS - exponent) << 23);
            u32 upper[4] = {}, lower[4] = {};
            int sum = 0;  // of the lower bytes, and in the upper half of the upper ones
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int whole = __float2int_rn(y.part[e] * factor);
                const int low = (signed char)whole, high = (whole - low) >> 8;
                upper[e >> 1] |= (u32)(high & 255) << (16 * (e & 1));
                lower[e >> 1] |= (u32)(low & 255) << (16 * (e & 1));
                sum += high * 65536 + low;
            }
#pragma unroll
            for (int d = 1; d < far; d *= 2) sum += __shfl_xor_sync(together, sum, d);
            // elements 16 further on stand in the bytes between: one of the two threads has all upper ones at the end
            const bool later = part >> 1;
            u32 whole[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 other = __shfl_xor_sync(together, later ? upper[j] : lower[j], 2);
                whole[j] = later ? other | lower[j] << 8 : upper[j] | other << 8;
            }
            *(uint4*)(tokens + (i * ROW_STEPS + step) * TOKEN_STEP + (part & 1) * 128 + chunk * 32 + later * 16) =
                make_uint4(whole[0], whole[1], whole[2], whole[3]);
            if (part || (WHOLE && chunk)) return;
            const int low = (short)sum, high = (sum - low) >> 16;
            const float scale = exponent == 255u ? __uint_as_float(0x7FC00000u)  // no number, and nothing after it
                                                 : __uint_as_float((exponent - BITS - 4u) << 23);
            beside[(i * ROW_STEPS + step) * SCALED + (WHOLE ? 0 : chunk)] = {-128 * high, -128 * low,
                                                                             16.0f * (256 * high + low), scale};
        });
        if (!HELD) return;
        multiplying_meet();
#pragma unroll
        for (int e = 0; e < (HELD ? PIECES * EACH : 0); ++e)
#pragma unroll
            for (int i = 0; i < SETS; ++i)
                held[e][i] = token_at(i, min(e / EACH * STEPS + warp + e % EACH * WARPS, ROW_STEPS - 1));
    };
    auto load = [&](const unsigned char* stage) {
        Codes y;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int step = min(warp + e * WARPS, STEPS - 1);
            const int group = (4 * step + t) / OF_GROUP * ROWS + g;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                y.row[e][r] = *(const uint4*)(stage + step * STEP_BYTES + r * (STEP_BYTES / 2) + 16 * lane);
                y.scale[e][r] = ((const Scale*)(stage + SCALES_AT))[group + 8 * r];
                if (HAS_ZEROS) y.zero[e][r] = (stage + ZEROS_AT)[group + 8 * r];
            }
        }
        return y;
    };
    auto take = [&](const Codes& codes, int piece) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int step = warp + e * WARPS;
            if (!EVEN && (step >= STEPS || piece * STEPS + step >= ROW_STEPS)) break;
            const uint4 first = codes.row[e][0], second = codes.row[e][1];
#pragma unroll
            for (int i = 0; i < SETS; ++i) {
                const Token token = HELD ? held[HELD ? piece * EACH + e : 0][i] : token_at(i, piece * STEPS + step);
                int low[4] = {};
                int high[4] = {};
#pragma unroll
                for (int s = 0; s < 4; ++s) high[s] = HAS_ZEROS ? 0 : s & 1 ? token.beside.lower : token.beside.upper;
                multiply(low, first.x & LOWER, second.x & LOWER, first.y & LOWER, second.y & LOWER, token.low.x,
                         token.low.y);
                multiply(high, first.x & UPPER, second.x & UPPER, first.y & UPPER, second.y & UPPER, token.high.x,
                         token.high.y);
                multiply(low, first.z & LOWER, second.z & LOWER, first.w & LOWER, second.w & LOWER, token.low.z,
                         token.low.w);
                multiply(high, first.z & UPPER, second.z & UPPER, first.w & UPPER, second.w & UPPER, token.high.z,
                         token.high.w);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int upper = 16 * low[2 * r] + high[2 * r], lower = 16 * low[2 * r + 1] + high[2 * r + 1];
                    float y = (float)(256 * upper + lower);
                    if (HAS_ZEROS) y -= (float)codes.zero[e][r] * token.beside.whole;
                    total[i][r] += y * (scale_of(codes.scale[e][r]) * token.beside.scale);
                }
            }
        }
    };
    auto give = [&](float* to) {
#pragma unroll
        for (int i = 0; i < SETS; ++i) {
            const int at = 4 * i + t;  // a token, or a share of one
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (at < TOKENS * SHARES) to[at * ROWS + g + 8 * r] = total[i][r];
                total[i][r] = 0.0f;
            }
        }
    };
    const Around around = {bias, residual, out, n, residual_step, out_step, norm ? 1.0f / k : 0.0f, eps};
    walk(ring, parts, squares, around, copy, ready, begin, load, take, give);
}
