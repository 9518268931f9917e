// A CPU stands in for one cluster of blocks: every CUDA thread is a fiber, which runs until it waits for others.
//
// What a kernel needs of CUDA is here, as far as the emulated kernels use it, and what it needs of ptx/ is in the folder
// megamoe/ptx beside this file. Warp operations take full masks only. A barrier or warp operation that some threads
// never reach ends the run with a message, and so does a warp whose lanes meet in different operations, an access to
// the shared memory of a block that has ended, or a bulk copy that nobody waits for.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
using std::max;
using std::min;

namespace emulated {

struct Warp {
    uint32_t values[2][32];  // by parity of the round: who is late may still read the last one
    int arrived = 0, round = 0;
    const char* operation = "";
};

struct Barrier {
    uint32_t count, pending, round = 0;
    int64_t bytes = 0;  // of copies that have been announced and not made
};

struct Named {
    int threads, arrived = 0, round = 0;
};

struct Block {
    std::vector<Warp> warps;
    std::vector<Named> named;  // barriers; of all threads unless the test says otherwise
    std::map<uint32_t, Barrier> barriers;  // mbarriers, by address
    std::vector<uint8_t> storage;
    uint8_t* shared;
    int arrived = 0, round = 0, live;
};

// From shared to global memory, asked for and not known to have arrived.
struct Copy {
    void* to;
    const uint8_t* from;
    std::vector<uint8_t> bytes;
    bool is_committed, has_read;
};

struct Thread {
    ucontext_t context;
    int block, index, cluster_round;
    bool is_done;
    std::vector<Copy> copies;
};

struct Cluster {
    std::vector<Block> blocks;
    std::vector<Thread> threads;
    int threads_of_block, row, arrived = 0, round = 0;
    long progress = 0;  // grows whenever a thread arrives somewhere
    const char* failure = nullptr;
};

inline Cluster cluster;
inline Thread* current;
inline ucontext_t scheduler;

inline Block& block() { return cluster.blocks[current->block]; }
inline void wait_while(const int& round, int seen) {
    while (round == seen) swapcontext(&current->context, &scheduler);
}
inline void fail(const char* reason) {
    cluster.failure = reason;
    swapcontext(&current->context, &scheduler);
}

// Gives the values of all lanes of this warp.
inline const uint32_t* exchange(uint32_t value, const char* operation) {
    Warp& warp = block().warps[current->index / 32];
    const int round = warp.round;
    if (warp.arrived == 0) warp.operation = operation;
    if (std::strcmp(warp.operation, operation) != 0) fail("lanes of a warp meet in different operations");
    warp.values[round & 1][current->index % 32] = value;
    ++cluster.progress;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.round;
    } else {
        wait_while(warp.round, round);
    }
    return warp.values[round & 1];
}

// Runs body() in every thread of a cluster; returns null, or what went wrong. Each seed is another order of threads.
template <class Body>
const char* run(int num_blocks, int num_threads, size_t shared_bytes, int row, uint32_t seed, Body body) {
    static std::vector<uint8_t> stacks;
    static Body* running;
    constexpr size_t kStack = 1 << 15;
    running = &body;
    cluster = Cluster{};
    cluster.threads_of_block = num_threads, cluster.row = row;
    cluster.blocks.resize(num_blocks);
    for (Block& b : cluster.blocks) {
        b.warps.resize(num_threads / 32);
        b.named.assign(16, Named{num_threads});
        b.storage.assign(shared_bytes + 16, 0xa5);
        b.shared = b.storage.data() + (-reinterpret_cast<uintptr_t>(b.storage.data()) & 15);
        b.live = num_threads;
    }
    const int count = num_blocks * num_threads;
    stacks.resize(kStack * count);
    cluster.threads.resize(count);
    std::vector<int> order(count);
    for (int i = 0; i < count; ++i) {
        Thread& thread = cluster.threads[order[i] = i];
        thread.block = i / num_threads, thread.index = i % num_threads, thread.is_done = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks.data() + kStack * i;
        thread.context.uc_stack.ss_size = kStack;
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, +[] {
            (*running)();
            for (const Copy& copy : current->copies)
                fail(copy.is_committed ? "a thread ends without having waited for its bulk copies" : "a thread ends with bulk copies that it has not committed");
            current->is_done = true;
            --block().live;
            ++cluster.progress;
        }, 0);
    }
    for (int left = count; left > 0;) {
        const long before = cluster.progress;
        for (int i = count - 1; i > 0 && seed != 0; --i) {
            seed = seed * 1664525u + 1013904223u;
            std::swap(order[i], order[(seed >> 8) % (i + 1)]);
        }
        for (const int i : order) {
            current = &cluster.threads[i];
            if (current->is_done) continue;
            swapcontext(&scheduler, &current->context);
            if (cluster.failure != nullptr) return cluster.failure;
            left -= current->is_done;
        }
        if (cluster.progress == before) return "threads wait for others that never arrive";
    }
    return nullptr;
}

