// What kernels of narrow groups share: a vector holds channels of whole groups, or of a part of one. Channels are the last
// axis, and each group has as many input as output channels.
#pragma once

#include "host/around.hpp"
#include "host/gemm.hpp"
#include "host/threads.hpp"
#include "host/units.hpp"
#include "image.hpp"

namespace catalog::host {

// How a vector of output channels meets those that it reads: they are its own lanes (depthwise), lanes of its groups, or, if
// it is of one group, single elements.
enum class Reading { own, lanes_of_groups, elements };

// Lane i of the result is lane index[i].
inline Float permute(Float x, Ints index) {
#if !defined(__clang__)
    return __builtin_shuffle(x, index);
#elif defined(__AVX512F__)
    return __builtin_ia32_permvarsf512(x, index);
#elif defined(__AVX2__)
    return __builtin_ia32_permvarsf256(x, index);
#else
    Float result;
    for (int i = 0; i < lanes; ++i) result[i] = x[index[i]];
    return result;
#endif
}

inline Bits permute(Bits x, Ints index) { return (Bits)permute((Float)x, index); }

inline Float splat_element(const float* from) { return splat(*from); }
inline Bits splat_element(const BrainPair* from) { return Bits{} + from->bits; }
inline Float splat_element(const bf16* from) { return (Float)(Bits{} + (std::uint32_t{from->bits} << 16)); }
inline Float splat_element(const fp16* from) { return splat(load_first(from, 1)[0]); }

// A vector of output channels, and what they read. The last vector begins early enough to be whole, if there are as many
// channels: its first lanes are then another's to store.
struct ChannelBlock {
    std::int64_t first, read;  // channels
    int skipped, count;        // lanes

    ChannelBlock(std::int64_t number, std::int64_t channels, std::int64_t width)
        : first(std::clamp<std::int64_t>(channels - lanes, 0, number * lanes)),
          read(first / width * width),
          skipped(static_cast<int>(number * lanes - first)),
          count(static_cast<int>(std::min<std::int64_t>(lanes, channels))) {
        if (width <= lanes) read = first;
    }

    bool is_whole() const { return count == lanes; }

    bool stores_all() const { return skipped == 0 && is_whole(); }

    // Stores the block's own lanes.
    template <class T>
    void store_to(T* to, const T* from) const {
        std::memcpy(to + skipped, from + skipped, (count - skipped) * sizeof(T));
    }
};

// The groups of a call.
template <class T, Reading reading>
struct Groups {
    std::int64_t channels, width;  // of all groups, and of each

    explicit Groups(const catalog_args& args) : channels(args.c), width(args.c / args.g) {
        for (int lane = 0; lane < lanes; ++lane) first_lanes[lane] = lane - lane % static_cast<int>(width);
    }

    std::int64_t blocks() const { return (channels + lanes - 1) / lanes; }
    ChannelBlock block(std::int64_t number) const { return {number, channels, width}; }

    // Channel j of its group in each lane, as a function of the address of a block's channels, of which `count` exist.
    template <class Count>
    auto channel(std::int64_t j, Count count) const {
        if constexpr (reading == Reading::elements)
            return [j](const auto* from) { return splat_element(from + j); };
        else if constexpr (reading == Reading::own)
            return [count](const auto* from) { return load_first(from, count); };
        else
            return [count, index = first_lanes + static_cast<int>(j)](const auto* from) {
                return permute(load_first(from, count), index);
            };
    }

   private:
    Ints first_lanes;  // of the group of each lane
};

// For each tap and each unit of a group's channels, the factors of a block's channels.
template <bool is_forward, class T, Reading reading, class Unit>
inline void pack_factors(const catalog_args& args, const Geometry& of, const Window& window,
                         const Groups<T, reading>& groups, std::int64_t number, Unit* to) {
    constexpr int depth = Units<Unit>::depth;
    const ChannelBlock block = groups.block(number);
    const std::int64_t width = groups.width, stride = args.weight.stride_first;
    const T* first[lanes];  // what each lane multiplies with channel 0 of its group
    for (int lane = 0; lane < block.count; ++lane) {
        const std::int64_t channel = block.first + lane, in_group = channel % width;
        first[lane] = static_cast<const T*>(args.weight.data) +
                      (is_forward ? channel * stride : (channel - in_group) * stride + in_group);
    }
    for_each_tap(window, of, [&](std::int64_t number) {
        const std::int64_t tap = number * width;
        for (std::int64_t j = 0; j < width; j += depth, to += lanes) {
            T row[lanes * depth] = {};
            for (int lane = 0; lane < block.count; ++lane)
                for (int i = 0; i < depth; ++i)
                    row[lane * depth + i] = first[lane][tap + (j + i) * (is_forward ? 1 : stride)];
            store(to, load_along<Unit>(row, lanes * depth));
        }
    });
}

// What a filter reads outside of an image.
template <class T>
inline constexpr T zeros[2 * lanes] = {};

// Positions along an axis whose taps are all inside of the image: from `first` to `end`.
struct Interior {
    std::int64_t first, end;

