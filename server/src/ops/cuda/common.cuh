// What all kernels share: stored elements, reductions over a warp, a launch convention.
//
// Every parameter of a kernel is 64 bits wide, a pointer or an integer (floats travel as their bits), so that one launcher serves all.
// HOST is defined where host.h stands in for the device and a C++ compiler for NVRTC.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

#ifndef HOST
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// 16-bit elements as they lie in memory; all arithmetic is float.
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

__device__ inline float wide(float x) { return x; }
__device__ inline float wide(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

template <typename T> __device__ inline T narrow(float x);
template <> __device__ inline float narrow<float>(float x) { return x; }

#ifndef HOST
__device__ inline float wide(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <> __device__ inline f16 narrow<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ inline bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#endif

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }
__device__ inline float not_a_number() { return __uint_as_float(0x7fc00000u); }
__device__ inline bool is_finite(float x) { return x - x == 0.0f; }

// The same for every lane, by a fixed tree.
__device__ inline float warp_sum(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, offset);
    }
    return x;
}
__device__ inline float warp_max(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, offset);
        x = other > x ? other : x;
    }
    return x;
}
__device__ inline bool warp_any(bool x) {
    u32 any = x;
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        any |= __shfl_xor_sync(ALL_LANES, any, offset);
    }
    return any != 0;
}
