// Few tokens with weights of their own type: out = activation(norm(x) @ W.T + bias) + residual, W of one to three matrices
// whose results stand side by side, or gate and up (GATED).
//
// A step is 64 elements. Lane (g, t) reads elements 8 t ... 8 t + 7 and 32 + 8 t ... of its two rows, 16 bytes each, and
// these are operands of the matrix unit as they stand: of every eight, the first four are slots (2 t, 2 t + 1, 2 t + 8,
// 2 t + 9) of one product and the others those of the next. The right operand has a column for each token.

#include "few_tokens.h"

struct Step {
    uint4 rows[2][2];  // row, half of the step
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few_tokens_float(
    const u16* __restrict__ x, const u16* __restrict__ first, const u16* __restrict__ second,
    const u16* __restrict__ third, const u16* __restrict__ bias, const u16* __restrict__ residual,
    const u16* __restrict__ norm, Result* __restrict__ out, int m, int n, int end_of_first, int end_of_second, int k,
    long long x_step, long long first_step, long long second_step, long long third_step, long long residual_step,
    long long out_step, float eps) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int steps = (k + 63) >> 6;
    const int padded = steps * 64;
    const int apart = padded * 2 + 64;                  // bytes from token to token: neighbours in different banks
    float* parts = (float*)(shared + TOKENS * apart);   // [2][WARPS][TOKENS][ROWS], of a tile and of the next

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int tiles = (n + ROWS - 1) / ROWS;
    const int each = (steps + WARPS - 1) / WARPS;       // steps of a warp in every tile: some may have none to do

    let_next_start();
    // What comes is counted in steps of this warp, tile after tile.
    int coming_tile = blockIdx.x, coming = 0;
    const u16* from[2];
    auto turn_to = [&](int tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = min(tile * ROWS + 2 * g + r, n - 1);
            if (GATED)
                from[r] = r ? second + (row >> 1) * second_step : first + (row >> 1) * first_step;
            else if (row < end_of_first)
                from[r] = first + row * first_step;
            else if (row < end_of_second)
                from[r] = second + (row - end_of_first) * second_step;
            else
                from[r] = third + (row - end_of_second) * third_step;
        }
    };
    turn_to(coming_tile);
    Step ahead[AHEAD];
    auto ask = [&](Step& s) {
        const int step = warp * each + coming;
        if (coming_tile < tiles && step < steps) {  // the same for all lanes
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // past the end tokens are zero, whatever the weights; but they must be numbers
                const int at = min(64 * step + 32 * half + 8 * t, k - 8);
                s.rows[0][half] = streamed((const uint4*)(from[0] + at));
                s.rows[1][half] = streamed((const uint4*)(from[1] + at));
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

    for (int token = 0; token < m; ++token)
        bring_token(x + token * x_step, norm, eps, k, padded, shared + token * apart, parts, [](int, const Eight&) {});
    __syncthreads();
    const unsigned char* token = shared + min(g, m - 1) * apart + 16 * t;

    float total[4] = {};
    int tile = blockIdx.x, done = 0, turn = 0;
    while (tile < tiles) {
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            const int step = warp * each + done;
            if (tile < tiles && step < steps) {  // the same for all lanes
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 a = ahead[s].rows[0][half], b = ahead[s].rows[1][half];
                    const uint4 of = *(const uint4*)(token + 128 * step + 64 * half);
                    multiply(total, a.x, b.x, a.y, b.y, of.x, of.y);
                    multiply(total, a.z, b.z, a.w, b.w, of.z, of.w);
                }
            }
            ask(ahead[s]);
            if (++done < each || tile >= tiles) continue;

            // A tile is complete: every warp has a part of its sums.
            float* here = parts + turn * (WARPS * TOKENS * ROWS);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = 2 * t + (i & 1);
                if (column < TOKENS) here[(warp * TOKENS + column) * ROWS + 2 * g + (i >> 1)] = total[i];
                total[i] = 0.0f;
            }
            __syncthreads();
            finish_tile(here, tile, {bias, residual, out, m, n, residual_step, out_step});
            done = 0;
            turn ^= 1;
            tile += gridDim.x;
        }
    }
}
