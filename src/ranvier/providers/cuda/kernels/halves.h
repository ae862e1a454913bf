// Numbers of 16 bits, and launches that start early. Given by the compiler: HALF (float16, else bfloat16), PDL.

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
