// Copies of Q, and of tiles of keys and values, with cp.async, as pages may have any size.
#pragma once

#include "latent_shape.hpp"

namespace catalog::cuda {

// What a warpgroup copies: a thread has the same piece of 16 bytes of every panel of some rows.
template <class Row, bool partial>
class LatentLoads {
    using Shape = LatentShape<Row>;
    static constexpr int pieces = panel_row_bytes / 16, rows_apart = 128 / pieces, count = Shape::rows / rows_apart;
    static_assert(Shape::rows == Shape::keys && rows_apart % 8 == 0);

   public:
    // `group`: of the warpgroups that sum up.
    __device__ __forceinline__ LatentLoads(const catalog_args& args, const MmaWork<Row, partial>& work,
                                           std::uint32_t shared, int group)
        : args(args), work(work), shared(shared), group(group), row(static_cast<int>(threadIdx.x) % 128 / pieces),
          piece(static_cast<int>(threadIdx.x) % pieces) {}

    // Where a thread's rows of a tile are; those that are not there become zeros.
    struct Places {
        const char* row[count];
        bool exists[count];
    };

    __device__ __forceinline__ void load_queries() const {
        Places places;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int at = row + i * rows_apart;
            places.exists[i] = at < work.rows;
            places.row[i] = reinterpret_cast<const char*>(
                work.template element_of<const std::uint16_t>(args.q, work.row_at(places.exists[i] ? at : 0)));
        }
        copy<Shape::panels>(places, shared, 0, static_cast<int>(args.hdim_q));
        copy_commit();
    }

    // The keys, or values, of the tile that begins at `key`. Those from `end` on, and those that have no page, are not there.
    __device__ __forceinline__ Places find_keys(int key, int end) const {
        return find(args.k, work.grid.k_steps, key, end);
    }
    __device__ __forceinline__ Places find_values(int key, int end) const {
        return find(args.v, work.grid.v_steps, key, end);
    }

    // Copies them to a stage: of the values the panels that the warpgroup sums up, and of keys the same and, by the first
    // group, what is behind the values.
    __device__ __forceinline__ void load_keys(const Places& places, int stage) const {
        load_half_of_keys<0>(places, stage);
        load_half_of_keys<1>(places, stage);
    }

    // The panels of the first half of the columns that the warpgroup sums up, or the others, which complete the stage.
    template <int half>
    __device__ __forceinline__ void load_half_of_keys(const Places& places, int stage) const {
        const std::uint32_t target = shared + Shape::stages + stage * Shape::stage_bytes;
        const int hdim = static_cast<int>(args.hdim_q);
        copy<Shape::panels_of_half>(places, target, group * Shape::panels_of_group + half * Shape::panels_of_half, hdim);
        if constexpr (half == 0) return;
        if (group == 0) copy<Shape::panels - Shape::value_panels>(places, target, Shape::value_panels, hdim);
        copy_arrive(Shape::full(shared, stage, group));
    }

    __device__ __forceinline__ void load_values(const Places& places, int stage) const {
        copy<Shape::panels_of_group>(places, shared + Shape::stages + stage * Shape::stage_bytes,
                                     group * Shape::panels_of_group, static_cast<int>(args.hdim_v));
        copy_arrive(Shape::full(shared, stage, group));
    }

   private:
    __device__ __forceinline__ Places find(const catalog_tensor& tensor, const KvSteps& steps, int key, int end) const {
        const auto* first = rows_of<const std::uint16_t>(tensor, Row::paged_kv ? 0 : work.seq.batch, work.head_k,
                                                         work.seq.first_k);
        Places places;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int at = key + row + i * rows_apart;
            places.exists[i] = at < end;
            places.row[i] = reinterpret_cast<const char*>(first);
            if constexpr (Row::paged_kv) {
                const int index = work.grid.page_size.quotient(at);
                const int page = places.exists[i] ? PageTable<Row>(args, work.seq.index)[index] : -1;
                places.exists[i] = 0 <= page && page < args.num_pages;
                if (places.exists[i])
                    places.row[i] += page * (tensor.stride_batch * 2) +
                                     (at - index * static_cast<int>(work.grid.page_size.divisor)) * steps.row;
            } else if (places.exists[i]) {
                places.row[i] += at * steps.row;
            }
        }
        return places;
    }

    template <int panels>
    __device__ __forceinline__ void copy(const Places& places, std::uint32_t target, int first_panel, int hdim) const {
        target += first_panel * Shape::kv_panel + swizzled(row, piece * 16);
        const int column = first_panel * panel_columns + piece * 8;
#pragma unroll
        for (int panel = 0; panel < panels; ++panel)
#pragma unroll
            for (int i = 0; i < count; ++i)
                copy_async(target + panel * Shape::kv_panel + i * rows_apart * panel_row_bytes,
                           places.row[i] + column * 2 + panel * panel_row_bytes,
                           places.exists[i] && (!Row::pad_d || column + panel * panel_columns < hdim));
    }

    const catalog_args& args;
    const MmaWork<Row, partial>& work;
    const std::uint32_t shared;
    const int group, row, piece;  // the first row
};

// Q, by the warpgroup that weighs; afterwards it is there.
template <class Row, bool partial>
__device__ __forceinline__ void load_latent_queries(const catalog_args& args, const MmaWork<Row, partial>& work,
                                                    std::uint32_t shared) {
    LatentLoads<Row, partial>(args, work, shared, 0).load_queries();
    copy_wait<0>();
    named_barrier_sync(1, 128);
    if (!(args.scale > 0.0f)) {
        rescale_queries<typename Row::dtype>(args, shared, LatentShape<Row>::q_bytes, static_cast<int>(threadIdx.x), 128);
        named_barrier_sync(1, 128);
    }
    fence_proxy_async();
}

}  // namespace catalog::cuda
