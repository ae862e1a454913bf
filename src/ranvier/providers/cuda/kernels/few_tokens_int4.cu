// Few tokens with 4-bit weights (int4.py has their order): out = activation(norm(x) @ W.T + bias) + residual.
//
// A multiprocessor gets about 43 weights a cycle and issues 128 lane instructions, so three instructions a weight are all
// there is. Here a weight costs a shift and a logical operation for every two: nibbles become mantissas of the numbers
// BASE ... BASE + 15, and what BASE and the zero point add is taken off afterwards with the sum of the tokens.
//
// A step is 128 elements. Lane (g, t) reads the chunk of 32 weights number t of its two rows, 16 bytes each. The order of
// the sum is free, so slots (2 t, 2 t + 1, 2 t + 8, 2 t + 9) of product (i, j) are the elements 8 i + 4 j ... 8 i + 4 j + 3
// of chunk t. Tokens lie in that order too.
//
// Where a scale is for whole steps (OF_GROUP 4 and more), the right operand has a column for each of up to eight tokens.
// Else every chunk may have a scale of its own, and the unit adds up all four: then there is a column for each chunk of
// each of two tokens, zero everywhere else.
//
// Given by the compiler beside what few_tokens.h needs: FLOAT_SCALES, HAS_ZEROS, OF_GROUP (chunks under one scale),
// GROUPS (of a row in a piece), HELD (a row is one piece: what a warp needs of the tokens stays in its registers).

#include "few_tokens.h"

#define STEP_BYTES 64
#define STEPS ((DEPTH + STEP_BYTES - 1) / STEP_BYTES)  // of a piece
#define EACH ((STEPS + WARPS - 1) / WARPS)
#define WHOLE (OF_GROUP >= 4)
#define SETS (WHOLE ? 1 : TOKENS / 2)  // right operands

#if HALF
#define BASE 1024.0f
#define PATTERN 0x64006400u
#else
#define BASE 128.0f
#define PATTERN 0x43004300u
#endif

#if FLOAT_SCALES
typedef float Scale;
__device__ __forceinline__ float scale_of(Scale s) { return s; }
#else
typedef u16 Scale;
__device__ __forceinline__ float scale_of(Scale s) { return to_float(s); }
#endif
#define SCALE_ROOM (GROUPS * (int)sizeof(Scale) + (TOGETHER ? 0 : 16))
#define ZERO_ROOM (GROUPS + (TOGETHER ? 0 : 16))
#define STAGE_BYTES ((ROWS * (ROW_ROOM + SCALE_ROOM + HAS_ZEROS * ZERO_ROOM) + 127) & ~127)
#define COLUMNS (WHOLE && TOKENS == 1 ? 1 : 2)  // of which a lane's results count

// The lowest nibbles of both halves as mantissas. One instruction: left to the compiler they are two, and these set the
// pace of the whole.
__device__ __forceinline__ u32 lowest(u32 codes) {
#ifdef ON_HOST
    return (codes & 0x000F000Fu) | PATTERN;
#else
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(codes), "n"(0x000F000F), "r"(PATTERN));
    return y;
#endif
}

