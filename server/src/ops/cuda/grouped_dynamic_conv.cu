// GroupedDynamicConv: one thread for each element of the output. Grid: rows of the whole batch, then blocks of channels.
//
// Products and sums are rounded one by one, in the order of the implementation for the CPU: float results have the same bits.

template <typename T>
__device__ void convolve(
    const T* x, const T* coefficients, const T* base, T* y, i64 rows, i64 channels, i64 taps, i64 group_size, i64 side
) {
    i64 row = blockIdx.x;
    i64 channel = i64(blockIdx.y) * blockDim.x + threadIdx.x;
    if (channel >= channels) {
        return;
    }
    i64 groups = channels / group_size;
    i64 before = row % rows;
    float sum = 0.0f;
    for (i64 tap = 0; tap < taps && tap <= before; tap++) {
        float fixed = wide(base[(side * taps + tap) * channels + channel]);
        float dynamic = wide(coefficients[((row * 2 + side) * taps + tap) * groups + channel / group_size]);
        float product = __fmul_rn(__fadd_rn(fixed, dynamic), wide(x[(row - tap) * channels + channel]));
        sum = __fadd_rn(sum, product);
    }
    y[row * channels + channel] = narrow<T>(sum);
}

#define GROUPED_DYNAMIC_CONV(T, SUFFIX)                                                                              \
    extern "C" __global__ void grouped_dynamic_conv_##SUFFIX(                                                        \
        const T* x, const T* coefficients, const T* base, T* y, i64 rows, i64 channels, i64 taps, i64 group_size,    \
        i64 side                                                                                                     \
    ) {                                                                                                              \
        convolve(x, coefficients, base, y, rows, channels, taps, group_size, side);                                  \
    }
GROUPED_DYNAMIC_CONV(float, f32)
GROUPED_DYNAMIC_CONV(f16, f16)
GROUPED_DYNAMIC_CONV(bf16, bf16)
