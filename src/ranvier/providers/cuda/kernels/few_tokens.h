// How products of a few tokens go through a multiprocessor (few_tokens_int4.cu), all of them bound by reading weights.
//
// A block has a tile of 16 rows at a time, whose weights are one piece of memory. Warps have roles, and none waits for more
// than it needs:
// - one brings: pieces of a tile go into a ring in shared memory by the copy engine, which holds no registers and no
//   thread, as far ahead as there is room, and before the kernel waits for what the one before it computes: so memory is
//   never idle, neither between tiles nor between launches. Every copy takes the engine about 70 cycles however short it
//   is, so a piece is as few of them as can be;
// - WARPS of them multiply, each some steps of every piece, tokens being in shared memory, normed and padded with zeros;
// - one finishes: adds up what the others have of a tile, and all that rides along.
// Blocks stay and take tile after tile.
//
// Given by the compiler: HALF (float16, else bfloat16), FLOAT_OUT, TOKENS, GATED (rows of gate and up in turn), ACTIVATION
// (0 none, 1 silu, 2 gelu, 3 gelu by tanh, 4 relu), WARPS, STAGES (pieces in the ring), PIECES (of a tile), RESIDENT
// (blocks on a multiprocessor), PDL; and by the kernel SHARES (lanes that have a part of the same sum, 1 or 4).

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

// Elements that stand together.
__device__ __forceinline__ Eight eight_of(const uint4& bits) {
    const u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
    Eight y;
#pragma unroll
    for (int e = 0; e < 8; ++e) y.part[e] = to_float((u16)(pairs[e / 2] >> (16 * (e & 1))));
    return y;
}

#define MULTIPLYING (32 * WARPS)
#define THREADS (MULTIPLYING + 64)
#define ROWS 16
#define BARRIER_BYTES ((8 * (2 * STAGES + 4) + 127) & ~127)

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

// Codes of weights on the left, bytes of tokens on the right, sums of 32 products on top of what there was.
__device__ __forceinline__ void multiply(int (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
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

// All tokens, ``padded`` elements each, times the norm's gains where there is a norm: ``each`` gets eight of one token at a
// time, and where they stand; a warp has all or none of every 128. All of them are asked for before the first is looked at.
// What the norm divides by is applied to results, so nobody waits for it here: ``squares`` [TOKENS][WARPS] gets this warp's
// share of the sums. ``gains`` are the first of this thread.
template <class Each>
__device__ __forceinline__ void bring_tokens(const u16* given, long long step, const u16* norm, const Eight& gains, int k,
                                             int padded, float* squares, Each each) {
    float sums[TOKENS] = {};
    uint4 there[TOKENS];
    auto ask = [&](int at) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i)
            there[i] = at < k ? *(const uint4*)(given + i * step + at) : make_uint4(0u, 0u, 0u, 0u);
    };
    ask(8 * threadIdx.x);
#pragma unroll 1  // what runs once in a launch is fetched from far away: the less there is of it the better
    for (int at = 8 * threadIdx.x; at < padded; at += 8 * MULTIPLYING) {
        Eight now[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) now[i] = eight_of(there[i]);
        if (at + 8 * MULTIPLYING < padded) ask(at + 8 * MULTIPLYING);
        if (norm) {
            const Eight gain = at < 8 * MULTIPLYING || at >= k ? gains : eight_of(*(const uint4*)(norm + at));
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    sums[i] += now[i].part[e] * now[i].part[e];
                    now[i].part[e] *= gain.part[e];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) each(i, at, now[i]);
    }
    if (!norm) return;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        for (int far = 16; far; far >>= 1) sums[i] += __shfl_xor_sync(~0u, sums[i], far);
        if ((threadIdx.x & 31) == 0) squares[i * WARPS + (threadIdx.x >> 5)] = sums[i];
    }
}

// Where results go, and what is added to them.
struct Around {
    const u16* bias;
    const u16* residual;
    Result* out;
    int n;  // rows of the weights
    long long residual_step, out_step;
    float normed, eps;  // one over the length of what is normed, or zero
};

// By one warp: a tile of which each of those that multiply has a part [TOKENS][SHARES][ROWS] of the sums, all written when
// ``there`` says so. Half the lanes add up a half of what there is of a row each.
class Finish {
  public:
    __device__ __forceinline__ Finish(const Around& to, const float* squares) : to_(to), squares_(squares) {}

