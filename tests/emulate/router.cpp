// The router's kernels on a CPU: logits by a cluster a call, routing by a block a call.
#include "megamoe/impls/sm90_route.cuh"
#include "megamoe/impls/sm90_router_logits.cuh"

namespace {

using namespace megamoe::impls;

template <bool kFp32, int kTiles, int kSteps>
const char* logits(const RouterLogitsArgs& args, int row, uint32_t seed) {
    const size_t bytes = sizeof(RouterLogitsShared<kTiles, WARPS>);
    return emulated::run(CLUSTER, 32 * WARPS, bytes, row, seed, [&] {
        sm90_router_logits<kFp32, kTiles, WARPS, CLUSTER, kSteps>(args, emulated::block().shared);
    });
}

}  // namespace

// `args` is what the host packs. Returns null, or what went wrong. LOGITS_INSTANCES: X(name, kFp32, kTiles, kSteps) of all.
#define X(name, fp32, tiles, steps)                                                                                 \
    extern "C" const char* name(const void* args, int row, int seed) {                                              \
        const RouterLogitsArgs copied = megamoe::ptx::read<RouterLogitsArgs>(args);                                 \
        return logits<fp32, tiles, steps>(copied, row, static_cast<uint32_t>(seed));                                \
    }
LOGITS_INSTANCES
#undef X

// ROUTE_SHAPES: X(name, threads of a block, arguments of sm90_route) of all.
#define X(name, threads, ...)                                                                                       \
    extern "C" const char* name(const void* args, int row, int seed) {                                              \
        const RouteArgs copied = megamoe::ptx::read<RouteArgs>(args);                                               \
        const auto body = [&] { sm90_route<__VA_ARGS__>(copied); };                                                 \
        return emulated::run(1, threads, 0, row, static_cast<uint32_t>(seed), body);                                \
    }
ROUTE_SHAPES
#undef X
