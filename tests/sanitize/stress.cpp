// Ranks as threads of one process run random problems through the engine; every output is compared with a plain loop.
// Built with -fsanitize=thread, and with -fsanitize=address,undefined. Prints one line per round and a summary; exit
// status 1 on a wrong result.
//
//   stress [rounds] [ranks] [workers] [seed]
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "engine.h"
#include "megamoe/common/codes.h"
#include "pack.h"

using namespace megamoe;
using namespace megamoe::host;

namespace {

struct Problem {
    LayerConfig config;
    TileShape tile;
    std::vector<u32> tokens;  // per rank
    u32 max_tokens;
};

struct Data {
    std::vector<std::vector<float>> x, weights, out;  // per rank
    std::vector<std::vector<i32>> ids;
    std::vector<float> w13, w2;                    // canonical, FP32, all experts
    std::vector<std::vector<u8>> packed13, packed2;  // per rank
};

Problem random_problem(std::mt19937& random, u32 num_ranks, u32 num_workers) {
    auto pick = [&](std::initializer_list<u32> from) { return *(from.begin() + random() % from.size()); };
    Problem p;
    p.config.hidden = pick({32, 64, 160});
    p.config.intermediate = pick({32, 96, 160});
    p.config.num_experts = num_ranks * pick({1, 2, 4});
    p.config.top_k = 1 + random() % min_of(4, p.config.num_experts);
    p.config.format = WeightFormat::fp32;
    p.config.activation = Activation::silu;
    p.tile = kCpuTile;
    p.tile.block_rows = pick({4, 8});
    p.tile.unit_blocks = pick({1, 2});
    p.tile.l1_columns = 64;
    p.tile.l2_columns = 64;
    p.tile.publish_rows = 4;
    p.tile.combine_rows = 4;
    p.tile.pulls_per_block = pick({1, 2});
    p.tile.lag = pick({0, 1, 3});
    p.tile.ring1_units = min_ring1_units(p.tile.group);
    p.tile = with_rings(p.tile, p.config, num_workers);
    p.max_tokens = 40;
    for (u32 rank = 0; rank < num_ranks; ++rank) p.tokens.push_back(pick({0, 1, 7, 24, 40, 90}));
    return p;
}

float uniform(std::mt19937& random) { return static_cast<float>(random() % 2001) / 1000.0f - 1.0f; }

Data make_data(std::mt19937& random, const Problem& p, u32 num_ranks) {
    const LayerConfig& c = p.config;
    Data d;
    const u64 rows13 = 2ull * c.intermediate;
    d.w13.resize(c.num_experts * rows13 * c.hidden);
    d.w2.resize(static_cast<u64>(c.num_experts) * c.hidden * c.intermediate);
    for (float& w : d.w13) w = uniform(random) * 0.2f;
    for (float& w : d.w2) w = uniform(random) * 0.2f;
    const u32 local = c.num_experts / num_ranks;
    const Layer layer = make_layer(c, num_ranks, p.tile);
    const bool hot = random() % 4 == 0;
    for (u32 rank = 0; rank < num_ranks; ++rank) {
        const u32 tokens = p.tokens[rank];
        std::vector<float> x(static_cast<u64>(tokens) * c.hidden), weights(static_cast<u64>(tokens) * c.top_k);
        std::vector<i32> ids(weights.size());
        for (float& v : x) v = uniform(random);
        for (u64 i = 0; i < ids.size(); ++i) {
            ids[i] = hot ? static_cast<i32>(c.num_experts - 1) : static_cast<i32>(random() % c.num_experts);
            weights[i] = uniform(random);
            if (random() % 8 == 0) {
                ids[i] = -1;
                weights[i] = std::nanf("");
            }
        }
        d.x.push_back(std::move(x));
        d.weights.push_back(std::move(weights));
        d.ids.push_back(std::move(ids));
        d.out.emplace_back(static_cast<u64>(tokens) * c.hidden, std::nanf(""));
        std::vector<u8> packed13(local * layer.w13.code_bytes()), packed2(local * layer.w2.code_bytes());
        const auto* from13 = reinterpret_cast<const u8*>(d.w13.data() + rank * local * rows13 * c.hidden);
        const auto* from2 = reinterpret_cast<const u8*>(d.w2.data() + static_cast<u64>(rank) * local * c.hidden * c.intermediate);
        pack(PackJob{layer.w13, local, from13, nullptr, packed13.data(), nullptr}, 1);
        pack(PackJob{layer.w2, local, from2, nullptr, packed2.data(), nullptr}, 1);
        d.packed13.push_back(std::move(packed13));
        d.packed2.push_back(std::move(packed2));
    }
    return d;
}

// Largest error of a rank's output against a plain loop in double.
double worst_error(const Problem& p, const Data& d, u32 rank) {
    const LayerConfig& c = p.config;
    double worst = 0.0;
    std::vector<double> h(c.intermediate), y(c.hidden);
    for (u32 token = 0; token < p.tokens[rank]; ++token) {
        const float* x = d.x[rank].data() + static_cast<u64>(token) * c.hidden;
        for (double& v : y) v = 0.0;
        for (u32 k = 0; k < c.top_k; ++k) {
            const u64 slot = static_cast<u64>(token) * c.top_k + k;
            const i32 expert = d.ids[rank][slot];
            if (expert < 0) continue;
            for (u32 i = 0; i < c.intermediate; ++i) {
                double gate = 0.0, up = 0.0;
                const float* g = d.w13.data() + (static_cast<u64>(expert) * 2 * c.intermediate + i) * c.hidden;
                const float* u = g + static_cast<u64>(c.intermediate) * c.hidden;
                for (u32 j = 0; j < c.hidden; ++j) gate += double(g[j]) * x[j], up += double(u[j]) * x[j];
                h[i] = gate / (1.0 + std::exp(-gate)) * up;
            }
            for (u32 j = 0; j < c.hidden; ++j) {
                const float* w = d.w2.data() + (static_cast<u64>(expert) * c.hidden + j) * c.intermediate;
                double sum = 0.0;
                for (u32 i = 0; i < c.intermediate; ++i) sum += w[i] * h[i];
                y[j] += d.weights[rank][slot] * sum;
            }
        }
        for (u32 j = 0; j < c.hidden; ++j) {
            const double error = std::abs(d.out[rank][static_cast<u64>(token) * c.hidden + j] - y[j]);
            if (!(error <= worst)) worst = error;  // NaN counts as worst
        }
    }
    return worst;
}

}  // namespace

