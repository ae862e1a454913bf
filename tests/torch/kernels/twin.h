// CUDA C on a processor: a block is as many threads as it has, one block after the other. Warps meet where an
// instruction needs all their lanes, and the matrix unit is the table of its documentation (PTX, mma.m16n8k16).

#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#define ON_HOST 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(n, blocks)

struct uint4 {
    unsigned x, y, z, w;
};
struct Place {
    unsigned x;
};
static thread_local Place threadIdx, blockIdx;
static Place gridDim;

extern "C" {
__attribute__((aligned(16))) unsigned char shared[1 << 20];
}

class Meeting {
  public:
    explicit Meeting(int count) : count_(count), left_(count) {}
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        const long turn = turn_;
        if (--left_ == 0) {
            left_ = count_;
            ++turn_;
            all_.notify_all();
        } else {
            all_.wait(lock, [&] { return turn_ != turn; });
        }
    }

  private:
    std::mutex mutex_;
    std::condition_variable all_;
    int count_, left_;
    long turn_ = 0;
};

struct Warp {
    Meeting all{32};
    Meeting quads[8] = {Meeting(4), Meeting(4), Meeting(4), Meeting(4), Meeting(4), Meeting(4), Meeting(4), Meeting(4)};
    float values[32];
    uint32_t operands[32][6];
};
static Meeting* block_meeting;
static std::vector<Warp>* warps;

inline Warp& my_warp() { return (*warps)[threadIdx.x >> 5]; }
inline void __syncthreads() { block_meeting->wait(); }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> inline T __ldg(const T* at) { return *at; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline float __shfl_xor_sync(unsigned mask, float x, int far) {
    Warp& warp = my_warp();
    const int lane = threadIdx.x & 31;
    Meeting& who = mask == ~0u ? warp.all : warp.quads[lane >> 2];
    warp.values[lane] = x;
    who.wait();
    const float y = warp.values[lane ^ far];
    who.wait();
    return y;
}

inline float float_of(uint16_t bits) {
#if HALF
    _Float16 h;
    std::memcpy(&h, &bits, 2);
    return (float)h;
#else
    const uint32_t wide = (uint32_t)bits << 16;
    float y;
    std::memcpy(&y, &wide, 4);
    return y;
#endif
}

inline float to_float(unsigned short bits) { return float_of(bits); }

inline unsigned short from_float(float x) {
#if HALF
    const _Float16 h = (_Float16)x;
    unsigned short bits;
    std::memcpy(&bits, &h, 2);
    return bits;
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7FC0;
    return (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
#endif
}

inline void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    Warp& warp = my_warp();
    const int lane = threadIdx.x & 31;
    const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(warp.operands[lane], mine, sizeof mine);
    warp.all.wait();
    for (int i = 0; i < 4; ++i) {
        const int row = (lane >> 2) + (i & 2 ? 8 : 0), column = 2 * (lane & 3) + (i & 1);
        for (int k = 0; k < 16; ++k) {
            const int quad = (k & 7) >> 1, half = 16 * (k & 1), upper = k >> 3;
            const uint32_t a = warp.operands[4 * (row & 7) + quad][(row >> 3) + 2 * upper];
            const uint32_t b = warp.operands[4 * column + quad][4 + upper];
            sum[i] += float_of((uint16_t)(a >> half)) * float_of((uint16_t)(b >> half));
        }
    }
    warp.all.wait();
}

inline uint4 streamed(const uint4* at) { return *at; }
inline void let_next_start() {}
inline void wait_for_inputs() {}

template <class Body> void run_blocks(int grid, int threads, Body body) {
    gridDim.x = grid;
    for (int b = 0; b < grid; ++b) {
        std::memset(shared, 0xFF, sizeof shared);  // nothing may be taken for zero
        Meeting meeting(threads);
        std::vector<Warp> all(threads / 32);
        block_meeting = &meeting;
        warps = &all;
        std::vector<std::thread> running;
        for (int t = 0; t < threads; ++t)
            running.emplace_back([&, t, b] {
                threadIdx.x = t;
                blockIdx.x = b;
                body();
            });
        for (auto& each : running) each.join();
    }
}
