// The wrappers of ptx/ that emulated kernels use; all headers of that name lead here.
#pragma once
#include "cuda_on_cpu.h"
#include "megamoe/common/codes.h"

namespace megamoe::ptx {

struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

using emulated::block;
using emulated::cluster;

inline uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - block().shared);
}
template <typename T>
T read(const void* p) {
    T value;
    std::memcpy(&value, p, sizeof(T));
    return value;
}
inline uint4 load_global_v4_no_allocate(const void* p) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) emulated::fail("a 16-byte load at an address that isn't a multiple");
    return read<uint4>(p);
}
inline uint32_t load_global_u16_no_allocate(const void* p) { return read<uint16_t>(p); }
inline uint4 load_shared_v4(uint32_t p) {
    if (p % 16 != 0) emulated::fail("a 16-byte load at an address that isn't a multiple");
    return read<uint4>(block().shared + p);
}
inline void store_shared_v4(uint32_t p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    if (p % 16 != 0) emulated::fail("a 16-byte store at an address that isn't a multiple");
    const uint32_t values[4] = {x, y, z, w};
    std::memcpy(block().shared + p, values, sizeof values);
}
inline float load_shared_f32(uint32_t p) { return read<float>(block().shared + p); }
inline uint32_t load_shared_u32(uint32_t p) { return read<uint32_t>(block().shared + p); }
inline void store_shared_u32(uint32_t p, uint32_t x) { std::memcpy(block().shared + p, &x, 4); }
inline void store_shared_v2(uint32_t p, uint32_t x, uint32_t y) {
    if (p % 8 != 0) emulated::fail("an 8-byte store at an address that isn't a multiple");
    store_shared_u32(p, x), store_shared_u32(p + 4, y);
}
inline void store_shared_f32(uint32_t p, float x) { store_shared_u32(p, __float_as_uint(x)); }
inline uint32_t add_shared_u32(uint32_t p, uint32_t x) {
    const uint32_t old = load_shared_u32(p);
    store_shared_u32(p, old + x);
    return old;
}

inline float relu(float x) { return x < 0.f ? 0.f : x; }
inline float min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? __uint_as_float(0x7fffffffu) : min(a, b); }
inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? __uint_as_float(0x7fffffffu) : max(a, b); }
inline float flushed(float x) { return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }
inline float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
inline float reciprocal_approx(float x) { return flushed(1.f / flushed(x)); }
inline uint32_t cvt_e4m3x2(float a, float b) { return e4m3_encode(a) | static_cast<uint32_t>(e4m3_encode(b)) << 8; }

// Of a cluster: an address has the block's rank in its highest byte.
inline uint32_t cluster_rank() { return static_cast<uint32_t>(emulated::current->block); }
inline uint32_t map_to_rank(uint32_t p, uint32_t rank) { return rank << 24 | p; }
inline uint8_t* of_cluster(uint32_t p) {
    emulated::Block& other = cluster.blocks[p >> 24];
    if (other.live != cluster.threads_of_block) emulated::fail("shared memory of a block that is ending is accessed");
    return other.shared + (p & 0xffffff);
}
inline uint32_t load_cluster_u32(uint32_t p) { return read<uint32_t>(of_cluster(p)); }
inline void store_cluster_v2(uint32_t p, uint32_t x, uint32_t y) {
    if (p % 8 != 0) emulated::fail("an 8-byte store at an address that isn't a multiple");
    std::memcpy(of_cluster(p), &x, 4), std::memcpy(of_cluster(p + 4), &y, 4);
}
inline void cluster_arrive_release() {
    emulated::current->cluster_round = cluster.round;
    ++cluster.progress;
    if (++cluster.arrived == static_cast<int>(cluster.threads.size())) {
        cluster.arrived = 0;
        ++cluster.round;
    }
}
inline void cluster_wait_acquire() { emulated::wait_while(cluster.round, emulated::current->cluster_round); }

