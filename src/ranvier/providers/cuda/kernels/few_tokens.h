// What products of a few tokens have in common (few_tokens_*.cu), all of them bound by reading weights.
//
// A block has a tile of 16 rows at a time and multiplies on the matrix unit (mma.m16n8k16, weights on the left): lane
// (g, t) of a warp brings rows 2 g and 2 g + 1, which are rows g and g + 8 of the operand. Warps have roles, and none
// waits for more than it needs:
// - one brings: pieces of DEPTH bytes of the tile's rows go into a ring in shared memory by the copy engine, which holds
//   no registers and no thread, as far ahead as there is room, and before the kernel waits for what the one before it
//   computes: so memory is never idle, neither between tiles nor between launches. Every copy takes the engine about 70
//   cycles however short it is, so rows that follow each other go together if there is room for all of them
//   (TOGETHER: a piece is the whole tile);
// - WARPS of them multiply, each some steps of every piece, tokens being in shared memory, normed and padded with zeros;
// - one finishes: adds up what the others have of a tile, and all that rides along.
// Blocks stay and take tile after tile.
//
// Given by the compiler: HALF (float16, else bfloat16), FLOAT_OUT, TOKENS (room for so many), GATED (rows of gate and up
// in turn), ACTIVATION (0 none, 1 silu, 2 gelu, 3 gelu by tanh, 4 relu), WARPS, STAGES (pieces in the ring), DEPTH,
// TOGETHER, RESIDENT (blocks on a multiprocessor), PDL.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

// Everything that is an instruction of the processor; the twin that tests run without one has its own (ON_HOST).
#ifndef ON_HOST
#define SHARED(name) extern __shared__ __align__(128) unsigned char name[]

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

__device__ __forceinline__ u32 place_of(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

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

#if HALF
#define TYPES "f16.f16"
#else
#define TYPES "bf16.bf16"
#endif
#define MULTIPLYING (32 * WARPS)
#define THREADS (MULTIPLYING + 64)
#define ROWS 16
#define ROW_ROOM (TOGETHER ? DEPTH : DEPTH + 32)  // of a row in the ring: apart, neighbours are in different banks

// Warps have as many steps each: no question before every step, between which the compiler moves nothing.
#define EVEN (TOGETHER && STEPS % WARPS == 0)

#ifndef ON_HOST
// Barriers on which a phase ends when so many threads have arrived and all bytes that were announced are there.
__device__ __forceinline__ void barrier_begin(u64* at, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place_of(at)), "r"(count) : "memory");
}

__device__ __forceinline__ void barriers_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(u64* at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place_of(at)) : "memory");
}

__device__ __forceinline__ void arrive_expecting(u64* at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place_of(at)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u64* at, int parity) {
    asm volatile(
        "{\n.reg .pred over;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra AGAIN;\n}" ::"r"(place_of(at)),
        "r"(parity)
        : "memory");
}

// Bytes that are read once: they need not stay in the cache that all share either.
__device__ __forceinline__ void bring(void* to, const void* from, int bytes, u64* when) {
    u64 once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            place_of(to)),
        "l"(from), "r"(bytes), "r"(place_of(when)), "l"(once)
        : "memory");
}

