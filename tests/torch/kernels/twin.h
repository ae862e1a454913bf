// CUDA C on a processor: a block is as many threads as it has, one block after the other. Warps meet where an
// instruction needs all their lanes, and the matrix unit is the table of its documentation (PTX, mma.m16n8k32).

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
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
    Meeting halves[2] = {Meeting(16), Meeting(16)};
    uint32_t values[32];
    uint32_t operands[32][6];
};

// A block: its shared memory, and where its threads meet.
struct Block {
    explicit Block(int threads, int multiplying) : all(threads), some(multiplying), warps(threads / 32) {
        std::memset(memory, 0xFF, sizeof memory);  // nothing may be taken for zero
    }
    Meeting all, some;
    std::vector<Warp> warps;
    __attribute__((aligned(128))) unsigned char memory[1 << 19];
};
static Block* block;

#define SHARED(name) unsigned char* name = block->memory
inline Warp& my_warp() { return block->warps[threadIdx.x >> 5]; }
inline void __syncthreads() { block->all.wait(); }
inline void __syncwarp() { my_warp().all.wait(); }
inline void multiplying_meet() { block->some.wait(); }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> inline T __ldg(const T* at) { return *at; }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int far) {
    static_assert(sizeof x == 4, "lanes exchange words");
    Warp& warp = my_warp();
    const int lane = threadIdx.x & 31;
    Meeting& who = mask == ~0u ? warp.all : warp.halves[lane >> 4];
    std::memcpy(&warp.values[lane], &x, 4);
    who.wait();
    T y;
    std::memcpy(&y, &warp.values[lane ^ far], 4);
    who.wait();
    return y;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline int __float2int_rn(float x) { return x != x ? 0 : (int)std::nearbyint(x); }

#ifdef __aarch64__
typedef __fp16 Half;  // the other name is not C++ there
#else
typedef _Float16 Half;
#endif

inline float float_of(uint16_t bits) {
#if HALF
    Half h;
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
    const Half h = (Half)x;
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

// Unsigned bytes on the left, signed ones on the right.
inline void multiply(int (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    Warp& warp = my_warp();
    const int lane = threadIdx.x & 31;
    const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(warp.operands[lane], mine, sizeof mine);
    warp.all.wait();
    for (int i = 0; i < 4; ++i) {
        const int row = (lane >> 2) + (i & 2 ? 8 : 0), column = 2 * (lane & 3) + (i & 1);
        for (int k = 0; k < 32; ++k) {
            const int quad = (k & 15) >> 2, byte = 8 * (k & 3), upper = k >> 4;
            const uint32_t a = warp.operands[4 * (row & 7) + quad][(row >> 3) + 2 * upper];
            const uint32_t b = warp.operands[4 * column + quad][4 + upper];
            sum[i] += (int)(uint8_t)(a >> byte) * (int)(int8_t)(b >> byte);
        }
    }
    warp.all.wait();
}

// Barriers (PTX, mbarrier): a phase ends when all have arrived and all bytes that were announced are there.
struct Phases {
    int count, missing, ended = 0;
    long bytes = 0;
};
static std::mutex phases_mutex;
static std::condition_variable phases_change;
static std::map<const void*, Phases> phases;

inline void change(const void* at, int arrived, long announced) {
    std::unique_lock<std::mutex> lock(phases_mutex);
    Phases& here = phases.at(at);
    here.missing -= arrived;
    here.bytes += announced;
    if (here.missing || here.bytes) return;
    here.missing = here.count;
    ++here.ended;
    phases_change.notify_all();
}

inline void barrier_begin(unsigned long long* at, int count) {
    std::unique_lock<std::mutex> lock(phases_mutex);
    phases[at] = Phases{count, count};
}
inline void barriers_begun() {}
inline void arrive(unsigned long long* at) { change(at, 1, 0); }
inline void arrive_expecting(unsigned long long* at, int bytes) { change(at, 1, bytes); }
inline void wait(unsigned long long* at, int parity) {
#ifdef LATE
    if (threadIdx.x >> 5 == LATE && threadIdx.x & 31) std::this_thread::sleep_for(std::chrono::milliseconds(20));
#endif
    std::unique_lock<std::mutex> lock(phases_mutex);
    const auto over = [&] { return (phases.at(at).ended & 1) != parity; };
    if (phases_change.wait_for(lock, std::chrono::seconds(60), over)) return;
    std::fprintf(stderr, "thread %u waits for a phase that is over, or never comes\n", threadIdx.x);
    std::abort();  // rather than to wait for ever
}
inline void bring(void* to, const void* from, int bytes, unsigned long long* when) {
    if (bytes <= 0 || bytes % 16 || (uintptr_t)to % 16 || (uintptr_t)from % 16) std::abort();  // the engine's rules
    std::memcpy(to, from, bytes);
    change(when, 0, -bytes);
}

inline void let_next_start() {}
inline void wait_for_inputs() {}

template <class Body> void run_blocks(int grid, int threads, Body body) {
    gridDim.x = grid;
    for (int b = 0; b < grid; ++b) {
        phases.clear();
        const auto held = std::make_unique<Block>(threads, 32 * WARPS);
        block = held.get();
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