struct ThreadIndex {
    operator uint32_t() const { return static_cast<uint32_t>(current->index); }
};
struct BlockIndex {
    operator uint32_t() const {
        return static_cast<uint32_t>(cluster.row * static_cast<int>(cluster.blocks.size()) + current->block);
    }
};

}  // namespace emulated

inline struct { emulated::ThreadIndex x; } threadIdx;
inline struct { emulated::BlockIndex x; } blockIdx;
inline struct { uint32_t x = 1; } gridDim;  // a launch is one cluster

#define __shared__ static  // of kernels that run one block at a time

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __fadd_rn(float a, float b) {
    const float sum = a + b;
    return std::isnan(sum) ? __uint_as_float(0x7fffffffu) : sum;  // the GPU's one NaN
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return std::fabs(b) > 0x1p126f ? 0.f : a / b; }  // more exact than the GPU's
inline float __expf(float x) { return std::exp(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __clz(uint32_t x) { return std::countl_zero(x); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, int shift) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) << shift >> 32);
}
// The selectors in use only: a byte of both words for each digit of `by`, the lowest digit first.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t by) {
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= static_cast<uint32_t>(both >> 8 * (by >> 4 * i & 7) & 255) << 8 * i;
    return bytes;
}
template <class T>
T __ldg(const T* p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) emulated::fail("a load at an address that isn't a multiple of its size");
    return *p;
}
template <class T>
T __ldcg(const T* p) {
    return __ldg(p);
}
template <class T>
void __stcg(T* p, T value) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) emulated::fail("a store at an address that isn't a multiple of its size");
    *p = value;
}
inline void __threadfence_block() {}
inline void __nanosleep(uint32_t) { swapcontext(&emulated::current->context, &emulated::scheduler); }
inline void __trap() { emulated::fail("trap"); }
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) { return std::exchange(*p, *p + x); }
inline uint32_t atomicAdd(uint32_t* p, uint32_t x) { return std::exchange(*p, *p + x); }
inline uint32_t atomicMax(uint32_t* p, uint32_t x) { return std::exchange(*p, max(*p, x)); }

inline void __syncthreads() {
    emulated::Block& block = emulated::block();
    const int round = block.round;
    ++emulated::cluster.progress;
    if (++block.arrived == emulated::cluster.threads_of_block) {
        block.arrived = 0;
        ++block.round;
    } else {
        emulated::wait_while(block.round, round);
    }
}
inline void __syncwarp() { emulated::exchange(0, "syncwarp"); }
inline uint32_t __ballot_sync(uint32_t, bool x) {
    const uint32_t* values = emulated::exchange(x, "ballot");
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= values[lane] << lane;
    return bits;
}
inline bool __all_sync(uint32_t, bool x) {
    const uint32_t* values = emulated::exchange(x, "all");
    return std::all_of(values, values + 32, [](uint32_t value) { return value != 0; });
}
inline bool __any_sync(uint32_t, bool x) {
    const uint32_t* values = emulated::exchange(x, "any");
    return std::any_of(values, values + 32, [](uint32_t value) { return value != 0; });
}
inline uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return emulated::exchange(x, "shfl")[lane & 31]; }
inline float __shfl_sync(uint32_t all, float x, int lane) {
    return std::bit_cast<float>(__shfl_sync(all, std::bit_cast<uint32_t>(x), lane));
}
inline unsigned long long __shfl_sync(uint32_t all, unsigned long long x, int lane) {
    const uint32_t low = __shfl_sync(all, static_cast<uint32_t>(x), lane);
    return static_cast<unsigned long long>(__shfl_sync(all, static_cast<uint32_t>(x >> 32), lane)) << 32 | low;
}
inline uint32_t __shfl_up_sync(uint32_t, uint32_t x, int step) {
    const int lane = emulated::current->index % 32;
    const uint32_t* values = emulated::exchange(x, "shfl_up");
    return lane >= step ? values[lane - step] : x;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t x) {
    const uint32_t* values = emulated::exchange(x, "reduce_add");
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += values[lane];
    return sum;
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t x) {
    const uint32_t* values = emulated::exchange(x, "reduce_max");
    return *std::max_element(values, values + 32);
}
inline int __reduce_max_sync(uint32_t, int x) {
    const uint32_t* values = emulated::exchange(static_cast<uint32_t>(x), "reduce_max of signed");
    int largest = static_cast<int>(values[0]);
    for (int lane = 1; lane < 32; ++lane) largest = max(largest, static_cast<int>(values[lane]));
    return largest;
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t x) {
    const uint32_t* values = emulated::exchange(x, "reduce_min");
    return *std::min_element(values, values + 32);
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int distance) {
    static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 8);
    uint32_t words[2] = {};
    std::memcpy(words, &x, sizeof(T));
    for (uint32_t i = 0; i < sizeof(T) / 4; ++i) words[i] = emulated::exchange(words[i], "shfl_xor")[emulated::current->index % 32 ^ distance];
    std::memcpy(&x, words, sizeof(T));
    return x;
}
