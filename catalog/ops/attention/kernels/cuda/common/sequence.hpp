// Where one sequence lies in the tensors, and how long it is. What memory says of that is clamped to what is stored, so
// that nothing outside of a tensor is touched, whatever the memory holds.
#pragma once

#include <cstdint>

#include "call.hpp"
#include "cuda/divisor.hpp"

namespace catalog::cuda {

// `batch` is the sequence's place along the batch axis, 0 in group mode; `index` its number in both modes.
struct Sequence {
    int batch, index;
    std::int64_t first_q, first_k;  // first token; 0 in batch mode
    int seqlen_q, seqlen_k;
};

__device__ __forceinline__ int clamp_length(std::int64_t length, std::int64_t most) {
    return static_cast<int>(max(std::int64_t{0}, min(length, most)));
}

__device__ __forceinline__ int length_of(const catalog_tensor& lengths, int index, int stored) {
    return lengths.data ? clamp_length(static_cast<const std::int32_t*>(lengths.data)[index], stored) : stored;
}

// The queries of a sequence; its keys are none.
template <class Row>
__device__ __forceinline__ Sequence queries_of(const catalog_args& args, int index) {
    Sequence seq{index, index, 0, 0, static_cast<int>(args.seqlen_q), 0};
    if constexpr (Row::mode == Mode::group) {
        const std::int64_t first = args.seqstart_q[index], end = args.seqstart_q[index + 1];
        seq.batch = 0;
        seq.first_q = max(std::int64_t{0}, min(first, args.tokens_q));
        seq.seqlen_q = clamp_length(min(end, args.tokens_q) - seq.first_q, args.seqlen_q);
    }
    seq.seqlen_q = length_of(args.seqlens_q, index, seq.seqlen_q);
    if constexpr (Row::skip_min_seqlen_q)
        if (seq.seqlen_q <= args.min_seqlen_q) seq.seqlen_q = 0;
    return seq;
}

// The keys in the pages of a sequence. `Args`, here and below: catalog_args, or a struct with these members of it.
template <class Row, class Args>
__device__ __forceinline__ int paged_length(const Args& args, int index) {
    if constexpr (Row::kv_lookup_table == KvLookupTable::sglang) {
        const auto* starts = static_cast<const std::int32_t*>(args.kv_indptr.data) + index;
        const std::int64_t pages = std::int64_t{starts[1]} - starts[0];
        const std::int64_t last = static_cast<const std::int32_t*>(args.kv_last_page_lens.data)[index];
        return pages > 0 ? clamp_length((pages - 1) * args.page_size + last, args.seqlen_k) : 0;
    } else {
        const std::int64_t room = min(args.seqlen_k, args.pages_per_sequence * args.page_size);
        return length_of(args.seqlens_k, index, static_cast<int>(room));
    }
}

// The numbers of a sequence's pages, in order. What a table says need not be a page that there is.
template <class Row>
class PageTable {
    static constexpr bool listed = Row::kv_lookup_table == KvLookupTable::sglang;

   public:
    template <class Args>
    __device__ __forceinline__ PageTable(const Args& args, int sequence) {
        if constexpr (listed) {
            pages = static_cast<const std::int32_t*>(args.kv_page_indices.data);
            first = static_cast<const std::int32_t*>(args.kv_indptr.data)[sequence];
            end = args.num_page_indices;
        } else {
            pages = static_cast<const std::int32_t*>(args.block_table.data) + sequence * args.block_table.stride_batch;
        }
    }

    __device__ __forceinline__ int operator[](int index) const {
        if constexpr (!listed) return pages[index];
        const std::int64_t place = first + index;
        return 0 <= place && place < end ? pages[place] : -1;
    }

   private:
    const std::int32_t* pages;
    std::int64_t first, end;
};

template <class Row>
__device__ __forceinline__ Sequence sequence_of(const catalog_args& args, int index) {
    Sequence seq = queries_of<Row>(args, index);
    if constexpr (Row::paged_kv) {
        seq.seqlen_k = paged_length<Row>(args, index);
    } else {
        seq.seqlen_k = static_cast<int>(args.seqlen_k);
        if constexpr (Row::mode == Mode::group) {
            seq.first_k = max(0, args.seqstart_k[index]);
            seq.seqlen_k = clamp_length(args.seqstart_k[index + 1] - seq.first_k, args.seqlen_k > 0 ? most_tokens : 0);
        }
        seq.seqlen_k = length_of(args.seqlens_k, index, seq.seqlen_k);
    }
    return seq;
}

// The rows of one head of one sequence; `first` is a token.
template <class Element>
__device__ __forceinline__ Element* rows_of(const catalog_tensor& tensor, int batch, int head, std::int64_t first,
                                            int split = 0) {
    return static_cast<Element*>(tensor.data) + (split * tensor.stride_split + batch * tensor.stride_batch +
                                                 head * tensor.stride_nhead + first * tensor.stride_seqlen);
}

// A query, and its head among those that share a K/V head. Rows count the heads fastest: the rows of a tile see nearly
// the same keys, and the heads of one decode step fill one tile.
struct QueryRow {
    int query, head;
};

__device__ __forceinline__ QueryRow query_row(int row, const Divisor& heads) {
    const int query = heads.quotient(row);
    return {query, row - query * static_cast<int>(heads.divisor)};
}

}  // namespace catalog::cuda
