// How a block of multi-head latent attention is divided: one warpgroup weighs the keys of a tile, and two sum up values, each
// half of the columns of O. All have the same 64 rows of Q.
#pragma once

#include "cuda/mma/row_scores.hpp"
#include "cuda/ring.hpp"
#include "cuda/wgmma.hpp"

namespace catalog::cuda {

// The row of a kernel of this folder.
template <class Traits>
struct LatentRow : Traits {};

template <class Traits>
inline constexpr bool neighbours_share_keys<LatentRow<Traits>> = true;

// Shared memory where threads copy: Q, two stages of keys or values, and the weights of a tile, all in panels (see
// wgmma.hpp); then a number for each row that goes from those who weigh to those who sum up, and barriers.
template <class Row>
struct LatentShape {
    static constexpr int hdim_q = Row::hdim_q, hdim_v = Row::hdim_v, rows = Row::tile_m0, keys = Row::tile_n0;
    static constexpr int summing = Row::wave_n1, threads = 128 * (1 + summing), columns = hdim_v / summing;
    static constexpr int panels = hdim_q / panel_columns, value_panels = hdim_v / panel_columns;
    static constexpr int panels_of_group = value_panels / summing, panels_of_half = panels_of_group / 2;

    static constexpr int q_panel = rows * panel_row_bytes, kv_panel = keys * panel_row_bytes;
    static constexpr int q_bytes = panels * q_panel, stage_bytes = panels * kv_panel;
    static constexpr int note_bytes = rows * 4;
    static constexpr int stages = q_bytes, weights = stages + 2 * stage_bytes, notes = weights + rows * panel_row_bytes;
    static constexpr int barriers = notes + note_bytes, shared_bytes = barriers + (2 * summing + 2) * 8;

    // Barriers: what a warpgroup copies of a stage is there; the weights of a tile are; its values are summed up.
    static __device__ __forceinline__ std::uint32_t full(std::uint32_t shared, int stage, int group) {
        return shared + barriers + (stage * summing + group) * 8;
    }
    static __device__ __forceinline__ std::uint32_t weighed(std::uint32_t shared) { return full(shared, 2, 0); }
    static __device__ __forceinline__ std::uint32_t summed(std::uint32_t shared) { return full(shared, 2, 1); }

    static_assert(rows == 64 && Row::wave_m0 == 4 && Row::wave_n0 == 1 && keys == panel_columns && hdim_v < hdim_q);
    static_assert(hdim_q % panel_columns == 0 && columns % (2 * panel_columns) == 0 && columns <= 512);
    static_assert(shared_bytes <= 227 * 1024);

    // What the host computes of the copies.
    struct Steps {
        static KvSteps steps_of(const catalog_args&, const catalog_tensor& tensor) {
            return {tensor.stride_seqlen * 2, 0, 0};
        }
    };
    using KCopy = Steps;
    using VCopy = Steps;
};

// Where TMA loads, two warpgroups weigh, each the tiles of one stage. Shared memory: Q, and two stages of keys. The weights
// of a tile take the place of its keys' last panel, which is no value. Then numbers for each row, and barriers.
template <class Row>
struct LatentTmaShape : LatentShape<Row> {
    using Base = LatentShape<Row>;
    static constexpr int weighing = 2, threads = 128 * (weighing + Base::summing);
    static constexpr int last_panel = Base::panels - 1;

    // Numbers that those who sum up multiply O with, for a tile of either stage and at the end; the largest scores so far,
    // after a tile of either stage; the sums of those who weigh the second stage, and the scores that these are relative to.
    enum Note { rescale_first, rescale_second, normalize, max_first, max_second, second_sum, second_max, notes_end };
    static constexpr int notes = Base::stages + 2 * Base::stage_bytes, barriers = notes + notes_end * Base::note_bytes;
    static constexpr int shared_bytes = barriers + (2 * Base::panels + 8) * 8;

    static __device__ __forceinline__ std::uint32_t panel(std::uint32_t shared, int stage, int number) {
        return shared + Base::stages + stage * Base::stage_bytes + number * Base::kv_panel;
    }
    // Keys are multiplied panel by panel, in the order in which these come: those who sum up load theirs at the same time.
    static constexpr int panel_in_turn(int turn) {
        return turn == last_panel ? turn : turn % Base::summing * Base::panels_of_group + turn / Base::summing;
    }

