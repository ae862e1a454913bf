// Products of a few tokens with 4-bit weights (int4.py has their order): out = activation(norm(x) @ W.T + bias) + residual.
//
// Bound by reading weights: a multiprocessor gets about 43 of them a cycle and issues 128 lane instructions, so three
// instructions a weight are all there is. Multiplying in float32 takes more than twice that. Here the matrix unit
// multiplies, and a weight costs a shift and a logical operation for every two: nibbles become mantissas of the numbers
// BASE ... BASE + 15, and what BASE and the zero point add is taken off afterwards, chunk by chunk, with the sum of the
// chunk's tokens.
//
// A warp has 16 rows and 128 elements at a time. Lane (g, t) reads the chunk of 32 weights number t of the rows 2 g and
// 2 g + 1, 16 bytes each, which are rows g and g + 8 of the left operand. The order of the sum is free, so slot (2 t,
// 2 t + 1, 2 t + 8, 2 t + 9) of product (i, j) are the elements 8 i + 4 j ... 8 i + 4 j + 3 of chunk t. Every chunk may
// have a scale of its own, and the unit adds up all four: so the right operand has a column for each chunk of each of
// two tokens, zero everywhere else. Lanes whose column is not theirs read zeros from a place that has nothing else.
//
// Given by the compiler: HALF (float16, else bfloat16), FLOAT_SCALES, FLOAT_OUT, OF_GROUP (chunks under one scale), PAIRS (of
// tokens), GATED (rows of gate and up in turn), ACTIVATION (0 none, 1 silu, 2 gelu, 3 gelu by tanh, 4 relu), WARPS,
// AHEAD (steps of 128 elements that are under way), PDL.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#if HALF
#define BASE 1024.0f
#define PATTERN 0x64006400u
#define TYPES "f16.f16"
#else
#define BASE 128.0f
#define PATTERN 0x43004300u
#define TYPES "bf16.bf16"
#endif
#define TOKENS (2 * PAIRS)
#define THREADS (32 * WARPS)
#define ROWS 16