int main(int argc, char** argv) {
    const u32 rounds = argc > 1 ? std::atoi(argv[1]) : 20;
    const u32 num_ranks = argc > 2 ? std::atoi(argv[2]) : 4;
    const u32 num_workers = argc > 3 ? std::atoi(argv[3]) : 2;
    const u32 seed = argc > 4 ? std::atoi(argv[4]) : 1;
    std::mt19937 random(seed);
    std::vector<Problem> problems;
    std::vector<Data> data;
    WorkspaceLimits limits{num_ranks, 40, 4, 0, 0, 0};
    for (u32 i = 0; i < rounds; ++i) {
        problems.push_back(random_problem(random, num_ranks, num_workers));
        data.push_back(make_data(random, problems.back(), num_ranks));
        const WorkspaceLimits own = limits_of(problems.back().config, num_ranks, 40, problems.back().tile);
        limits.max_experts = max_of(limits.max_experts, own.max_experts);
        limits.max_local_experts = max_of(limits.max_local_experts, own.max_local_experts);
        limits.max_row_blocks = max_of(limits.max_row_blocks, own.max_row_blocks);
    }
    u64 bytes = 0;
    for (const Problem& p : problems) {
        const Layer layer = make_layer(p.config, num_ranks, p.tile);
        bytes = max_of(bytes, DataLayout(ControlLayout(0, limits).end, limits, layer.shape, layer.tile).end);
    }
    std::vector<std::vector<u64>> memory(num_ranks, std::vector<u64>(bytes / 8 + 8));
    std::vector<u64> bases;
    for (auto& m : memory) {
        const u64 base = align_up(reinterpret_cast<u64>(m.data()), kLine);
        // Poison everything but the control region: nothing may be read before it is written.
        const u64 control = ControlLayout(0, limits).end;
        std::memset(pointer_at<u8>(base + control), 0xff, bytes - control);
        bases.push_back(base);
    }

    std::vector<std::thread> threads;
    std::vector<int> failures(num_ranks, 0);
    std::vector<double> worst(num_ranks, 0.0);
    for (u32 rank = 0; rank < num_ranks; ++rank) {
        threads.emplace_back([&, rank] {
            Engine engine(rank, bases, bytes, limits, num_workers, find_isa(""));
            for (u32 round = 0; round < rounds; ++round) {  // no barrier between the calls: ranks run ahead
                const Problem& p = problems[round];
                Data& d = data[round];
                const Layer layer = make_layer(p.config, num_ranks, p.tile);
                ExpertPointers experts;
                experts.w13 = d.packed13[rank].data();
                experts.w2 = d.packed2[rank].data();
                CallArguments call;
                call.x = d.x[rank].data();
                call.ids = d.ids[rank].data();
                call.id_bytes = 4;
                call.weights = d.weights[rank].data();
                call.out = d.out[rank].data();
                call.num_tokens = p.tokens[rank];
                call.timeout_s = 60.0;
                const Outcome outcome = engine.run(layer, experts, call);
                if (outcome.status != Status::ok) {
                    std::fprintf(stderr, "rank %u round %u: status %u phase %u whom %u\n", rank, round,
                                 static_cast<u32>(outcome.status), static_cast<u32>(outcome.phase), outcome.whom);
                    ++failures[rank];
                    return;
                }
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    int failed = 0;
    double top = 0.0;
    for (u32 rank = 0; rank < num_ranks; ++rank) {
        failed += failures[rank];
        for (u32 round = 0; round < rounds && failures[rank] == 0; ++round) {
            const double error = worst_error(problems[round], data[round], rank);
            if (!(error <= 1e-4)) {
                std::fprintf(stderr, "rank %u round %u: error %g\n", rank, round, error);
                ++failed;
            }
            top = error > top ? error : top;
        }
    }
    std::printf("%u rounds, %u ranks x %u workers: %d failures, largest error %.2e\n", rounds, num_ranks, num_workers,
                failed, top);
    return failed == 0 ? 0 : 1;
}