    explicit Interior(const Axis& axis) {
        const std::int64_t reach = axis.apart * (axis.taps - 1);
        const std::int64_t lowest = axis.origin + std::min<std::int64_t>(reach, 0);
        const std::int64_t highest = axis.origin + std::max<std::int64_t>(reach, 0);
        const std::int64_t free = axis.extent - 1 - highest;
        first = std::min(lowest < 0 ? (-lowest + axis.stride - 1) / axis.stride : 0, axis.count);
        end = std::clamp(free < 0 ? 0 : free / axis.stride + 1, first, axis.count);
    }
};

// The same axis with ascending taps, where those of a gradient descend.
inline Axis ascending(Axis axis) {
    if (axis.apart >= 0) return axis;
    axis.origin += axis.apart * (axis.taps - 1);
    axis.apart = -axis.apart;
    axis.tap += axis.tap_step * (axis.taps - 1);
    axis.tap_step = -axis.tap_step;
    return axis;
}

// Rows of an item that copies rows of the image, where a row has `items`: enough items for all threads, but where one ends,
// rows are copied for the next one again.
inline std::int64_t rows_of_item(std::int64_t items, std::int64_t count) {
    constexpr std::int64_t enough_items = 64, fewest_rows = 4;
    std::int64_t rows = 28;
    while (rows > fewest_rows && items * ((count + rows - 1) / rows) < enough_items) rows /= 2;
    return rows;
}

// Whether images hardly stay in the last cache: then what comes next is prefetched. Hardware does not recognise the order of
// accesses, in which positions of several rows take turns; but nearer caches answer before such requests pay.
template <class T>
inline bool are_large(const catalog_args& args, const Image<T>& one, const Image<T>& other) {
    constexpr std::size_t large_bytes = 16 << 20;
    return args.n * (one.volume() + other.volume()) * args.c * sizeof(T) > large_bytes;
}

// Prefetches some blocks of channels at `positions` positions, `apart` elements from each other.
template <bool for_writing, class T>
inline void ask(const T* from, std::int64_t positions, std::int64_t apart, std::int64_t blocks) {
    constexpr std::int64_t of_line = std::max<std::int64_t>(64 / (lanes * sizeof(T)), 1);
    for (std::int64_t i = 0; i < positions; ++i)
        for (std::int64_t block = 0; block < blocks; block += of_line)
            __builtin_prefetch(from + i * apart + block * lanes, for_writing, 2);
    asm volatile("");  // g++ removes calls of functions that do nothing but prefetch
}

// What kernels of forward and of the gradient of the input have in common: which image they read, which one they make, and
// the factors of all blocks of channels.
template <class Row, Reading reading>
class NarrowConvolution {
    using T = typename Row::dtype;
    static constexpr bool is_forward = Row::direction == Direction::forward;

   protected:
    using Unit = std::conditional_t<Row::in_pairs && reading != Reading::own, BrainPair, float>;  // what is multiplied

    NarrowConvolution(const catalog_args& args, const Geometry& of, const Window& window, int threads,
                      std::int64_t most_bytes_in_cache = 0)
        : args(args),
          of(of),
          window{{ascending(window.axis[0]), ascending(window.axis[1]), ascending(window.axis[2])}},
          threads(threads),
          groups(args),
          taps(window.taps()),
          read(is_forward ? Image<T>(args.input, of.size, args.c, 1, 0, true)
                          : Image<T>(args.output, of.out, args.k, 1, 0, true)),
          made(is_forward ? Image<T>(args.output, of.out, args.k, 1, 0, true)
                          : Image<T>(args.input, of.size, args.c, 1, 0, true)),
          is_large(are_large(args, read, made)),
          storing(made.data, bytes_of(made), std::max<std::int64_t>(8 << 20, most_bytes_in_cache - bytes_of(read))) {}

