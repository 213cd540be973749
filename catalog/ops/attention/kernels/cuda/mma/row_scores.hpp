// What becomes of a row's products before the softmax, wherever a lane has two of every eight keys.
#pragma once

#include "lane_keys.hpp"
#include "mma_work.hpp"

namespace catalog::cuda {

// First keys that queries see although left of the window.
template <class Row, bool partial>
__device__ __forceinline__ int sinks_of(const catalog_args& args, const MmaWork<Row, partial>& work) {
    return Row::sink ? clamp_length(args.sink_size, work.seq.seqlen_k) : 0;
}

// Products of a row of the block with the keys of a lane among `keys`, the first of which is `first`, become scores, -infinity
// where the query does not see the key. `score_at(n, c)` is that of the key first + LaneKeys::offset(n) + c. `hidden`: whether
// there may be keys that the query does not see.
template <int keys, class Row, bool partial, class ScoreAt>
__device__ __forceinline__ void finish_row(const catalog_args& args, const MmaWork<Row, partial>& work,
                                           const Scores<Row>& scores, const Window<Row::mask>& window, int row, int first,
                                           bool hidden, const ScoreAt& score_at) {
    using B = BiasElement<Row>;
    const QueryRow at = work.row_at(row);
    if constexpr (Scores<Row>::finished) {
        // Rows behind the last one read the biases of the last.
        const QueryRow stored = work.row_at(::min(row, work.rows - 1));
        [[maybe_unused]] const B* const biases =
            rows_of<const B>(args.bias, work.seq.batch, work.head_of(stored), work.seq.first_q + stored.query) + first;
        const float slope = Row::bias == Bias::alibi ? slope_of(args, work.seq.index, work.head_of(at)) : 0;
        const int distance = first - window.center(at.query);
#pragma unroll
        for (int n = 0; n < keys / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int column = LaneKeys<Row>::offset(n) + c;
                float& score = score_at(n, c);
                float bias = 0;
                if constexpr (Row::bias == Bias::bias)
                    if (first + column < work.seq.seqlen_k) bias = static_cast<float>(biases[column]);
                score = scores.finish(score, bias, slope, distance + column);
            }
    }
    if (!hidden) return;
    const KeyRange seen = window.visible(at.query);
#pragma unroll
    for (int n = 0; n < keys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = LaneKeys<Row>::offset(n) + c;
            bool before = Row::mask == Mask::generic && column < seen.begin - first;
            if constexpr (Row::sink) before &= column >= sinks_of(args, work) - first;
            if (before || column >= seen.end - first) score_at(n, c) = minus_infinity();
        }
}

}  // namespace catalog::cuda