    static __device__ __forceinline__ std::uint32_t weights(std::uint32_t shared, int stage) {
        return panel(shared, stage, last_panel);
    }
    static __device__ __forceinline__ std::uint32_t note(std::uint32_t shared, int number) {
        return shared + notes + number * Base::note_bytes;
    }

    // Barriers: a panel of a stage is there; the largest scores of a stage are; its weights are; nobody reads these any more.
    // Named ones: 1 and 2 of a warpgroup that weighs, 3 and 4 of one that sums up, 5 of both that weigh.
    static __device__ __forceinline__ std::uint32_t full(std::uint32_t shared, int stage, int number) {
        return shared + barriers + (stage * Base::panels + number) * 8;
    }
    static __device__ __forceinline__ std::uint32_t behind_panels(std::uint32_t shared, int number) {
        return full(shared, 2, number);
    }
    static __device__ __forceinline__ std::uint32_t compared(std::uint32_t shared, int stage) {
        return behind_panels(shared, stage);
    }
    static __device__ __forceinline__ std::uint32_t weighed(std::uint32_t shared, int stage) {
        return behind_panels(shared, 2 + stage);
    }
    static __device__ __forceinline__ std::uint32_t summed(std::uint32_t shared, int stage) {
        return behind_panels(shared, 4 + stage);
    }
    // What is written after the last tile: by those who weigh the second stage; the numbers of the end.
    static __device__ __forceinline__ std::uint32_t second_ended(std::uint32_t shared) { return behind_panels(shared, 6); }
    static __device__ __forceinline__ std::uint32_t ended(std::uint32_t shared) { return behind_panels(shared, 7); }

    // By one thread.
    static __device__ __forceinline__ void init(std::uint32_t shared) {
        constexpr int threads = 128;  // of a warpgroup: each arrives for itself, then nothing rests on the order within a warp
        for (int stage = 0; stage < 2; ++stage) {
            for (int i = 0; i < Base::panels; ++i) barrier_init(full(shared, stage, i), 1);
            barrier_init(compared(shared, stage), threads);
            barrier_init(weighed(shared, stage), threads);
            barrier_init(summed(shared, stage), threads * Base::summing);
        }
        barrier_init(second_ended(shared), threads);
        barrier_init(ended(shared), threads);
        barrier_init_fence();
    }

    static_assert(Base::panels == Base::value_panels + 1 && Base::rows == Base::keys && Base::panels_of_group == 4);
    static_assert(shared_bytes <= 227 * 1024);
};

// The tiles that some row of a block sees, and the keys that all of them see, sinks aside.
template <class Row>
struct LatentRange {
    static constexpr int keys = LatentShape<Row>::keys;

    int begin, end;
    KeyRange all;
    KeyRange gap;  // between sinks and window: begins and ends with a tile

    template <bool partial>
    __device__ __forceinline__ LatentRange(const catalog_args& args, const MmaWork<Row, partial>& work,
                                           const Window<Row::mask>& window)
        : gap{0, 0} {
        const KeyRange first_row = window.visible(work.row_at(0).query);
        const KeyRange last_row = window.visible(work.row_at(work.rows - 1).query);
        const KeyRange some = seen_by_some(first_row, last_row);
        all = seen_by_all(first_row, last_row);
        begin = some.begin / keys * keys;
        // Of the mask of a split its first key is left out, so a split without keys must not have a tile.
        const bool in_window = some.begin < some.end;
        end = in_window ? some.end : begin;
        if constexpr (Row::sink) {
            const int first = work.keys(args).begin, of_sinks = min(sinks_of(args, work), some.end);
            const int sinks = in_window ? min(of_sinks, begin) : of_sinks;
            if (first >= sinks) return;
            gap = {(sinks + keys - 1) / keys * keys, begin};
            begin = first;
            if (!in_window) end = sinks;
        }
    }

    // The tile behind the one that begins at `key`.
    __device__ __forceinline__ int after(int key) const {
        key += keys;
        if constexpr (Row::sink)
            if (gap.begin <= key && key < gap.end) return gap.end;
        return key;
    }
};

// The thread's two rows of the accumulators of a warpgroup; see wgmma.hpp.
__device__ __forceinline__ int row_of_thread(int half) {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4;
}

}  // namespace catalog::cuda
