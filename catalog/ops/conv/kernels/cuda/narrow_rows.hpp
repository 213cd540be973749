// Rows of images that stream through shared memory, for usual filters of groups of at most 8 channels.
//
// A block computes 64 channels of a patch that is one or two runs of 16 positions wide and has many rows. One warp loads
// rows of images as early as there is room; each of eight others has 8 channels. Those read a row from shared memory once,
// for all rows of the filter: what rows before have to do with it, they keep in registers.
#pragma once

#include "narrow_call.hpp"
#include "narrow_shape.hpp"

namespace catalog::cuda {

inline constexpr int narrow_rows_warps = 8, narrow_rows_threads = (narrow_rows_warps + 1) * 32;
inline constexpr int narrow_slots = 24;  // at most

// How a filter meets rows: a row of images has to do with `kept` rows of positions. The same code fits again after `period`
// rows; those of a slot are loaded together.
template <class Shape>
struct NarrowRows {
    static constexpr int kept = (Shape::down + Shape::step - 1) / Shape::step, period = kept * Shape::step;
    static constexpr int of_slot = period * (period < 3 ? 4 / period : 1);

    // Whether a row of a slot meets positions by a row of the filter, and which of those kept.
    static constexpr bool meets(int row, int tap) { return (row - tap + period) % Shape::step == 0; }
    static constexpr int which(int row, int tap) { return (row - tap + period) / Shape::step % kept; }
};

// The rows of a block's patch.
template <class Shape>
struct NarrowStrip : NarrowPatch {
    int rows, met, slots;  // of positions, of images, of these in slots

    __device__ __forceinline__ NarrowStrip(const NarrowCall& call, int index)
        : NarrowPatch(call, index, call.by_patches_across, call.by_patches_down),
          rows(min(call.rows, call.height.count - row)),
          met((rows - 1) * Shape::step + Shape::down),
          slots((met + NarrowRows<Shape>::of_slot - 1) / NarrowRows<Shape>::of_slot) {}
};

// A place of the ring.
struct NarrowSlot {
    std::uint32_t index = 0, parity = 0;

    __device__ __forceinline__ void advance(const NarrowCall& call) {
        if (++index == static_cast<std::uint32_t>(call.stages)) index = 0, parity ^= 1;
    }
};

// The ring: slots of rows, and barriers for when they are loaded and when all warps have done with them.
template <class Shape>
class NarrowRowRing {
    static constexpr int of_slot = NarrowRows<Shape>::of_slot;

   public:
    const std::uint32_t memory, barriers;

    __device__ __forceinline__ NarrowRowRing(const void* memory, const void* barriers)
        : memory(shared_address(memory)), barriers(shared_address(barriers)) {}

    // By one thread; a barrier of the block follows.
    __device__ __forceinline__ void init(const NarrowCall& call) const {
#pragma unroll 1
        for (int i = 0; i < call.stages; ++i) {
            barrier_init(loaded(i), 1);
            barrier_init(done(i), narrow_rows_warps);
        }
        barrier_init_fence();
    }

    __device__ __forceinline__ std::uint32_t loaded(std::uint32_t slot) const { return barriers + 16 * slot; }
    __device__ __forceinline__ std::uint32_t done(std::uint32_t slot) const { return barriers + 16 * slot + 8; }

    __device__ __forceinline__ std::uint32_t row(const NarrowCall& call, std::uint32_t slot, int row) const {
        return memory + (slot * of_slot + row) * call.row_bytes;
    }

    // Loads rows of images from row `first` of a strip on.
    __device__ __forceinline__ void load(const NarrowCall& call, const NarrowStrip<Shape>& strip, std::uint32_t slot,
                                         int first, int channel) const {
        const int top = call.height.origin + Shape::step * strip.row + call.height.lowest() + first;
        const int left = call.width.origin + Shape::step * strip.column + call.width.lowest();
        const int rows = min(of_slot, strip.met - first);
        barrier_arrive_expect(loaded(slot), rows * call.box_width * 128);
#pragma unroll 1
        for (int i = 0; i < rows; ++i)
            tma_load(row(call, slot, i), &call.images_map, loaded(slot), channel, left, top + i, strip.image);
    }
};

}  // namespace catalog::cuda
