// Attention of one new token for each sequence over a cache, whose splits are joined inside of the launch.
//
// The blocks of a cluster share the context of one key head and read each other's shared memory: what splits found is put
// together there, without a second launch and without a way through memory. A warp is a split of its own: it brings 32 keys
// and values at a time, a step ahead, a lane has a token while scores are made and some elements of the head while values
// are added up, and no warp waits for another before the end. All query heads of the key head are done together.
//
// Keys and values of earlier tokens, which nothing in front of this launch writes, are asked for before it waits (EARLY).
// The new token is turned by its position here; the last block writes it into the cache and starts from it.
//
// Given by the compiler beside what halves.h needs: DIM (64 or 128), GROUP (query heads of a key head), WARPS, CLUSTER (a
// power of two), ROTARY (elements that are turned), INTERLEAVED, FLOAT_ANGLES, EARLY.

#include "halves.h"

#define THREADS (32 * WARPS)
#define TILE 32                       // tokens of a warp at a time
#define KEY_ROOM (DIM + 8)            // elements of a key: lanes that read theirs in different banks
#define WIDE (DIM / 32)               // elements of the head of a lane
#define NOTHING -1e30f                // a score that adds nothing, without the arithmetic of infinities
#define WARP_BYTES (4 * TILE * (KEY_ROOM + DIM) + 4 * TILE * GROUP)

#if FLOAT_ANGLES
typedef float Angle;
__device__ __forceinline__ float angle_of(Angle a) { return a; }
#else
typedef u16 Angle;
__device__ __forceinline__ float angle_of(Angle a) { return to_float(a); }
#endif

#ifndef ON_HOST
__device__ __forceinline__ void bring_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place_of(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void all_asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_but_last() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

__device__ __forceinline__ void cluster_meets() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What stands at the same place in another block of the cluster.
__device__ __forceinline__ float of_block(const float* here, int rank) {
    u32 there;
    float y;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place_of(here)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(y) : "r"(there) : "memory");
    return y;
}
#endif

__device__ __forceinline__ float most_of_warp(float x) {
    for (int far = 16; far; far >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, far));
    return x;
}

__device__ __forceinline__ float sum_of_warp(float x) {
    for (int far = 16; far; far >>= 1) x += __shfl_xor_sync(~0u, x, far);
    return x;
}

// Element d of a head, turned with its partner.
__device__ __forceinline__ float turned(const u16* head, int d, const Angle* cos, const Angle* sin) {
    const float x = to_float(head[d]);
    if (d >= ROTARY) return x;
    const int half = ROTARY / 2;
    const int other = INTERLEAVED ? d ^ 1 : d < half ? d + half : d - half, angle = INTERLEAVED ? d / 2 : d % half;
    const bool first = INTERLEAVED ? d % 2 == 0 : d < half;
    const float s = angle_of(sin[angle]);
    return x * angle_of(cos[angle]) + to_float(head[other]) * (first ? -s : s);
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) cluster_attention(
    const u16* __restrict__ q, u16* __restrict__ k_cache, u16* __restrict__ v_cache, const int* __restrict__ lengths,
    const u16* __restrict__ new_k, const u16* __restrict__ new_v, const Angle* __restrict__ cos,
    const Angle* __restrict__ sin, u16* __restrict__ out, float scale, long long q_batch, long long q_head,
    long long k_batch, long long k_token, long long k_head, long long v_batch, long long v_token, long long v_head,
    long long new_k_batch, long long new_k_head, long long new_v_batch, long long new_v_head, long long out_batch,
    long long out_head) {
    SHARED(shared);
    float* queries = (float*)shared;               // [GROUP][DIM]
    float* newest = queries + GROUP * DIM;         // key and value
    float* found = newest + 2 * DIM;               // [WARPS + 1][GROUP][DIM], of warps and then of the block
    float* tops = found + (WARPS + 1) * GROUP * DIM;   // [WARPS + 1][GROUP]
    float* sums = tops + (WARPS + 1) * GROUP;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    unsigned char* own = (unsigned char*)(((u64)(sums + (WARPS + 1) * GROUP) + 127) & ~127ull) + warp * WARP_BYTES;
    u16* keys = (u16*)own;                         // [2][TILE][KEY_ROOM]
    u16* values = keys + 2 * TILE * KEY_ROOM;      // [2][TILE][DIM]
    float* weights = (float*)(values + 2 * TILE * DIM);  // [TILE][GROUP]
    const int rank = blockIdx.x, head = blockIdx.y;
    const long long batch = blockIdx.z;
    if (!EARLY) wait_for_inputs();
    const int length = lengths[batch] - 1;  // without the new one
    const int each = (length + CLUSTER * TILE - 1) / (CLUSTER * TILE) * TILE;
    const int end = min(rank * each + each, length);
    u16* of_keys = k_cache + batch * k_batch + head * k_head;
    u16* of_values = v_cache + batch * v_batch + head * v_head;

    auto ask = [&](int first, int half) {
        if (first < end) {
#pragma unroll
            for (int i = 0; i < DIM / 8; ++i) {
                const int piece = i * 32 + lane, row = piece / (DIM / 8), at = piece % (DIM / 8) * 8;
                const long long token = min(first + row, end - 1);  // past the end: a number, of weight zero
                bring_16(keys + (half * TILE + row) * KEY_ROOM + at, of_keys + token * k_token + at);
                bring_16(values + (half * TILE + row) * DIM + at, of_values + token * v_token + at);
            }
        }
        all_asked();
    };
    int first = rank * each + warp * TILE;
    ask(first, 0);
    let_next_start();
    if (EARLY) wait_for_inputs();
    const Angle* cos_here = cos + (long long)length * (ROTARY / 2);
    const Angle* sin_here = sin + (long long)length * (ROTARY / 2);
    for (int i = threadIdx.x; i < GROUP * DIM; i += THREADS) {
        const u16* from = q + batch * q_batch + (head * GROUP + i / DIM) * q_head;
        queries[i] = turned(from, i % DIM, cos_here, sin_here) * (scale * 1.4426950408889634f);
    }
    const bool owner = rank == CLUSTER - 1;
    if (owner) {
        for (int d = threadIdx.x; d < DIM; d += THREADS) {
            const u16 key = from_float(turned(new_k + batch * new_k_batch + head * new_k_head, d, cos_here, sin_here));
            const u16 value = new_v[batch * new_v_batch + head * new_v_head + d];
            of_keys[length * k_token + d] = key;
            of_values[length * v_token + d] = value;
            newest[d] = to_float(key);
            newest[DIM + d] = to_float(value);
        }
    }
    __syncthreads();

    float top[GROUP], sum[GROUP], gathered[GROUP][WIDE];
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
        top[h] = NOTHING;
        sum[h] = 0.0f;
#pragma unroll
        for (int e = 0; e < WIDE; ++e) gathered[h][e] = 0.0f;
        if (owner && warp == 0) {
            float score = 0.0f;
#pragma unroll
            for (int e = 0; e < WIDE; ++e) score += queries[h * DIM + lane * WIDE + e] * newest[lane * WIDE + e];
            top[h] = sum_of_warp(score);
            sum[h] = lane == 0 ? 1.0f : 0.0f;
#pragma unroll
            for (int e = 0; e < WIDE; ++e) gathered[h][e] = newest[DIM + lane * WIDE + e];
        }
    }
    for (int half = 0; first < end; first += WARPS * TILE, half ^= 1) {
        ask(first + WARPS * TILE, half ^ 1);
        wait_but_last();
        __syncwarp();
        float scores[GROUP] = {};
        const u16* key = keys + (half * TILE + lane) * KEY_ROOM;
#pragma unroll 4
        for (int d = 0; d < DIM; d += 8) {
            const Eight y = eight_at(key + d);
#pragma unroll
            for (int h = 0; h < GROUP; ++h)
#pragma unroll
                for (int e = 0; e < 8; ++e) scores[h] += y.part[e] * queries[h * DIM + d + e];
        }
        const bool there = first + lane < end;
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
            const float higher = fmaxf(top[h], most_of_warp(there ? scores[h] : NOTHING));
            const float keep = exp2f(top[h] - higher), weight = there ? exp2f(scores[h] - higher) : 0.0f;
            top[h] = higher;
            sum[h] = sum[h] * keep + weight;
            weights[lane * GROUP + h] = weight;
#pragma unroll
            for (int e = 0; e < WIDE; ++e) gathered[h][e] *= keep;
        }
        __syncwarp();
        const u16* value = values + half * TILE * DIM + lane * WIDE;
