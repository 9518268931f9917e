// The top-k kernel on a CPU, one row a call.
#include "megamoe/impls/sm90_topk.cuh"

namespace {

using namespace megamoe::impls;

template <typename Value, int kVectors, int kCluster, bool kOrdered>
void kernel(const TopkArgs& args) {
    sm90_topk<Value, THREADS, kVectors, CAPACITY, kCluster, kOrdered>(args, emulated::block().shared);
}

template <typename Value, int kVectors>
auto select(bool is_shared, bool is_ordered) {
    if (is_shared) return is_ordered ? &kernel<Value, kVectors, CLUSTER, true> : &kernel<Value, kVectors, CLUSTER, false>;
    return is_ordered ? &kernel<Value, kVectors, 1, true> : &kernel<Value, kVectors, 1, false>;
}

}  // namespace

// `args` is what the host packs. Returns null, or what went wrong.
extern "C" const char* run_topk(const void* args, int is_bf16, int is_shared, int is_ordered, int row, int seed) {
    const TopkArgs copied = megamoe::ptx::read<TopkArgs>(args);
    const auto body = is_bf16 ? select<Bf16, BF16_VECTORS>(is_shared, is_ordered)
                              : select<float, FP32_VECTORS>(is_shared, is_ordered);
    return emulated::run(is_shared ? CLUSTER : 1, THREADS, sizeof(TopkShared<CAPACITY>), row,
                         static_cast<uint32_t>(seed), [&] { body(copied); });
}
