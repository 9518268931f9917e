// Instances of the product kernels for measurement: -DKIND=ss|rs by macros.
#include "megamoe/impls/sm90_grouped_gemm_rs.cuh"
#include "megamoe/impls/sm90_grouped_gemm_ss.cuh"
#include "megamoe/impls/sm90_row_ranges.cuh"
using namespace megamoe;
using namespace megamoe::mma;
constexpr auto kGranularity = TOKEN ? ScaleGranularity::kToken : ScaleGranularity::kBlock128;
#ifdef TOK
using P = RsPolicy<kGranularity, TOK, STAGES>;
#define BODY sm90_grouped_gemm_rs
constexpr int kThreads = 640;
#else
using P = SsPolicy<FP4 ? WeightFormat::kFp4 : WeightFormat::kFp8, kGranularity, MB, NB, STAGES>;
#define BODY sm90_grouped_gemm_ss
constexpr int kThreads = 128 * (2 + P::kOtherWarpgroups);
#endif
__device__ int smem_bytes = P::kSmemBytes;
extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm(const __grid_constant__ impls::GroupedGemmArgs args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    int* table = reinterpret_cast<int*>(smem + P::kSmemBytes);
    impls::BODY<P>(args, smem, table);
}
extern "C" __global__ void row_ranges(const int* row_groups, int num_rows, int num_groups, int* starts, int* ends) {
    impls::sm90_row_ranges(row_groups, num_rows, num_groups, starts, ends);
}