// Everything that is an instruction of the processor; the twin that tests run without one has its own (ON_HOST).
#ifndef ON_HOST
__device__ __forceinline__ float to_float(u16 bits) {
#if HALF
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
#else
    return __uint_as_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ u16 from_float(float x) {
    u16 y;
#if HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
    return y;
}

// Weights are read once: they need not stay in the nearest cache. Volatile, so that they are asked for before the wait.
__device__ __forceinline__ uint4 streamed(const uint4* at) {
    uint4 y;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                 : "l"(at));
    return y;
}

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void let_next_start() {
#if PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_inputs() {
#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

struct Four {
    u32 part[4];
};

struct Eight {
    float part[8];
};

__device__ __forceinline__ Four codes_at(const uint4* at) {
    const uint4 bits = streamed(at);
    return {{bits.x, bits.y, bits.z, bits.w}};
}

// Elements that stand together, the first at a multiple of 16 bytes.
__device__ __forceinline__ Eight eight_at(const u16* at) {
    const uint4 bits = *(const uint4*)at;
    const u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
    Eight y;
#pragma unroll
    for (int e = 0; e < 8; ++e) y.part[e] = to_float((u16)(pairs[e / 2] >> (16 * (e & 1))));
    return y;
}

#if FLOAT_SCALES
typedef float Scale;
__device__ __forceinline__ float scale_of(Scale s) { return s; }
#else
typedef u16 Scale;
__device__ __forceinline__ float scale_of(Scale s) { return to_float(s); }
#endif

#if FLOAT_OUT
typedef float Result;
__device__ __forceinline__ Result result_of(float x) { return x; }
#else
typedef u16 Result;
__device__ __forceinline__ Result result_of(float x) { return from_float(x); }
#endif

__device__ __forceinline__ float activated(float x) {
#if ACTIVATION == 1
    return x / (1.0f + __expf(-x));
#elif ACTIVATION == 2
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
#elif ACTIVATION == 3
    return x / (1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
#elif ACTIVATION == 4
    return fmaxf(x, 0.0f);
#else
    return x;
#endif
}

__device__ __forceinline__ float block_sum(float x, float* room) {
    for (int far = 16; far; far >>= 1) x += __shfl_xor_sync(~0u, x, far);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = x;
    __syncthreads();
    x = 0.0f;
    for (int w = 0; w < WARPS; ++w) x += room[w];
    return x;
}

// What a step of 128 elements needs: the codes of two rows, and scales and zero points of two chunks of each.
struct Step {
    Four codes[2];
    Scale scales[2][2];
    u32 zeros;  // a byte for each
};

extern "C" __global__ void __launch_bounds__(THREADS) few_tokens_int4(
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
    float* parts = sums + TOKENS * steps * 4;           // [2][WARPS][TOKENS][ROWS], of a tile and of the next

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int tiles = (n + ROWS - 1) / ROWS;
    const int each = (steps + WARPS - 1) / WARPS;       // steps of a warp in every tile: some may have none to do
    const int pair = 2 * (t & 1);                       // the first of the two chunks whose sums this lane gets

    let_next_start();
    // What comes is counted in steps of this warp, tile after tile.
    int coming_tile = blockIdx.x, coming = 0;
    const uint4* from[2];
    const Scale* beside[2];
    const unsigned char* below[2];
    auto turn_to = [&](int tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u64 row = min(tile * ROWS + 2 * g + r, n - 1);
            from[r] = words + row * chunks;
            beside[r] = scales + row * groups;
            below[r] = zeros + row * groups;
        }
    };
    turn_to(coming_tile);
    Step ahead[AHEAD];
    auto ask = [&](Step& s) {
        const int step = warp * each + coming;
        if (coming_tile < tiles && step < steps) {  // the same for all lanes
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
        }
        if (++coming == each) {
            coming = 0;
            coming_tile += gridDim.x;
            turn_to(coming_tile);
        }
    };
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) ask(ahead[s]);
    wait_for_inputs();

    if (threadIdx.x < 16) ((u32*)nothing)[threadIdx.x] = 0u;
    for (int token = 0; token < m; ++token) {
        const u16* given = x + token * x_step;
        float factor = 1.0f;
        if (norm) {
            float squares = 0.0f;
            for (int i = 8 * threadIdx.x; i < k; i += 8 * THREADS) {
                const Eight y = eight_at(given + i);
#pragma unroll
                for (int e = 0; e < 8; ++e) squares += y.part[e] * y.part[e];
            }
            factor = rsqrtf(block_sum(squares, parts) / k + eps);
        }
        for (int i = 8 * threadIdx.x; i < padded; i += 8 * THREADS) {  // four lanes for a chunk, all or none of them
            Eight y = i < k ? eight_at(given + i) : Eight{};
            if (norm && i < k) {
                const Eight weight = eight_at(norm + i);
#pragma unroll
                for (int e = 0; e < 8; ++e) y.part[e] = to_float(from_float(y.part[e] * factor * weight.part[e]));
            }
            float sum = 0.0f;
            u32 bits[4];
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
                sum += y.part[e] + y.part[e + 1];
                bits[e / 2] = (u32)from_float(y.part[e]) | (u32)from_float(y.part[e + 1]) << 16;
            }
            *(uint4*)(shared + token * apart + 2 * i) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
            const u32 together = 0xFu << (lane & 28);
            sum += __shfl_xor_sync(together, sum, 1);
            sum += __shfl_xor_sync(together, sum, 2);
            if (t == 0) sums[token * steps * 4 + (i >> 5)] = sum;
        }
    }
    __syncthreads();

    // Of the columns, chunks 0 to 3 of a token and 0 to 3 of the next, this lane's is number g.
    const bool mine = (g & 3) == t;
    const unsigned char* tokens[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) tokens[p] = mine ? shared + (2 * p + (g >> 2)) * apart + t * 64 : nothing;
    const int along = mine ? 256 : 0;

    float total[PAIRS][2] = {};
    int tile = blockIdx.x, done = 0, turn = 0;
    while (tile < tiles) {
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            const int step = warp * each + done;
            if (tile < tiles && step < steps) {  // the same for all lanes
                const Step now = ahead[s];
                float found[PAIRS][4] = {};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint4 token[PAIRS];
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p) token[p] = *(const uint4*)(tokens[p] + step * along + 16 * i);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const u32 a0 = ((now.codes[0].part[2 * j] >> (4 * i)) & 0x000F000Fu) | PATTERN;
                        const u32 a1 = ((now.codes[1].part[2 * j] >> (4 * i)) & 0x000F000Fu) | PATTERN;
                        const u32 a2 = ((now.codes[0].part[2 * j + 1] >> (4 * i)) & 0x000F000Fu) | PATTERN;
                        const u32 a3 = ((now.codes[1].part[2 * j + 1] >> (4 * i)) & 0x000F000Fu) | PATTERN;
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
                            const float zero = zeros ? (float)(now.zeros >> (16 * r + 8 * c) & 255u) : 8.0f;
                            const float y = found[p][2 * r + c] - (BASE + zero) * sum[c];
                            total[p][r] += y * scale_of(now.scales[r][OF_GROUP == 1 ? c : 0]);
                        }
                    }
                }
            }
            ask(ahead[s]);
            if (++done < each || tile >= tiles) continue;

            // A tile is complete: every warp has a part of its sums.
            float* here = parts + turn * (WARPS * TOKENS * ROWS);
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float y = total[p][r] + __shfl_xor_sync(~0u, total[p][r], 1);
                    if (!(t & 1)) here[(warp * TOKENS + 2 * p + (t >> 1)) * ROWS + 2 * g + r] = y;
                    total[p][r] = 0.0f;
                }
            }
            __syncthreads();
            const int results = GATED ? ROWS / 2 : ROWS;
            for (int i = threadIdx.x; i < m * results; i += THREADS) {
                const int token = i / results, of = i % results;
                const int there = tile * results + of;
                if (there >= (GATED ? n / 2 : n)) continue;
                float y = 0.0f, gate = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float* part = here + (w * TOKENS + token) * ROWS;
                    if (GATED) gate += part[2 * of];
                    y += part[GATED ? 2 * of + 1 : of];
                }
                if (GATED) {
                    y *= activated(gate);
                } else {
                    if (bias) y += to_float(bias[there]);
                    y = activated(y);
                    if (residual) y += to_float(residual[token * residual_step + there]);
                }
                out[token * out_step + there] = result_of(y);
            }
            done = 0;
            turn ^= 1;
            tile += gridDim.x;
        }
    }
}