// What a step needs of the tokens: operands, and sums of the two columns of which this lane gets results.
struct Token {
    uint4 part[4];
    float sums[2];
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few_tokens_int4(
    const u16* __restrict__ x, const uint4* __restrict__ words, const Scale* __restrict__ scales,
    const unsigned char* __restrict__ zeros, const u16* __restrict__ bias, const u16* __restrict__ residual,
    const u16* __restrict__ norm, Result* __restrict__ out, int m, int n, int k, int chunks, int groups, long long x_step,
    long long residual_step, long long out_step, float eps) {
    SHARED(shared);
    const Ring ring = ring_in(shared, STAGE_BYTES);
    const int steps = (chunks + 3) >> 2;
    const int padded = steps * 128;
    const int apart = padded * 2 + 64;  // bytes from token to token: neighbours in different banks
    unsigned char* tokens = ring.stages + STAGES * ring.stage_bytes;
    float* sums = (float*)(tokens + TOKENS * apart);  // [step][TOKENS][columns of a token]
    const int of_step = TOKENS * (WHOLE ? 1 : 4);
    float* parts = sums + ((steps * of_step + 3) & ~3);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float total[SETS][WHOLE ? 4 : 2] = {};
    Eight gains = {};

    auto copy = [&](unsigned char* stage, int tile, int piece, u64* full) {
        const int bytes = min(DEPTH, 16 * chunks - piece * DEPTH), scaled = min(GROUPS, groups - piece * GROUPS);
        const int rows = TOGETHER ? min(ROWS, n - tile * ROWS) : ROWS;
        if (lane == 0) arrive_expecting(full, rows * (bytes + scaled * ((int)sizeof(Scale) + HAS_ZEROS)));
        __syncwarp();
        const int of = TOGETHER ? 0 : lane % ROWS, count = TOGETHER ? rows : 1;
        const u64 row = min(tile * ROWS + of, n - 1);
        const u64 group = row * groups + piece * GROUPS;
        unsigned char* beside = stage + ROWS * ROW_ROOM;
        if (TOGETHER ? lane == 0 : lane < ROWS)
            bring(stage + of * ROW_ROOM, (const unsigned char*)(words + row * chunks) + piece * DEPTH, count * bytes, full);
        if (TOGETHER ? lane == 0 : lane >= ROWS) {
            bring(beside + of * SCALE_ROOM, scales + group, count * scaled * (int)sizeof(Scale), full);
            if (HAS_ZEROS) bring(beside + ROWS * SCALE_ROOM + of * ZERO_ROOM, zeros + group, count * scaled, full);
        }
    };
    auto ready = [&] {
        if (norm && 8 * threadIdx.x < k) gains = eight_at(norm + 8 * threadIdx.x);
    };
    // Columns are tokens; or chunks 0 to 3 of one and of the next, of which a lane has the one that is its own.
    auto token_at = [&](int set, int step) {
        Token y;
        const int column = WHOLE ? min(g, m - 1) : min(2 * set + (g >> 2), m - 1);
        const bool mine = WHOLE || (g & 3) == t;
        const unsigned char* from = tokens + column * apart + step * 256 + t * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) y.part[i] = mine ? *(const uint4*)(from + 64 * i) : make_uint4(0u, 0u, 0u, 0u);
        const float* sum = sums + step * of_step;
#pragma unroll
        for (int c = 0; c < 2; ++c)
            y.sums[c] = WHOLE ? sum[min(2 * t + c, TOKENS - 1)] : sum[(2 * set + (t >> 1)) * 4 + 2 * (t & 1) + c];
        return y;
    };
    Token held[HELD ? EACH : 1][SETS];
    auto begin = [&] {
        for (int i = 0; i < TOKENS; ++i) {
            if (i >= m) {  // columns nobody asked for, of which results are not written
                for (int s = threadIdx.x; s < steps * (of_step / TOKENS); s += MULTIPLYING)
                    sums[WHOLE ? s * TOKENS + i : (s >> 2) * of_step + 4 * i + (s & 3)] = 0.0f;
                continue;
            }
            bring_token(x + i * x_step, norm, gains, eps, k, padded, parts, [&](int at, const Eight& y) {
                const int step = at >> 7, chunk = (at >> 5) & 3, part = (at >> 3) & 3;
                *(uint4*)(tokens + i * apart + step * 256 + part * 64 + chunk * 16) =
                    make_uint4(pair_of(y.part[0], y.part[1]), pair_of(y.part[2], y.part[3]),
                               pair_of(y.part[4], y.part[5]), pair_of(y.part[6], y.part[7]));
                float sum = 0.0f;
#pragma unroll
                for (int e = 0; e < 8; ++e) sum += y.part[e];
                const u32 together = 0xFFFFu << (lane & 16);
                sum += __shfl_xor_sync(together, sum, 1);
                sum += __shfl_xor_sync(together, sum, 2);
                if (WHOLE) {
                    sum += __shfl_xor_sync(together, sum, 4);
                    sum += __shfl_xor_sync(together, sum, 8);
                    if ((lane & 15) == 0) sums[step * of_step + i] = sum;
                } else if (t == 0) {
                    sums[step * of_step + 4 * i + chunk] = sum;
                }
            });
        }
        if (!HELD) return;
        multiplying_meet();
#pragma unroll
        for (int e = 0; e < (HELD ? EACH : 0); ++e)
#pragma unroll
            for (int s = 0; s < SETS; ++s) held[e][s] = token_at(s, min(warp + e * WARPS, steps - 1));
    };
    auto take = [&](const unsigned char* stage, int piece) {
        const unsigned char* rows = stage + 2 * g * ROW_ROOM + 16 * t;
        const unsigned char* beside = stage + ROWS * ROW_ROOM;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int step = warp + e * WARPS;
            if (!EVEN && (step >= STEPS || piece * STEPS + step >= steps)) break;
            const uint4 first = *(const uint4*)(rows + step * STEP_BYTES);
            const uint4 second = *(const uint4*)(rows + ROW_ROOM + step * STEP_BYTES);
            const u32 codes[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
            Token token[SETS];
            float found[SETS][2][4] = {};
#pragma unroll
            for (int s = 0; s < SETS; ++s) token[s] = HELD ? held[HELD ? e : 0][s] : token_at(s, piece * STEPS + step);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const u32 a0 = lowest(codes[0][2 * j] >> (4 * i));
                    const u32 a1 = lowest(codes[1][2 * j] >> (4 * i));
                    const u32 a2 = lowest(codes[0][2 * j + 1] >> (4 * i));
                    const u32 a3 = lowest(codes[1][2 * j + 1] >> (4 * i));
#pragma unroll
                    for (int s = 0; s < SETS; ++s) {
                        const uint4 of = token[s].part[i];
                        multiply(found[s][j], a0, a1, a2, a3, j ? of.z : of.x, j ? of.w : of.y);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    // past the end of a row tokens are zero, but a scale must be a number
                    const int chunk = 4 * step + (WHOLE ? 0 : 2 * (t & 1) + c);
                    const int group = WHOLE ? chunk / OF_GROUP : min(chunk / OF_GROUP, groups - 1 - piece * GROUPS);
                    const float scale = scale_of(((const Scale*)(beside + (2 * g + r) * SCALE_ROOM))[group]);
                    const float zero =
                        HAS_ZEROS ? (float)beside[ROWS * SCALE_ROOM + (2 * g + r) * ZERO_ROOM + group] : 8.0f;
#pragma unroll
                    for (int s = 0; s < SETS; ++s) {
                        const float y = found[s][0][2 * r + c] + found[s][1][2 * r + c];
                        total[s][WHOLE ? 2 * r + c : r] += (y - (BASE + zero) * token[s].sums[c]) * scale;
                    }
                }
            }
        }
    };
    auto give = [&](float* to) {
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#if WHOLE
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    if (2 * t + c < TOKENS) to[(2 * t + c) * ROWS + 2 * g + r] = total[s][2 * r + c];
                total[s][2 * r] = total[s][2 * r + 1] = 0.0f;
#else
                const float y = total[s][r] + __shfl_xor_sync(~0u, total[s][r], 1);
                if (!(t & 1)) to[(2 * s + (t >> 1)) * ROWS + 2 * g + r] = y;
                total[s][r] = 0.0f;
#endif
            }
        }
    };
    const Around around = {bias, residual, out, m, n, residual_step, out_step};
    walk(ring, (16 * chunks + DEPTH - 1) / DEPTH, parts, around, copy, ready, begin, take, give);
}
