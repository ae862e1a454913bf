// Few tokens with weights of their own type: out = activation(norm(x) @ W.T + bias) + residual, W of one to three matrices
// whose results stand side by side, or gate and up (GATED).
//
// A step is 64 elements. Lane (g, t) reads elements 8 t ... 8 t + 7 and 32 + 8 t ... of its two rows, 16 bytes each, and
// these are operands of the matrix unit as they stand: of every eight, the first four are slots (2 t, 2 t + 1, 2 t + 8,
// 2 t + 9) of one product and the others those of the next. The right operand has a column for each token.

#include "few_tokens.h"

#define STEP_BYTES 128
#define STEPS ((DEPTH + STEP_BYTES - 1) / STEP_BYTES)  // of a piece

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few_tokens_float(
    const u16* __restrict__ x, const u16* __restrict__ first, const u16* __restrict__ second,
    const u16* __restrict__ third, const u16* __restrict__ bias, const u16* __restrict__ residual,
    const u16* __restrict__ norm, Result* __restrict__ out, int m, int n, int end_of_first, int end_of_second, int k,
    long long x_step, long long first_step, long long second_step, long long third_step, long long residual_step,
    long long out_step, float eps) {
    SHARED(shared);
    const Ring ring = ring_in(shared, (ROWS * ROW_ROOM + 127) & ~127);
    const int steps = (k + 63) >> 6;
    const int padded = steps * 64;
    const int apart = padded * 2 + 64;  // bytes from token to token: neighbours in different banks
    unsigned char* tokens = ring.stages + STAGES * ring.stage_bytes;
    float* parts = (float*)(tokens + TOKENS * apart);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const unsigned char* token = tokens + min(g, m - 1) * apart + 16 * t;
    float total[4] = {};
    Eight gains = {};

    auto row_at = [&](int row) {
        if (GATED) return row & 1 ? second + (row >> 1) * second_step : first + (row >> 1) * first_step;
        if (row < end_of_first) return first + row * first_step;
        if (row < end_of_second) return second + (row - end_of_first) * second_step;
        return third + (row - end_of_second) * third_step;
    };
    // Together, rows of gate come before rows of up.
    auto copy = [&](unsigned char* stage, int tile, int piece, u64* full) {
        const int bytes = min(DEPTH, 2 * k - piece * DEPTH);
        const int rows = TOGETHER ? min(ROWS, n - tile * ROWS) : ROWS;
        if (lane == 0) arrive_expecting(full, rows * bytes);
        __syncwarp();
        if (TOGETHER) {
            if (lane == 0) bring(stage, row_at(tile * ROWS), (GATED ? rows / 2 : rows) * bytes, full);
            if (GATED && lane == 0) bring(stage + ROWS / 2 * DEPTH, row_at(tile * ROWS + 1), rows / 2 * bytes, full);
        } else if (lane < ROWS) {
            const u16* from = row_at(min(tile * ROWS + lane, n - 1));
            bring(stage + lane * ROW_ROOM, (const unsigned char*)from + piece * DEPTH, bytes, full);
        }
    };
    auto ready = [&] {
        if (norm && 8 * threadIdx.x < k) gains = eight_at(norm + 8 * threadIdx.x);
    };
    auto begin = [&] {
        for (int i = 0; i < m; ++i)
            bring_token(x + i * x_step, norm, gains, eps, k, padded, parts, [&](int at, const Eight& y) {
                *(uint4*)(tokens + i * apart + 2 * at) =
                    make_uint4(pair_of(y.part[0], y.part[1]), pair_of(y.part[2], y.part[3]),
                               pair_of(y.part[4], y.part[5]), pair_of(y.part[6], y.part[7]));
            });
    };
    auto take = [&](const unsigned char* stage, int piece) {
        const unsigned char* rows = stage + (GATED && TOGETHER ? g : 2 * g) * ROW_ROOM;
        const int below = (GATED && TOGETHER ? ROWS / 2 : 1) * ROW_ROOM;  // to this lane's other row
        const int last = 2 * k - piece * DEPTH - 16;  // where the row's last eight are
#pragma unroll
        for (int e = 0; e < (STEPS + WARPS - 1) / WARPS; ++e) {
            const int step = warp + e * WARPS;
            if (!EVEN && (step >= STEPS || piece * STEPS + step >= steps)) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // past the end tokens are zero, whatever the weights; but they must be numbers
                const int at = min(STEP_BYTES * step + 64 * half + 16 * t, last);
                const uint4 a = *(const uint4*)(rows + at), b = *(const uint4*)(rows + below + at);
                const uint4 of = *(const uint4*)(token + STEP_BYTES * (piece * STEPS + step) + 64 * half);
                multiply(total, a.x, b.x, a.y, b.y, of.x, of.y);
                multiply(total, a.z, b.z, a.w, b.w, of.z, of.w);
            }
        }
    };
    auto give = [&](float* to) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 2 * t + (i & 1);
            if (column < TOKENS) to[column * ROWS + 2 * g + (i >> 1)] = total[i];
            total[i] = 0.0f;
        }
    };
    const Around around = {bias, residual, out, m, n, residual_step, out_step};
    walk(ring, (2 * k + DEPTH - 1) / DEPTH, parts, around, copy, ready, begin, take, give);
}
