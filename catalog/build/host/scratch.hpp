// Working memory of one thread, laid out at compile time from the row's tiles and reused by every call.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "kv.hpp"
#include "pack.hpp"
#include "softmax.hpp"

namespace catalog::host {

template <class Row>
struct Scratch {
    static_assert(Row::warp_n0 % lanes == 0 && Row::warp_n1 % lanes == 0, "a register block is whole vectors wide");
    static_assert(Row::tile_n0 % Row::warp_n0 == 0, "a tile is whole register blocks wide");
    static_assert(Row::tile_n0 % 16 == 0, "a tile starts where the random numbers of a dropout do");
    static_assert(Row::tile_m0 > 0 && Row::warp_m0 > 0 && Row::warp_m1 > 0);

    static constexpr int depth = round_up(Row::hdim_q, lanes);
    static constexpr int columns = round_up(Row::hdim_v, Row::warp_n1);

    // A packed K/V tile serves all query rows of a work item: as many as keep Q and O within half of a 512 KiB L2.
    static constexpr int row_bytes = (depth + columns) * static_cast<int>(sizeof(float));
    static constexpr int item_tiles = std::max(1, (256 << 10) / (row_bytes * Row::tile_m0));
    static constexpr int item_rows = item_tiles * Row::tile_m0;

    static constexpr int gathered_keys = Row::paged_kv ? Row::tile_n0 : 0;
    static constexpr int scaled_keys = has_key_scales<Row> ? Row::tile_n0 : 0;

    alignas(64) float q[item_rows][depth];
    alignas(64) float o[item_rows][columns];
    alignas(64) float k[Row::tile_n0 * depth];
    alignas(64) float v[Row::tile_n0 * columns];
    alignas(64) float s[Row::tile_m0][Row::tile_n0];
    RowState state[item_rows];
    float rescale[Row::tile_m0];
    typename Row::dtype gathered_k[gathered_keys * Row::hdim_q + 1];
    typename Row::dtype gathered_v[gathered_keys * Row::hdim_v + 1];
    float k_scales[scaled_keys + 1];
    float v_scales[scaled_keys + 1];
};

// This thread's own; nullptr when there is no memory.
template <class Memory>
inline Memory* thread_scratch() {
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    thread_local std::unique_ptr<Memory, Free> scratch;
    if (!scratch) {
        void* memory = std::aligned_alloc(alignof(Memory), sizeof(Memory));
        if (memory) scratch.reset(new (memory) Memory);
    }
    return scratch.get();
}

}  // namespace catalog::host