    __device__ __forceinline__ void operator()(const float* parts, u64* there, int parity, int tile) {
        const int row = threadIdx.x & 15, half = (threadIdx.x >> 4) & 1;
        const int at = GATED ? tile * (ROWS / 2) + row / 2 : tile * ROWS + row;
        const bool mine = !half && (GATED ? !(row & 1) && at < to_.n / 2 : at < to_.n);
        float bias = 0.0f, residual[TOKENS] = {};
        if (!GATED && mine && to_.bias) bias = to_float(to_.bias[at]);
        if (!GATED && mine && to_.residual)
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) residual[i] = to_float(to_.residual[i * to_.residual_step + at]);
        wait(there, parity);
        if (!known_) factors();
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            float y = 0.0f;
#pragma unroll
            for (int j = half; j < WARPS * SHARES; j += 2)
                y += parts[((j / SHARES * TOKENS + i) * SHARES + j % SHARES) * ROWS + row];
            y += __shfl_xor_sync(~0u, y, 16);
            y *= factors_[i];
            if (GATED) {
                const float up = __shfl_xor_sync(~0u, y, 1);
                y = up * activated(y);
            } else {
                y = activated(y + bias) + residual[i];
            }
            if (mine) to_.out[i * to_.out_step + at] = result_of(y);
        }
    }

  private:
    // What norms multiply with: all squares are there when any tile is.
    __device__ __forceinline__ void factors() {
        known_ = true;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            factors_[i] = 1.0f;
            if (!to_.normed) continue;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += squares_[i * WARPS + w];
            factors_[i] = rsqrtf(sum * to_.normed + to_.eps);
        }
    }

    const Around to_;
    const float* squares_;
    float factors_[TOKENS];
    bool known_ = false;
};

// Where things are in shared memory: barriers, then the ring, then what the kernels need, then parts of tiles.
struct Ring {
    u64 *full, *empty, *whole, *taken;
    unsigned char* stages;
    int stage_bytes;
};

__device__ __forceinline__ Ring ring_in(unsigned char* shared, int stage_bytes) {
    u64* barriers = (u64*)shared;
    return {barriers, barriers + STAGES, barriers + 2 * STAGES, barriers + 2 * STAGES + 2,
            shared + BARRIER_BYTES, stage_bytes};
}

// What all warps do. PIECES of every tile go through the ring; ``copy(stage, tile, piece, full)`` is for one lane of the
// warp that brings, and announces its bytes; ``ready()`` runs before inputs are there and ``begin()`` as soon as they
// are; ``load(stage)`` reads this warp's share of a piece, while the one before is multiplied, ``take(loaded, piece)``
// multiplies it, ``give(to)`` writes its part [TOKENS][SHARES][ROWS] of a complete tile and starts from zero. ``parts``
// are [2][WARPS][TOKENS][SHARES][ROWS], of a tile and of the next; ``squares`` [TOKENS][WARPS] what a norm adds up.
template <class Copy, class Ready, class Begin, class Load, class Take, class Give>
__device__ __forceinline__ void walk(const Ring& ring, float* parts, const float* squares, const Around& to, Copy copy,
                                     Ready ready, Begin begin, Load load, Take take, Give give) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int tiles = (to.n + ROWS - 1) / ROWS, of_warp = TOKENS * SHARES * ROWS;
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
        if (lane) return;  // a lane behind the one that brings would wait for phases that are long over
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            for (int piece = 0; piece < PIECES; ++piece, next()) {
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
        Finish finish(to, squares);
        wait_for_inputs();
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, next_part()) {
            finish(parts + turn * (WARPS * of_warp), ring.whole + turn, half, tile);
            __syncwarp();
            if (lane == 0) arrive(ring.taken + turn);
        }
        return;
    }
    auto loaded = [&] {
        wait(ring.full + stage, parity);
        auto found = load(ring.stages + stage * ring.stage_bytes);
        __syncwarp();
        if (lane == 0) arrive(ring.empty + stage);
        next();
        return found;
    };
    ready();
    wait_for_inputs();
    begin();
    multiplying_meet();
    auto piece_there = loaded();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, next_part()) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const auto now = piece_there;
            if (piece + 1 < PIECES || tile + (int)gridDim.x < tiles) piece_there = loaded();
            take(now, piece);
        }
        wait(ring.taken + turn, half ^ 1);
        give(parts + (turn * WARPS + warp) * of_warp);
        __syncwarp();
        if (lane == 0) arrive(ring.whole + turn);
    }
}