__device__ __forceinline__ void multiplying_meet() { asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory"); }

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

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

// Over the warps that multiply.
__device__ __forceinline__ float sum_of_all(float x, float* room) {
    for (int far = 16; far; far >>= 1) x += __shfl_xor_sync(~0u, x, far);
    multiplying_meet();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = x;
    multiplying_meet();
    x = 0.0f;
    for (int w = 0; w < WARPS; ++w) x += room[w];
    return x;
}

// One token, normed where there is a norm, ``padded`` elements: ``each`` gets eight of them at a time, and where they
// stand; a warp has all or none of every 32. ``gains`` are the norm's first of this thread.
template <class Each>
__device__ __forceinline__ void bring_token(const u16* given, const u16* norm, const Eight& gains, float eps, int k,
                                            int padded, float* room, Each each) {
    float factor = 1.0f;
    if (norm) {
        float squares = 0.0f;
        for (int i = 8 * threadIdx.x; i < k; i += 8 * MULTIPLYING) {
            const Eight y = eight_at(given + i);
#pragma unroll
            for (int e = 0; e < 8; ++e) squares += y.part[e] * y.part[e];
        }
        factor = rsqrtf(sum_of_all(squares, room) / k + eps);
    }
    for (int i = 8 * threadIdx.x; i < padded; i += 8 * MULTIPLYING) {
        Eight y = i < k ? eight_at(given + i) : Eight{};
        if (norm && i < k) {
            const Eight gain = i < 8 * MULTIPLYING ? gains : eight_at(norm + i);
#pragma unroll
            for (int e = 0; e < 8; ++e) y.part[e] = to_float(from_float(y.part[e] * factor * gain.part[e]));
        }
        each(i, y);
    }
}

__device__ __forceinline__ u32 pair_of(float low, float high) {
    return (u32)from_float(low) | (u32)from_float(high) << 16;
}

// Where results go, and what is added to them.
struct Around {
    const u16* bias;
    const u16* residual;
    Result* out;
    int m, n;  // tokens, rows of the weights
    long long residual_step, out_step;
};

// By one warp: a tile of which each of those that multiply has a part [TOKENS][ROWS] of the sums, all written when
// ``there`` says so.
__device__ __forceinline__ void finish_tile(const float* parts, u64* there, int parity, int tile, const Around& to) {
    const int results = GATED ? ROWS / 2 : ROWS;
    bool waited = false;
    for (int i = threadIdx.x & 31; i < to.m * results; i += 32) {
        const int token = i / results, of = i % results;
        const int at = tile * results + of;
        if (at >= (GATED ? to.n / 2 : to.n)) continue;
        float bias = 0.0f, residual = 0.0f;
        if (!GATED && to.bias) bias = to_float(to.bias[at]);
        if (!GATED && to.residual) residual = to_float(to.residual[token * to.residual_step + at]);
        if (!waited) wait(there, parity);
        waited = true;
        float y = 0.0f, gate = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float* part = parts + (w * TOKENS + token) * ROWS;
            if (GATED) gate += part[2 * of];
            y += part[GATED ? 2 * of + 1 : of];
        }
        y = GATED ? y * activated(gate) : activated(y + bias) + residual;
        to.out[token * to.out_step + at] = result_of(y);
    }
}

// Where things are in shared memory: barriers, then the ring, then what the kernels need, then parts of tiles.
struct Ring {
    u64 *full, *empty, *whole, *taken;
    unsigned char* stages;
    int stage_bytes;
};

__device__ __forceinline__ Ring ring_in(unsigned char* shared, int stage_bytes) {
    u64* barriers = (u64*)shared;
    return {barriers, barriers + STAGES, barriers + 2 * STAGES, barriers + 2 * STAGES + 2, shared + 256, stage_bytes};
}

// What all warps do. ``pieces`` of every tile go through the ring; ``copy(stage, tile, piece, full)`` is for all lanes of
// the warp that brings, and announces its bytes; ``ready()`` runs before inputs are there and ``begin()`` as soon as they
// are, ``take(stage, piece)`` multiplies this warp's share, ``give(to)`` writes its part [TOKENS][ROWS] of a complete tile
// and starts from zero. ``parts`` are [2][WARPS][TOKENS][ROWS], of a tile and of the next.
template <class Copy, class Ready, class Begin, class Take, class Give>
__device__ __forceinline__ void walk(const Ring& ring, int pieces, float* parts, const Around& to, Copy copy, Ready ready,
                                     Begin begin, Take take, Give give) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int tiles = (to.n + ROWS - 1) / ROWS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_begin(ring.full + s, 1);
            barrier_begin(ring.empty + s, WARPS);
        }
        for (int s = 0; s < 2; ++s) {
            barrier_begin(ring.whole + s, WARPS);
            barrier_begin(ring.taken + s, 1);
        }
        barriers_begun();
    }
    __syncthreads();

    int stage = 0, parity = 0;  // of the ring
    auto next = [&] {
        if (++stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    };
    if (warp == WARPS) {
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            for (int piece = 0; piece < pieces; ++piece, next()) {
                wait(ring.empty + stage, parity ^ 1);
                copy(ring.stages + stage * ring.stage_bytes, tile, piece, ring.full + stage);
            }
        }
        let_next_start();  // its weights come behind these, not among them
        return;
    }
    int turn = 0, half = 0;  // which of the two parts, and how often both were used
    auto next_part = [&] {
        half ^= turn;
        turn ^= 1;
    };
    if (warp > WARPS) {
        wait_for_inputs();
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, next_part()) {
            finish_tile(parts + turn * (WARPS * TOKENS * ROWS), ring.whole + turn, half, tile, to);
            __syncwarp();
            if (lane == 0) arrive(ring.taken + turn);
        }
        return;
    }
    ready();
    wait_for_inputs();
    begin();
    multiplying_meet();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, next_part()) {
        for (int piece = 0; piece < pieces; ++piece, next()) {
            wait(ring.full + stage, parity);
            take(ring.stages + stage * ring.stage_bytes, piece);
            __syncwarp();
            if (lane == 0) arrive(ring.empty + stage);
        }
        wait(ring.taken + turn, half ^ 1);
        give(parts + (turn * WARPS + warp) * (TOKENS * ROWS));
        __syncwarp();
        if (lane == 0) arrive(ring.whole + turn);
    }
}
