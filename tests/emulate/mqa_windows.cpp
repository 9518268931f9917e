// The windows of MQA logits on a CPU.
#include "megamoe/impls/mqa_logits_tasks.cuh"

using namespace megamoe::impls;

namespace {

template <bool kPaged>
KeyWindow window(const MqaArgs& args, int batch, int row) {
    return mqa_window<MqaPolicy<8, 32, 1, 1, 2, false, 2, 2, 2, kPaged, false, false>>(args, batch, row);
}

}  // namespace

// Writes start and length of every row. Not paged: `next_n` is 0 and `batches` are rows; `compressed`: column 0 is a
// row's first key. Paged: `of_rows`: a length for each row.
extern "C" void find_windows(const int* starts, const int* ends, int batches, int next_n, int num_keys,
                             int num_columns, int compressed, int of_rows, int* found) {
    MqaArgs args{};
    args.starts = starts, args.ends = ends, args.num_rows = batches, args.next_n = next_n;
    args.num_keys = num_keys, args.num_columns = num_columns;
    args.compressed = compressed, args.lengths_of_rows = of_rows;
    const int each = next_n == 0 ? 1 : next_n;
    for (int i = 0; i < batches * each; ++i) {
        const KeyWindow w = next_n == 0 ? window<false>(args, 0, i) : window<true>(args, i / each, i % each);
        found[2 * i] = w.start, found[2 * i + 1] = w.length;
    }
}
