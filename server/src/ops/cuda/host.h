// A stand-in for a CUDA device, so that tests can run the kernels on a machine without one: every thread of a block is a coroutine.
//
// A thread runs until it waits for its block or its warp, then the next one runs; blocks run one after the other.
// Warps run in lockstep only where they exchange something, as on a device.

#define HOST
#define __global__
#define __device__
#define __shared__ static
#define __align__(n)

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
static Index blockIdx, threadIdx, blockDim, gridDim;

namespace host {
constexpr size_t STACK_BYTES = 64 << 10;

// Threads that wait for each other.
struct Barrier {
    unsigned members = 0, waiting = 0, generation = 0;
    unsigned char slots[32][8];
};
struct Thread {
    ucontext_t context;
    std::vector<unsigned char> stack;
    bool is_done = false;
    // What it waits for, and the generation in which it began to.
    const Barrier* barrier = nullptr;
    unsigned generation = 0;
};

static std::vector<Thread> threads;
static std::vector<Barrier> warps;
static Barrier block;
static ucontext_t scheduler;
static unsigned current;
static std::vector<unsigned char> shared;
static void (*entry)();

static void release_if_complete(Barrier& barrier) {
    if (barrier.waiting > 0 && barrier.waiting == barrier.members) {
        barrier.waiting = 0;
        barrier.generation++;
    }
}

static void wait(Barrier& barrier) {
    Thread& thread = threads[current];
    thread.barrier = &barrier;
    thread.generation = barrier.generation;
    barrier.waiting++;
    release_if_complete(barrier);
    swapcontext(&thread.context, &scheduler);
    thread.barrier = nullptr;
}

template <typename V> V exchange(V mine, unsigned from) {
    Barrier& warp = warps[current / 32];
    std::memcpy(warp.slots[current % 32], &mine, sizeof mine);
    wait(warp);
    V theirs;
    std::memcpy(&theirs, warp.slots[from], sizeof theirs);
    wait(warp);
    return theirs;
}

static void run_thread() {
    entry();
    threads[current].is_done = true;
    // Threads that have ended are not waited for.
    Barrier& warp = warps[current / 32];
    warp.members--;
    release_if_complete(warp);
    block.members--;
    release_if_complete(block);
    swapcontext(&threads[current].context, &scheduler);
}

static void run_block() {
    unsigned count = blockDim.x;
    threads.clear();
    threads.resize(count);
    warps.assign((count + 31) / 32, Barrier());
    block = Barrier();
    block.members = count;
    for (unsigned index = 0; index < count; index++) {
        warps[index / 32].members++;
        Thread& thread = threads[index];
        thread.stack.resize(STACK_BYTES);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.context, run_thread, 0);
    }
    for (unsigned alive = count; alive > 0;) {
        alive = 0;
        for (unsigned index = 0; index < count; index++) {
            if (threads[index].is_done) {
                continue;
            }
            alive++;
            const Barrier* barrier = threads[index].barrier;
            if (barrier && barrier->generation == threads[index].generation) {
                continue;
            }
            current = index;
            threadIdx.x = index;
            swapcontext(&scheduler, &threads[index].context);
        }
    }
}
} // namespace host

#define DYNAMIC_SHARED(name) unsigned char* name = host::shared.data()

static inline void __syncthreads() { host::wait(host::block); }
static inline void __syncwarp() { host::wait(host::warps[host::current / 32]); }
template <typename V> V __shfl_xor_sync(unsigned, V value, int offset) {
    return host::exchange(value, host::current % 32 ^ offset);
}
template <typename V> V __shfl_sync(unsigned, V value, int lane) { return host::exchange(value, lane); }
static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline unsigned float_bits(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }

#include "common.cuh"

static inline float wide(f16 x) {
    _Float16 value;
    std::memcpy(&value, &x, sizeof value);
    return float(value);
}
template <> inline f16 narrow<f16>(float x) {
    _Float16 value = _Float16(x);
    f16 y;
    std::memcpy(&y, &value, sizeof y);
    return y;
}
template <> inline bf16 narrow<bf16>(float x) {
    unsigned bits = float_bits(x);
    if (x != x) {
        return {u16(0x7fff)};
    }
    return {u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

typedef void (*Kernel)(
    u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64,
    u64, u64, u64, u64, u64
);
static Kernel kernel;
static u64 arguments[28];

static void call_kernel() {
    u64* a = arguments;
    // Surplus arguments are ignored: all of them are 64 bits wide.
    kernel(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
        a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27]
    );
}

extern "C" int run_grid(
    Kernel function, unsigned grid_x, unsigned grid_y, unsigned threads, unsigned shared_bytes, const u64* values,
    unsigned count
) {
    if (count > 28) {
        return 1;
    }
    kernel = function;
    host::entry = call_kernel;
    std::memcpy(arguments, values, count * sizeof(u64));
    gridDim.x = grid_x;
    gridDim.y = grid_y;
    blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++) {
        for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++) {
            // Shared memory holds anything at first.
            host::shared.assign(shared_bytes, 0xff);
            host::run_block();
        }
    }
    return 0;
}
