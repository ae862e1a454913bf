// Few tokens with 4-bit weights (int4.py has their order): out = activation(norm(x) @ W.T + bias) + residual.
//
// A multiprocessor gets about 43 weights a cycle and issues 128 lane instructions, so three instructions a weight are all
// there is. Here a weight costs a shift and a logical operation for every two: nibbles become mantissas of the numbers
// BASE ... BASE + 15, and what BASE and the zero point add is taken off afterwards, chunk by chunk, with the sum of the
// chunk's tokens.
//
// A step is 128 elements. Lane (g, t) reads the chunk of 32 weights number t of its two rows, 16 bytes each. The order of
// the sum is free, so slots (2 t, 2 t + 1, 2 t + 8, 2 t + 9) of product (i, j) are the elements 8 i + 4 j ... 8 i + 4 j + 3
// of chunk t. Every chunk may have a scale of its own, and the unit adds up all four: so the right operand has a column
// for each chunk of each of two tokens, zero everywhere else. Lanes whose column is not theirs read zeros from a place
// that has nothing else.
//
// Given by the compiler beside what few_tokens.h needs: FLOAT_SCALES, OF_GROUP (chunks under one scale), PAIRS (of
// tokens).

#define TOKENS (2 * PAIRS)
#include "few_tokens.h"

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

struct Four {
    u32 part[4];
};

__device__ __forceinline__ Four codes_at(const uint4* at) {
    const uint4 bits = streamed(at);
    return {{bits.x, bits.y, bits.z, bits.w}};
}

// What a step of 128 elements needs: the codes of two rows, and scales and zero points of two chunks of each.
struct Step {
    Four codes[2];
    Scale scales[2][2];
    u32 zeros;  // a byte for each
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few_tokens_int4(
    const u16* __restrict__ x, const uint4* __restrict__ words, const Scale* __restrict__ scales,
    const unsigned char* __restrict__ zeros, const u16* __restrict__ bias, const u16* __restrict__ residual,
    const u16* __restrict__ norm, Result* __restrict__ out, int m, int n, int k, int chunks, int groups, long long x_step,
    long long residual_step, long long out_step, float eps) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int steps = (chunks + 3) >> 2;
    const int padded = steps * 128;
    const int apart = padded * 2 + 64;                  // bytes from token to token: those of a pair in different banks
    unsigned char* nothing = shared + TOKENS * apart;   // 64 bytes of zeros
    float* sums = (float*)(nothing + 64);               // of the tokens' chunks
    float* parts = sums + TOKENS * steps * 4;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int pair = 2 * (t & 1);  // the first of the two chunks whose sums this lane gets
    // Of the columns, chunks 0 to 3 of a token and 0 to 3 of the next, this lane's is number g.
    const bool mine = (g & 3) == t;
    const unsigned char* tokens[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) tokens[p] = mine ? shared + (2 * p + (g >> 2)) * apart + t * 64 : nothing;
    const int along = mine ? 256 : 0;
    const uint4* from[2];
    const Scale* beside[2];
    const unsigned char* below[2];
    float total[PAIRS][2] = {};

    auto turn_to = [&](int tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u64 row = min(tile * ROWS + 2 * g + r, n - 1);
            from[r] = words + row * chunks;
            beside[r] = scales + row * groups;
            below[r] = zeros + row * groups;
        }
    };
    auto ask = [&](Step& s, int step) {
        // past the end tokens are zero, whatever the codes
        const int chunk = min(4 * step + t, chunks - 1);
        s.codes[0] = codes_at(from[0] + chunk);
        s.codes[1] = codes_at(from[1] + chunk);
        s.zeros = 0u;
#pragma unroll
        for (int c = 0; c < (OF_GROUP == 1 ? 2 : 1); ++c) {
            const int group = min((4 * step + pair + c) / OF_GROUP, groups - 1);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                s.scales[r][c] = __ldg(beside[r] + group);
                if (zeros) s.zeros |= (u32)__ldg(below[r] + group) * (OF_GROUP == 1 ? 1u : 0x0101u) << (16 * r + 8 * c);
            }
        }
    };
    auto begin = [&] {
        if (threadIdx.x < 16) ((u32*)nothing)[threadIdx.x] = 0u;
        for (int i = 0; i < m; ++i)
            bring_token(x + i * x_step, norm, eps, k, padded, shared + i * apart, parts, [&](int at, const Eight& y) {
                float sum = 0.0f;
#pragma unroll
                for (int e = 0; e < 8; ++e) sum += y.part[e];
                const u32 together = 0xFu << (lane & 28);
                sum += __shfl_xor_sync(together, sum, 1);
                sum += __shfl_xor_sync(together, sum, 2);
                if (t == 0) sums[i * steps * 4 + (at >> 5)] = sum;
            });
    };
    auto take = [&](const Step& s, int step) {
        float found[PAIRS][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 token[PAIRS];
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) token[p] = *(const uint4*)(tokens[p] + step * along + 16 * i);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 a0 = ((s.codes[0].part[2 * j] >> (4 * i)) & 0x000F000Fu) | PATTERN;
                const u32 a1 = ((s.codes[1].part[2 * j] >> (4 * i)) & 0x000F000Fu) | PATTERN;
                const u32 a2 = ((s.codes[0].part[2 * j + 1] >> (4 * i)) & 0x000F000Fu) | PATTERN;
                const u32 a3 = ((s.codes[1].part[2 * j + 1] >> (4 * i)) & 0x000F000Fu) | PATTERN;
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    const uint4 of = token[p];
                    multiply(found[p], a0, a1, a2, a3, j ? of.z : of.x, j ? of.w : of.y);
                }
            }
        }
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const float* sum = sums + (2 * p + (t >> 1)) * steps * 4 + 4 * step + pair;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float zero = zeros ? (float)(s.zeros >> (16 * r + 8 * c) & 255u) : 8.0f;
                    const float y = found[p][2 * r + c] - (BASE + zero) * sum[c];
                    total[p][r] += y * scale_of(s.scales[r][OF_GROUP == 1 ? c : 0]);
                }
            }
        }
    };
    auto give = [&](float* to) {
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float y = total[p][r] + __shfl_xor_sync(~0u, total[p][r], 1);
                if (!(t & 1)) to[(2 * p + (t >> 1)) * ROWS + 2 * g + r] = y;
                total[p][r] = 0.0f;
            }
        }
    };
    const Around around = {bias, residual, out, m, n, residual_step, out_step};
    walk<Step>(steps, parts, around, turn_to, ask, begin, take, give);
}