    std::int64_t bytes_of(const Image<T>& image) const {
        return args.n * image.volume() * image.all_channels * static_cast<std::int64_t>(sizeof(T));
    }

    // False: there is no memory for them.
    bool pack_weights() {
        const std::int64_t blocks = groups.blocks(), of_block = taps * groups.width / Units<Unit>::depth * lanes;
        packed = thread_room<struct PackedWeights, Unit>().reserve(blocks * of_block + 1);
        if (!packed) return false;
        parallel_for(args, threads, blocks, [&](std::int64_t block) {
            pack_factors<is_forward>(args, of, window, groups, block, packed + block * of_block);
        });
        return true;
    }

    const catalog_args& args;
    const Geometry& of;
    const Window window;
    const int threads;
    const Groups<T, reading> groups;
    const std::int64_t taps;
    const Image<T> read, made;
    const bool is_large;
    const Storing storing;
    Unit* packed = nullptr;
};

// Stores the gradients of a block's weights, sums of chunks with `of_block` elements of each block, in the order of chunks.
template <class T, Reading reading>
inline void store_gradients(const catalog_args& args, const Groups<T, reading>& groups, std::int64_t number,
                            const float* sums, std::int64_t of_block, std::int64_t chunks) {
    const ChannelBlock block = groups.block(number);
    const std::int64_t stride = args.weight.stride_first, of_chunk = groups.blocks() * of_block;
    T* const weight = static_cast<T*>(args.weight.data) + block.first * stride;
    for (std::int64_t at = 0; at < of_block / lanes; ++at) {
        const float* const from = sums + number * of_block + at * lanes;
        Float sum = load(from);
        for (std::int64_t chunk = 1; chunk < chunks; ++chunk) sum += load(from + chunk * of_chunk);
        T row[lanes];
        store(row, sum);
        for (int lane = block.skipped; lane < block.count; ++lane) weight[lane * stride + at] = row[lane];
    }
}

// Whether there are rows for PaddedGroups: then other kernels need not be fast for problems that these support.
#if defined(__AVX__)
inline constexpr bool has_padded_rows = true;
#else
inline constexpr bool has_padded_rows = false;
#endif

// The pipeline of a row for narrow groups, which those for pairs share with the others.
enum class Narrow { no, direct, depthwise, padded, pixels, two_rows };

template <class Row>
inline constexpr bool is_depthwise = Row::narrow == Narrow::depthwise || Row::narrow == Narrow::two_rows;

// Calls body(std::integral_constant<Reading, reading>) for the groups of a call.
template <class Row, class Body>
inline catalog_status with_reading(const catalog_args& args, Body body) {
    const std::int64_t width = args.c / args.g;
    if (args.c != args.k) return CATALOG_UNSUPPORTED;
    if constexpr (is_depthwise<Row> || !Row::in_pairs)
        if (width == 1) return body(std::integral_constant<Reading, Reading::own>{});
    if constexpr (!is_depthwise<Row>) {
        if (width == lanes || width == 2 * lanes) return body(std::integral_constant<Reading, Reading::elements>{});
        if (width > 1 && lanes % width == 0) return body(std::integral_constant<Reading, Reading::lanes_of_groups>{});
    }
    return CATALOG_UNSUPPORTED;
}

// Calls body(std::integral_constant<int, step>) for positions whose taps are neighbours and which are 1 or 2 elements apart: they
// share what they read. Step 0: any other axis.
template <class Body>
inline void with_step(const Axis& axis, Body body) {
    if (axis.apart == 1 && axis.stride == 1 && axis.taps > 1)
        body(std::integral_constant<int, 1>{});
    else if (axis.apart == 1 && axis.stride == 2 && axis.taps > 1)
        body(std::integral_constant<int, 2>{});
    else
        body(std::integral_constant<int, 0>{});
}

// Calls body(std::integral_constant<int, some>, first tap) for the taps along an axis, by as many as share what they read.
template <int step, class Body>
inline void for_taps(const Axis& axis, Body body) {
    const int taps = static_cast<int>(axis.taps);
    if constexpr (step == 0)
        for_blocks<1>(0, taps, body);
    else
        for_blocks<3, 1>(0, taps, body);
}

// Whether an element is inside of an axis of an image.
inline bool is_inside(std::int64_t at, std::int64_t extent) {
    return static_cast<std::uint64_t>(at) < static_cast<std::uint64_t>(extent);
}

}  // namespace catalog::host
