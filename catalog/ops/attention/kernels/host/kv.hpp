// Access to tiles of K and V: in dense tensors, in pages of a cache, in pages with interleaved elements.
#pragma once

#include <type_traits>

#include "call.hpp"
#include "host/fp8.hpp"
#include "pipeline.hpp"

namespace catalog::host {

// Whether keys and values have factors of their own, in addition to one for the whole tensor.
template <class Row>
inline constexpr bool has_key_scales = Row::qscale == Qscale::blockscale || Row::qscale == Qscale::kv_blockscale;

// The page that holds page number `index` of a sequence.
template <class Row>
inline std::int64_t page_of(const catalog_args& args, std::int64_t sequence, std::int64_t index) {
    if constexpr (Row::kv_lookup_table == KvLookupTable::sglang)
        return list_of<std::int32_t>(args.kv_page_indices)[list_of<std::int32_t>(args.kv_indptr)[sequence] + index];
    else
        return list_of<std::int32_t>(args.block_table)[sequence * args.block_table.stride_batch + index];
}

// Calls body(key, page, slot, count) for every run of keys within one page.
template <class Row, class Body>
inline void for_pages(const catalog_args& args, std::int64_t sequence, std::int64_t first, std::int64_t count,
                      Body body) {
    for (std::int64_t key = first; key < first + count;) {
        const std::int64_t slot = key % args.page_size;
        const std::int64_t run = std::min(args.page_size - slot, first + count - key);
        body(key, page_of<Row>(args, sequence, key / args.page_size), slot, run);
        key += run;
    }
}

// Whether every page of every sequence exists in the cache, and every table is long enough.
template <class Row>
inline bool pages_exist(const catalog_args& args) {
    if constexpr (Row::paged_kv) {
        for (std::int64_t b = 0; b < args.batch; ++b) {
            const std::int64_t length = paged_length<Row>(args, b) + args.seqlen_new;
            const std::int64_t pages = (length + args.page_size - 1) / args.page_size;
            std::int64_t room = args.pages_per_sequence;
            if constexpr (Row::kv_lookup_table == KvLookupTable::sglang) {
                const auto starts = list_of<std::int32_t>(args.kv_indptr);
                room = starts[b] < 0 || starts[b + 1] > args.num_page_indices ? 0 : starts[b + 1] - starts[b];
            }
            if (pages > room) return false;
            for (std::int64_t i = 0; i < pages; ++i) {
                const std::int64_t page = page_of<Row>(args, b, i);
                if (page < 0 || page >= args.num_pages) return false;
            }
        }
    }
    return true;
}

// Elements of T in the 16 bytes that the vectorized layout keeps together.
template <class T>
inline constexpr std::int64_t vector_elements = 16 / sizeof(T);

// Whether a tile's elements are copied before they are read.
template <class Row>
inline constexpr bool is_gathered = Row::kv_memory_layout == KvMemoryLayout::vectorized;

// Rows in pages are wherever the pages are.
template <class Row>
using KvRows = std::conditional_t<Row::paged_kv && !is_gathered<Row>, RowTable<const typename Row::dtype>,
                                  Rows<const typename Row::dtype>>;

// Keys and values of a tile.
template <class Row>
struct KvTile {
    KvRows<Row> keys, values;
    int count;
};

// Memory for a tile whose rows are not equally spaced.
template <class Row>
struct KvRoom {
    using T = typename Row::dtype;

    static constexpr int listed = Row::paged_kv && !is_gathered<Row> ? Row::tile_n0 : 1;
    static constexpr int gathered = is_gathered<Row> ? Row::tile_n0 : 0;

    const T* key_rows[listed];
    const T* value_rows[listed];
    T keys[gathered * Row::hdim_q + 1];
    T values[gathered * Row::hdim_v + 1];
};

template <class Row>
class KvSource {
    using T = typename Row::dtype;

   public:
    KvSource(const catalog_args& args, const Sequence& seq, std::int64_t head) : args(args), seq(seq), head(head) {}

    // The tile of `count` keys from `first` on.
    KvTile<Row> tile(std::int64_t first, int count, KvRoom<Row>& room) const {
        return {keys(first, count, room), values(first, count, room), count};
    }

    // The factor of each key or value, from `first` on.
    void scales(const catalog_tensor& descale, std::int64_t first, int count, float* scales) const {
        const float* of_head = list_of<float>(descale) + head * descale.stride_nhead;
        if constexpr (Row::qscale == Qscale::kv_blockscale) {
            for_pages<Row>(args, seq.index, first, count, [&](auto key, auto page, auto, auto run) {
                std::fill_n(scales + (key - first), run, of_head[page * descale.stride_batch]);
            });
        } else {
            const float* blocks = of_head + seq.index * descale.stride_batch;
            for (int j = 0; j < count; ++j)
                scales[j] = blocks[(first + j) / args.block_scale_size_kv * descale.stride_seqlen];
        }
    }

   private:
    KvRows<Row> keys(std::int64_t first, int count, KvRoom<Row>& room) const {
        if constexpr (is_gathered<Row>)
            return gather(args.k, first, count, args.hdim_q, room.keys, [&](const T* page, auto slot, T* row) {
                constexpr std::int64_t x = vector_elements<T>;
                for (std::int64_t d = 0; d < args.hdim_q; d += x)
                    std::memcpy(row + d, page + (d / x * args.page_size + slot) * x, x * sizeof(T));
            });
        else
            return rows(args.k, first, count, room.key_rows);
    }

    KvRows<Row> values(std::int64_t first, int count, KvRoom<Row>& room) const {
        if constexpr (is_gathered<Row>)
            return gather(args.v, first, count, args.hdim_v, room.values, [&](const T* page, auto slot, T* row) {
                constexpr std::int64_t x = vector_elements<T>;
                const T* column = page + slot / x * args.hdim_v * x + slot % x;
                for (std::int64_t d = 0; d < args.hdim_v; ++d) row[d] = column[d * x];
            });
        else
            return rows(args.v, first, count, room.value_rows);
    }

    const T* page_at(const catalog_tensor& cache, std::int64_t page) const {
        return list_of<T>(cache) + page * cache.stride_batch + head * cache.stride_nhead;
    }

    KvRows<Row> rows(const catalog_tensor& tensor, std::int64_t first, int count, const T** table) const {
        if constexpr (!Row::paged_kv) {
            return rows_of<const T>(tensor, seq.batch, head, seq.first_k).from(first);
        } else {
            for_pages<Row>(args, seq.index, first, count, [&](auto key, auto page, auto slot, auto run) {
                const Rows<const T> of_page{page_at(tensor, page), tensor.stride_seqlen};
                for (std::int64_t i = 0; i < run; ++i) table[key - first + i] = of_page[slot + i];
            });
            return {table};
        }
    }

    template <class Copy>
    Rows<const T> gather(const catalog_tensor& cache, std::int64_t first, int count, std::int64_t hdim, T* gathered,
                         Copy copy) const {
        for_pages<Row>(args, seq.index, first, count, [&](auto key, auto page, auto slot, auto run) {
            for (std::int64_t i = 0; i < run; ++i)
                copy(page_at(cache, page), slot + i, gathered + (key - first + i) * hdim);
        });
        return {gathered, hdim};
    }

    const catalog_args& args;
    const Sequence& seq;
    const std::int64_t head;
};

}  // namespace catalog::host