#pragma unroll 8
        for (int t = 0; t < TILE; ++t) {
#pragma unroll
            for (int e = 0; e < WIDE; e += 2) {
                const u32 pair = *(const u32*)(value + t * DIM + e);
                const float low = to_float((u16)pair), high = to_float((u16)(pair >> 16));
#pragma unroll
                for (int h = 0; h < GROUP; ++h) {
                    gathered[h][e] += weights[t * GROUP + h] * low;
                    gathered[h][e + 1] += weights[t * GROUP + h] * high;
                }
            }
        }
        __syncwarp();
    }

#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
        sum[h] = sum_of_warp(sum[h]);
        if (lane == 0) {
            tops[warp * GROUP + h] = top[h];
            sums[warp * GROUP + h] = sum[h];
        }
#pragma unroll
        for (int e = 0; e < WIDE; ++e) found[(warp * GROUP + h) * DIM + lane * WIDE + e] = gathered[h][e];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * DIM; i += THREADS) {
        const int h = i / DIM;
        float highest = NOTHING, total = 0.0f, y = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, tops[w * GROUP + h]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float share = exp2f(tops[w * GROUP + h] - highest);
            total += sums[w * GROUP + h] * share;
            y += found[w * GROUP * DIM + i] * share;
        }
        found[WARPS * GROUP * DIM + i] = y;
        if (i % DIM == 0) {
            tops[WARPS * GROUP + h] = highest;
            sums[WARPS * GROUP + h] = total;
        }
    }
    cluster_meets();
    // Results of the cluster are shared by its blocks; as many lanes as it has blocks read one of each.
    const int per = (GROUP * DIM + CLUSTER - 1) / CLUSTER;
    const int from = threadIdx.x % CLUSTER;
    for (int i = threadIdx.x / CLUSTER; i < (per + THREADS / CLUSTER - 1) / (THREADS / CLUSTER) * (THREADS / CLUSTER);
         i += THREADS / CLUSTER) {
        const int at = min(rank * per + i, GROUP * DIM - 1), h = at / DIM;
        const float mine = of_block(tops + WARPS * GROUP + h, from);
        float highest = mine;
        for (int far = CLUSTER / 2; far; far >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, far));
        const float share = exp2f(mine - highest);
        float total = of_block(sums + WARPS * GROUP + h, from) * share;
        float y = of_block(found + WARPS * GROUP * DIM + at, from) * share;
        for (int far = CLUSTER / 2; far; far >>= 1) {
            total += __shfl_xor_sync(~0u, total, far);
            y += __shfl_xor_sync(~0u, y, far);
        }
        if (from == 0 && i < per && rank * per + i < GROUP * DIM)
            out[batch * out_batch + (head * GROUP + h) * out_head + at % DIM] = from_float(y / total);
    }
    cluster_meets();  // nobody leaves while others read what it has
}
