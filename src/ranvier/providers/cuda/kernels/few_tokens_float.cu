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
    float* parts = (float*)(shared + TOKENS * apart);
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const unsigned char* token = shared + min(g, m - 1) * apart + 16 * t;
    const u16* from[2];
    float total[4] = {};

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
    auto ask = [&](Step& s, int step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // past the end tokens are zero, whatever the weights; but they must be numbers
            const int at = min(64 * step + 32 * half + 8 * t, k - 8);
            s.rows[0][half] = streamed((const uint4*)(from[0] + at));
            s.rows[1][half] = streamed((const uint4*)(from[1] + at));
        }
    };
    auto begin = [&] {
        for (int i = 0; i < m; ++i)
            bring_token(x + i * x_step, norm, eps, k, padded, shared + i * apart, parts, [](int, const Eight&) {});
    };
    auto take = [&](const Step& s, int step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 a = s.rows[0][half], b = s.rows[1][half];
            const uint4 of = *(const uint4*)(token + 128 * step + 64 * half);
            multiply(total, a.x, b.x, a.y, b.y, of.x, of.y);
            multiply(total, a.z, b.z, a.w, b.w, of.z, of.w);
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
    walk<Step>(steps, parts, around, turn_to, ask, begin, take, give);
}
