// What products of a few tokens have in common (few_tokens_*.cu), all of them bound by reading weights.
//
// A warp has 16 rows at a time and multiplies on the matrix unit (mma.m16n8k16, weights on the left): lane (g, t) brings
// rows 2 g and 2 g + 1, which are rows g and g + 8 of the operand. The warps of a block share the sum over K. Blocks
// stay and take tile after tile of rows; weights of the next steps are under way meanwhile, and before the kernel waits
// for what the one before it computes. Tokens lie in shared memory, normed and padded with zeros.
//
// Given by the compiler: HALF (float16, else bfloat16), FLOAT_OUT, TOKENS (room for so many), GATED (rows of gate and up
// in turn), ACTIVATION (0 none, 1 silu, 2 gelu, 3 gelu by tanh, 4 relu), WARPS, AHEAD (steps that are under way), RESIDENT
// (blocks on a multiprocessor), PDL.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#if HALF
#define TYPES "f16.f16"
#else
#define TYPES "bf16.bf16"
#endif
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

struct Eight {
    float part[8];
};

// Elements that stand together, the first at a multiple of 16 bytes.
__device__ __forceinline__ Eight eight_at(const u16* at) {
    const uint4 bits = *(const uint4*)at;
    const u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
    Eight y;
#pragma unroll
    for (int e = 0; e < 8; ++e) y.part[e] = to_float((u16)(pairs[e / 2] >> (16 * (e & 1))));
    return y;
}

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

// One token into shared memory: ``padded`` elements, normed where there is a norm. ``each`` sees eight of them at a time,
// and where they stand; a warp has all or none of every 32.
template <class Each>
__device__ __forceinline__ void bring_token(const u16* given, const u16* norm, float eps, int k, int padded,
                                            unsigned char* to, float* room, Each each) {
    float factor = 1.0f;
    if (norm) {
        float squares = 0.0f;
        for (int i = 8 * threadIdx.x; i < k; i += 8 * THREADS) {
            const Eight y = eight_at(given + i);
#pragma unroll
            for (int e = 0; e < 8; ++e) squares += y.part[e] * y.part[e];
        }
        factor = rsqrtf(block_sum(squares, room) / k + eps);
    }
    for (int i = 8 * threadIdx.x; i < padded; i += 8 * THREADS) {
        Eight y = i < k ? eight_at(given + i) : Eight{};
        if (norm && i < k) {
            const Eight weight = eight_at(norm + i);
#pragma unroll
            for (int e = 0; e < 8; ++e) y.part[e] = to_float(from_float(y.part[e] * factor * weight.part[e]));
        }
        u32 bits[4];
#pragma unroll
        for (int e = 0; e < 8; e += 2)
            bits[e / 2] = (u32)from_float(y.part[e]) | (u32)from_float(y.part[e + 1]) << 16;
        *(uint4*)(to + 2 * i) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        each(i, y);
    }
}

// Where results go, and what is added to them.
struct Around {
    const u16* bias;
    const u16* residual;
    Result* out;
    int m, n;  // tokens, rows of the weights
    long long residual_step, out_step;
};

// A tile of which every warp has a part [TOKENS][ROWS] of the sums, all written.
__device__ __forceinline__ void finish_tile(const float* parts, int tile, const Around& to) {
    const int results = GATED ? ROWS / 2 : ROWS;
    for (int i = threadIdx.x; i < to.m * results; i += THREADS) {
        const int token = i / results, of = i % results;
        const int there = tile * results + of;
        if (there >= (GATED ? to.n / 2 : to.n)) continue;
        float y = 0.0f, gate = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float* part = parts + (w * TOKENS + token) * ROWS;
            if (GATED) gate += part[2 * of];
            y += part[GATED ? 2 * of + 1 : of];
        }
        if (GATED) {
            y *= activated(gate);
        } else {
            if (to.bias) y += to_float(to.bias[there]);
            y = activated(y);
            if (to.residual) y += to_float(to.residual[token * to.residual_step + there]);
        }
        to.out[token * to.out_step + there] = result_of(y);
    }
}

// The way of a block through its tiles and of every warp through its steps of them. ``turn_to(tile)`` comes before the
// first step of a tile is asked for and ``ask(s, step)`` asks for one; ``begin()`` runs when the first ones are under way
// and tokens are there, ``take(s, step)`` multiplies, ``give(to)`` writes this warp's part [TOKENS][ROWS] of a complete
// tile and starts from zero. ``parts`` are [2][WARPS][TOKENS][ROWS], of a tile and of the next.
template <class Step, class TurnTo, class Ask, class Begin, class Take, class Give>
__device__ __forceinline__ void walk(int steps, float* parts, const Around& to, TurnTo turn_to, Ask ask, Begin begin,
                                     Take take, Give give) {
    const int warp = threadIdx.x >> 5;
    const int tiles = (to.n + ROWS - 1) / ROWS;
    const int each = (steps + WARPS - 1) / WARPS;  // steps of a warp in every tile: some may have none to do

    let_next_start();
    int coming_tile = blockIdx.x, coming = 0;
    turn_to(coming_tile);
    Step ahead[AHEAD];
    auto ask_next = [&](Step& s) {
        const int step = warp * each + coming;
        if (coming_tile < tiles && step < steps) ask(s, step);  // the same for all lanes
        if (++coming == each) {
            coming = 0;
            coming_tile += gridDim.x;
            turn_to(coming_tile);
        }
    };
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) ask_next(ahead[s]);
    wait_for_inputs();
    begin();
    __syncthreads();

    int tile = blockIdx.x, done = 0, turn = 0;
    while (tile < tiles) {
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            const int step = warp * each + done;
            if (tile < tiles && step < steps) take(ahead[s], step);
            ask_next(ahead[s]);
            if (++done < each || tile >= tiles) continue;
            float* here = parts + turn * (WARPS * TOKENS * ROWS);
            give(here + warp * TOKENS * ROWS);
            __syncthreads();
            finish_tile(here, tile, to);
            done = 0;
            turn ^= 1;
            tile += gridDim.x;
        }
    }
}