inline float half_of(uint32_t pair, int i) { return __uint_as_float(i == 0 ? pair << 16 : pair & 0xffff0000u); }
inline void mma_bf16(float (&c)[4], uint4 a, uint2 b) {
    uint32_t all[6][32];
    const uint32_t own[6] = {a.x, a.y, a.z, a.w, b.x, b.y};
    for (int i = 0; i < 6; ++i) std::memcpy(all[i], emulated::exchange(own[i], "mma"), sizeof all[i]);
    const int g = emulated::current->index % 32 / 4, q = emulated::current->index % 4;
    for (int i = 0; i < 4; ++i) {
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const int of_row = 4 * g + k % 8 / 2, of_column = 4 * (2 * q + i % 2) + k % 8 / 2;
            sum += static_cast<double>(half_of(all[i / 2 + k / 8 * 2][of_row], k % 2)) * half_of(all[4 + k / 8][of_column], k % 2);
        }
        c[i] = static_cast<float>(sum);
    }
}

// Of the mega-kernel's parts: one block, so what orders CTAs and ranks has nothing to do.
inline uint32_t thread_index() { return static_cast<uint32_t>(emulated::current->index); }
inline void named_barrier_sync(uint32_t id, uint32_t threads) {
    emulated::Named& named = block().named[id];
    if (static_cast<int>(threads) != named.threads) emulated::fail("a named barrier of another number of threads");
    const int round = named.round;
    ++cluster.progress;
    if (++named.arrived == named.threads) {
        named.arrived = 0;
        ++named.round;
    } else {
        emulated::wait_while(named.round, round);
    }
}
inline uint32_t load_shared_volatile(uint32_t p) { return load_shared_u32(p); }
inline void store_shared_volatile(uint32_t p, uint32_t x) { store_shared_u32(p, x); }
inline uint32_t add_global(void* p, uint32_t x) { return std::exchange(*static_cast<uint32_t*>(p), *static_cast<uint32_t*>(p) + x); }
inline uint32_t add_acquire_release_gpu(void* p, uint32_t x) { return add_global(p, x); }
inline uint32_t add_relaxed_gpu(void* p, uint32_t x) { return add_global(p, x); }
inline void add_release_gpu(void* p, uint32_t x) {
    if (!emulated::current->copies.empty()) emulated::fail("a thread releases before its bulk copies have arrived");
    add_global(p, x);
}
inline void fence_gpu() {}
inline void fence_sys() {}
inline void fence_proxy_async() {}
inline bool elect_one() { return emulated::current->index % 32 == 0; }
inline unsigned long long global_timer() { return 0; }
inline unsigned long long cycle_counter() { return 0; }
inline unsigned long long claim_word_gpu(void*, unsigned long long) { return 0; }
inline uint32_t load_acquire_gpu(const void* p) { return read<uint32_t>(p); }
inline unsigned long long load_acquire_sys(const void* p) { return read<unsigned long long>(p); }
inline uint4 load_relaxed_sys_v4(uint64_t address) { return read<uint4>(reinterpret_cast<const void*>(address)); }
inline void add_relaxed_gpu_void(void* p, uint32_t x) { add_global(p, x); }
inline unsigned long long add_relaxed_gpu_u64(void* p, unsigned long long x) {
    return std::exchange(*static_cast<unsigned long long*>(p), *static_cast<unsigned long long*>(p) + x);
}
inline void fence_mbarrier_init() {}
inline uint32_t pack_bf16x2(float lo, float hi) { return bf16_encode(lo) | static_cast<uint32_t>(bf16_encode(hi)) << 16; }
inline unsigned long long load_relaxed_gpu(const void* p) { return read<unsigned long long>(p); }
inline unsigned long long load_relaxed_sys(const void* p) { return read<unsigned long long>(p); }
inline void store_relaxed_gpu(void* p, unsigned long long x) { std::memcpy(p, &x, sizeof x); }
inline void store_relaxed_sys(void* p, unsigned long long x) { std::memcpy(p, &x, sizeof x); }
inline void store_release_sys(void* p, unsigned long long x) { std::memcpy(p, &x, sizeof x); }
inline void store_global_v4(void* p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) emulated::fail("a 16-byte store at an address that isn't a multiple");
    const uint32_t values[4] = {x, y, z, w};
    std::memcpy(p, values, sizeof values);
}
inline void store_global_u32(void* p, uint32_t x) {
    if (reinterpret_cast<uintptr_t>(p) % 4 != 0) emulated::fail("a 4-byte store at an address that isn't a multiple");
    std::memcpy(p, &x, 4);
}
// A barrier that nobody has initialised holds nobody up, and no bulk copy can report to it. Copies in are made at once.
inline emulated::Barrier* barrier_at(uint32_t p) {
    const auto found = block().barriers.find(p);
    return found == block().barriers.end() ? nullptr : &found->second;
}
inline void settle(emulated::Barrier& barrier) {
    ++cluster.progress;
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    barrier.pending = barrier.count;
    ++barrier.round;
}
inline void mbarrier_init(uint32_t p, uint32_t count) { block().barriers[p] = emulated::Barrier{count, count}; }
inline bool has_passed(uint32_t p, uint32_t parity) {
    const emulated::Barrier* barrier = barrier_at(p);
    return barrier == nullptr || (barrier->round & 1) != parity;
}
// Others go on before it says no: who asks again and again keeps nobody from arriving.
inline bool mbarrier_test(uint32_t p, uint32_t parity) {
    if (!has_passed(p, parity)) swapcontext(&emulated::current->context, &emulated::scheduler);
    return has_passed(p, parity);
}
inline bool mbarrier_try_wait(uint32_t p, uint32_t parity) { return mbarrier_test(p, parity); }
inline void mbarrier_wait(uint32_t p, uint32_t parity) {
    while (!mbarrier_try_wait(p, parity)) {}
}
inline void mbarrier_arrive(uint32_t p) {
    emulated::Barrier* barrier = barrier_at(p);
    if (barrier == nullptr) return;
    if (barrier->pending == 0) emulated::fail("more arrivals at a barrier than its phase has");
    --barrier->pending;
    settle(*barrier);
}
inline void mbarrier_arrive_expect_tx(uint32_t p, uint32_t bytes) {
    emulated::Barrier* barrier = barrier_at(p);
    if (barrier == nullptr) return emulated::fail("a bulk copy");
    barrier->bytes += bytes;
    mbarrier_arrive(p);
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t p) {
    emulated::Barrier* barrier = barrier_at(p);
    if (barrier == nullptr) return emulated::fail("a bulk copy");
    if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) emulated::fail("a bulk copy of no whole 16 bytes");
    if (to + bytes > block().storage.size() - 16) emulated::fail("a bulk copy beyond shared memory");
    std::memcpy(block().shared + to, from, bytes);
    barrier->bytes -= bytes;
    settle(*barrier);
}
inline void tensor_load_2d(uint32_t, const void*, uint32_t, int, int) { emulated::fail("a copy by a tensor map"); }
inline void prefetch_l2(const void*, uint32_t) {}
template <int>
void setmaxnreg_inc() {}
template <int>
void setmaxnreg_dec() {}
template <int>
void wgmma_wait() {}
// A copy out arrives when its thread has waited for that, and not before. When it reads is open until a wait for the reading:
// it may be at once, or then, so that its source must be what it was.
inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
    if (from % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0 || bytes % 16 != 0) emulated::fail("a bulk copy of no whole 16 bytes");
    if (from + bytes > block().storage.size() - 16) emulated::fail("a bulk copy beyond shared memory");
    const uint8_t* source = block().shared + from;
    emulated::current->copies.push_back({to, source, {source, source + bytes}, false, false});
}
inline void bulk_commit() {
    for (emulated::Copy& copy : emulated::current->copies) copy.is_committed = true;
}
inline void bulk_wait_read_all() {
    for (emulated::Copy& copy : emulated::current->copies) {
        if (!copy.is_committed || copy.has_read) continue;
        if (!std::equal(copy.bytes.begin(), copy.bytes.end(), copy.from)) emulated::fail("shared memory changes before a bulk copy has read it");
        copy.has_read = true;
    }
}
inline void bulk_wait_all() {
    bulk_wait_read_all();
    std::erase_if(emulated::current->copies, [](const emulated::Copy& copy) {
        if (copy.is_committed) std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
        return copy.is_committed;
    });
}

}  // namespace megamoe::ptx
