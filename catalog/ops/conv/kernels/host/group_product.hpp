// Narrow groups in AMX tiles, forward and the gradient of the input: group_shape.hpp. Channels are the last axis.
//
// A line has the columns of a strip of the image, with the zeros around them; strips follow each other in it. Each column has
// some rows of a group next to each other, a layer, which is a row of A: from the next column it is 64 bytes further on. So
// tiles of A are loaded from lines as they lie. Results between the strips are computed in vain.
//
// Zeros of B meet rows of the image that are of no tap. Their products would be NaN where these are not finite. So if any
// result is not finite, the launch is refused, to be computed in another way.
#pragma once

#include <atomic>

#include "group_weights.hpp"
#include "host/blocks.hpp"
#include "row_strip.hpp"

namespace catalog::host {

template <class Row, class Unit, int width>
class GroupProduct {
    using T = typename Row::dtype;
    using Shape = GroupShape<width>;
    static constexpr Direction direction = Row::direction;
    static constexpr bool is_forward = direction == Direction::forward;
    static constexpr int block = Shape::block, groups = Shape::groups, high = Shape::high;
    static constexpr int at_once = 2 * tile_rows, of_tile = tile_units * tile_units;  // positions; units
    static_assert(direction != Direction::bwd_weight && Row::last && Row::in_tiles && holds_neighbours<Unit, T>);
    static constexpr std::int64_t most_apart = 1 << 10, most_elements = 2 << 20;  // taps and positions; of lines
    static constexpr std::int64_t most_blocks = 16;                               // of an item

    // Positions that are computed at once.
    struct Chunk {
        Range strips, columns, blocks;
    };

    // Where a strip is: its first row of results, and its first row of the image.
    struct Strip {
        std::int64_t image, plane, row;
    };

    // Sums of two tiles of positions that are not yet results: where they are, how many, and which position is next. Two
    // buffers take turns.
    struct Sums {
        alignas(64) float both[2][high][at_once * block];
        const float* from = nullptr;
        int buffer = 0, count = 0;
        std::int64_t strip = 0, column = 0;
        T* to[high];
        Float odd{};  // 0 where all sums are finite
    };

   public:
    GroupProduct(const catalog_args& args, const Geometry& of, const Window& of_call, int threads)
        : args(args),
          of(of),
          window{{ascending(of_call.axis[0]), ascending(of_call.axis[1]), ascending(of_call.axis[2])}},
          threads(threads),
          blocks((args.c + block - 1) / block),
          read(image_of<const T, !is_forward>()),
          made(image_of<T, is_forward>()) {
        if (args.c != args.k || args.c / args.g != width || args.c < block || args.n * window.positions() == 0) return;
        for (const Axis& axis : window.axis)
            if (std::max({axis.taps, axis.apart, axis.stride}) > most_apart) return;
        taps = StripOfTaps<width>(of_h);
        divide();
        is_taken = groups * of_group() <= most_elements;
        storing = Storing(made.data, args.n * made.volume() * args.c * static_cast<std::int64_t>(sizeof(T)),
                          least_bytes_around_tiles);
    }

    // CATALOG_UNSUPPORTED: groups of another width, lines that would be too large, or some result is not finite.
    catalog_status run() {
        if (!is_taken) return CATALOG_UNSUPPORTED;
        const std::int64_t most_steps = of_d.taps * taps.layers * of_w.taps;
        std::ptrdiff_t* const along = thread_room<struct TilesOfGroups, std::ptrdiff_t>().reserve(high * most_steps + 1);
        if (!along) return CATALOG_NO_MEMORY;
        std::ptrdiff_t* next = along;
        for (int pair = 0; pair < high; ++pair) {
            tiles_of[pair] = next;
            for_each_step(pair, [&](std::int64_t td, std::int64_t layer, std::int64_t tw) {
                *next++ = ((td * taps.layers + layer) * of_layer + tw * of_w.apart * block) * sizeof(T);
            });
            steps[pair] = static_cast<int>(next - tiles_of[pair]);
        }
        const std::int64_t of_block = 2 * (next - along) * of_tile;
        Unit* const weights = thread_room<struct PackedWeights, Unit>().reserve(blocks * of_block + 1);
        if (!weights) return CATALOG_NO_MEMORY;
        parallel_for(args, threads, blocks, [&](std::int64_t number) { pack_weights(number, weights + number * of_block); });
        parallel_for(args, threads, items, [&](std::int64_t item) {
            T* const lines = thread_room<struct LinesOfGroups, T>().reserve(groups * of_group());
            Sums* const sums = thread_scratch<Sums>();
            if (!lines || !sums) return void(out_of_memory = true);
            const amx::Tiles state;
            const Chunk chunk = chunk_of(item);
            for (std::int64_t number = chunk.blocks.first; number < chunk.blocks.end; ++number) {
                copy_lines(chunk, number, lines);
                multiply_chunk(chunk, number, lines, weights + number * of_block, *sums);
            }
            if (!(reduce_sum(sums->odd) == 0)) finite = false;
            sums->odd = Float{};
            storing.finish();
        });
        return out_of_memory ? CATALOG_NO_MEMORY : finite ? CATALOG_OK : CATALOG_UNSUPPORTED;
    }

   private:
    template <class Element, bool of_output>
    Image<Element> image_of() const {
        if constexpr (of_output)
            return {args.output, of.out, args.k, 1, 0, true};
        else
            return {args.input, of.size, args.c, 1, 0, true};
    }

    // Chunks of about tile_m positions, or fewer if threads have few.
    void divide() {
        columns = evenly(of_w.count, Row::tile_m);
        span = (columns - 1) * of_w.stride + std::max<std::int64_t>(of_w.taps - 1, 0) * of_w.apart + 1;
        const std::int64_t shared = columns == of_w.count ? zeros_around() : 0;
        distance = std::max((span - shared + of_w.stride - 1) / of_w.stride, columns);
        strips_down = (of_h.count + high - 1) / high;
        const std::int64_t strips = args.n * of_d.count * strips_down;
        of_chunk = evenly(strips, std::max<std::int64_t>(Row::tile_m / distance, 1));
        of_part = evenly(blocks, most_blocks);
        column_pieces = (of_w.count + columns - 1) / columns;
        const auto count_items = [&] {
            parts = (blocks + of_part - 1) / of_part;
            items = (strips + of_chunk - 1) / of_chunk * column_pieces * parts;
            return items;
        };
        constexpr int items_per_thread = 4;
        while (count_items() < items_per_thread * threads && threads > 1) {
            if (of_part > 1)
                of_part = (of_part + 1) / 2;
            else if (of_chunk > 1 && of_chunk * distance > at_once)
                of_chunk = (of_chunk + 1) / 2;
            else
                break;
        }
        of_layer = ((of_chunk - 1) * distance * of_w.stride + span + at_once * of_w.stride) * block;
    }

    // How many zeros at the end of a strip may also be those at the beginning of the next.
    std::int64_t zeros_around() const {
        const std::int64_t before = std::max<std::int64_t>(-of_w.origin, 0);
        return std::clamp<std::int64_t>(of_w.origin + span - of_w.extent, 0, before);
    }

    // Elements of the lines of a group.
    std::int64_t of_group() const { return of_d.taps * taps.layers * of_layer; }

    Chunk chunk_of(std::int64_t index) const {
        const Range of_blocks = piece_of(take_from(index, parts), of_part, blocks);
        const Range of_columns = piece_of(take_from(index, column_pieces), columns, of_w.count);
        return {piece_of(index, of_chunk, args.n * of_d.count * strips_down), of_columns, of_blocks};
    }

    Strip strip_of(std::int64_t index) const {
        const std::int64_t row = take_from(index, strips_down) * high, plane = take_from(index, of_d.count);
        return {index, plane, row};
    }

    // The first channel of a block. The last one begins early enough to be whole.
    std::int64_t first_channel(std::int64_t number) const { return std::min(number * block, args.c - block); }

    // Calls body(td, layer, tw) for the steps of the depth of a pair of tiles.
    template <class Body>
    void for_each_step(int pair, Body body) const {
        for (std::int64_t td = 0; td < of_d.taps; ++td)
            for (std::int64_t layer = 0; layer < taps.layers; ++layer)
                for (std::int64_t tw = 0; tw < of_w.taps; ++tw)
                    if (taps.meets(layer, pair)) body(td, layer, tw);
    }

    void pack_weights(std::int64_t number, Unit* to) {
        Unit* const found = thread_room<struct UnitsOfGroups, Unit>().reserve(units_found<width>(window));
        if (!found) return void(out_of_memory = true);
        find_units<is_forward, width, T>(args, of, window, first_channel(number), found);
        for (int pair = 0; pair < high; ++pair)
            for_each_step(pair, [&](std::int64_t td, std::int64_t layer, std::int64_t tw) {
                const Unit* const from = found + (td * of_h.taps * of_w.taps + tw) * Shape::units * block;
                for (int half = 0; half < 2; ++half, to += of_tile)
                    pack_tile<width>(from, of_w.taps, taps, layer, pair, half, to);
            });
    }

    // The lines of a block's groups.
    void copy_lines(const Chunk& chunk, std::int64_t number, T* to) const {
        const T* const from = read.data + first_channel(number);
        const std::int64_t apart = distance * of_w.stride * block;
        for (std::int64_t index = chunk.strips.first; index < chunk.strips.end; ++index, to += apart) {
            const Strip strip = strip_of(index);
            const std::int64_t first = of_h.origin + strip.row * of_h.stride;
            for (std::int64_t td = 0; td < of_d.taps; ++td) {
                const std::int64_t plane = of_d.origin + strip.plane * of_d.stride + td * of_d.apart;
                for (std::int64_t layer = 0; layer < taps.layers; ++layer) {
                    const T* rows[groups];
                    for (int slot = 0; slot < groups; ++slot) {
                        const std::int64_t row = layer * groups + slot, h = first + row;
                        const bool is_met = is_inside(plane, of_d.extent) && is_inside(h, of_h.extent) && row < taps.rows;
                        const std::int64_t pixel = is_met ? read.index(plane, h, 0) * read.all_channels : 0;
                        rows[slot] = is_met ? from + strip.image * read.stride_image + pixel : nullptr;
                    }
                    copy_layer(rows, of_w.origin + chunk.columns.first * of_w.stride,
                               to + (td * taps.layers + layer) * of_layer);
                }
            }
        }
    }

    // A layer of a strip, whose first column is `w`. Rows outside of the image are nullptr.
    void copy_layer(const T* const (&rows)[groups], std::int64_t w, T* to) const {
        const std::int64_t first = std::clamp<std::int64_t>(-w, 0, span), end = std::clamp(of_w.extent - w, first, span);
        const std::int64_t apart = of_group();
        const auto store_column = [&](const Bits(&x)[groups]) {
#pragma GCC unroll 8
            for (int group = 0; group < groups; ++group) std::memcpy(to + group * apart, &x[group], sizeof(Bits));
            to += block;
        };
        const auto copy = [&, channels = read.all_channels](auto checks) {
            std::int64_t at = (w + first) * channels;
            for (std::int64_t i = first; i < end; ++i, at += channels) {
                Bits x[groups];
#pragma GCC unroll 8
                for (int slot = 0; slot < groups; ++slot) {
                    x[slot] = Bits{};
                    if (!checks || rows[slot]) std::memcpy(&x[slot], rows[slot] + at, sizeof(Bits));
                }
                transpose_parts<Shape::units, groups>(x);
                store_column(x);
            }
        };
        for (std::int64_t i = 0; i < first; ++i) store_column({});
        if (std::all_of(rows, rows + groups, [](const T* row) { return row; }))
            copy(std::false_type{});
        else
            copy(std::true_type{});
        for (std::int64_t i = end; i < span; ++i) store_column({});
    }

    void multiply_chunk(const Chunk& chunk, std::int64_t number, const T* lines, const Unit* weights, Sums& sums) const {
        const ScatteredTiles order{static_cast<std::ptrdiff_t>(of_w.stride * block * sizeof(T)), nullptr};
        const std::int64_t last = (chunk.strips.end - chunk.strips.first - 1) * distance;
        const std::int64_t end = last + chunk.columns.end - chunk.columns.first;
        sums.count = 0, sums.strip = 0, sums.column = 0;
        find_rows(chunk, number, sums);
        int all_steps = 0;
        for (const int of_pair : steps) all_steps += of_pair;
        for (std::int64_t p = 0; p < end; p += at_once) {
            const int count = static_cast<int>(std::min<std::int64_t>(end - p, at_once));
            const int share = (sums.count + all_steps - 1) / std::max(all_steps, 1);
            float(&to)[high][at_once * block] = sums.both[sums.buffer];
            const Unit* b = weights;
            for (int pair = 0; pair < high; ++pair) {
                const auto from = [&](int half) {
                    return reinterpret_cast<const std::byte*>(lines + Shape::group(pair, half) * of_group()) + p * order.row;
                };
                const ScatteredTiles of_a{order.row, tiles_of[pair]};
                const auto beside = [&] { finish(chunk, number, share, sums); };
                constexpr bool shares = width == block;
                if (count > tile_rows)
                    multiply_two_columns<2, shares>(from(0), from(1), of_a, steps[pair], b, to[pair], beside);
                else
                    multiply_two_columns<1, shares>(from(0), from(1), of_a, steps[pair], b, to[pair], beside);
                b += 2 * steps[pair] * of_tile;
            }
            finish(chunk, number, sums.count, sums);
            sums.from = to[0], sums.count = count, sums.buffer ^= 1;
        }
        finish(chunk, number, sums.count, sums);
    }

    // Where the next results of a block belong; nullptr: there is no such row.
    void find_rows(const Chunk& chunk, std::int64_t number, Sums& sums) const {
        const auto element = [](const Axis& axis, std::int64_t position) { return axis.first + position * axis.step; };
        const Strip strip = strip_of(chunk.strips.first + sums.strip);
        for (int r = 0; r < high; ++r) {
            const std::int64_t pixel = made.index(element(of_d, strip.plane), element(of_h, strip.row + r),
                                                  element(of_w, chunk.columns.first));
            const std::int64_t at = strip.image * made.stride_image + pixel * made.all_channels + first_channel(number);
            sums.to[r] = strip.row + r < of_h.count ? made.data + at : nullptr;
        }
    }

    // Sums of the next positions become results.
    void finish(const Chunk& chunk, std::int64_t number, int most, Sums& sums) const {
        const int skipped = static_cast<int>(number * block - first_channel(number));  // channels of the block before
        const std::int64_t seen = chunk.columns.end - chunk.columns.first;
        std::int64_t left = std::min(most, sums.count);
        sums.count -= static_cast<int>(left);
        while (left > 0) {
            const std::int64_t run = std::min(left, distance - sums.column);
            const std::int64_t stored = std::clamp<std::int64_t>(seen - sums.column, 0, run);
            if (skipped == 0)
                store_results(stored, sums, [storing = storing](const T* from, T* to) { storing.copy(from, block, to); });
            else
                store_results(stored, sums, [skipped](const T* from, T* to) {
                    std::memcpy(to + skipped, from + skipped, (block - skipped) * sizeof(T));
                });
            left -= run, sums.from += run * block, sums.column += run;
            if (sums.column < distance) continue;
            sums.column = 0, ++sums.strip;
            if (sums.strip < chunk.strips.end - chunk.strips.first) find_rows(chunk, number, sums);
        }
    }

    // Those of some positions of a strip.
    template <class Store>
    [[gnu::always_inline]] void store_results(std::int64_t count, Sums& sums, Store store) const {
        const std::int64_t apart = of_w.step * made.all_channels;
        const float* from = sums.from;
        T* to[high];
        for (int r = 0; r < high; ++r) to[r] = sums.to[r] ? sums.to[r] + sums.column * apart : nullptr;
        Float odd = sums.odd;
        for (std::int64_t i = 0; i < count; ++i, from += block) {
            Bits x[high];
#pragma GCC unroll 4
            for (int pair = 0; pair < high; ++pair) {
                const Float low = load(from + pair * at_once * block), upper = load(from + pair * at_once * block + lanes);
                odd += low * 0.0f + upper * 0.0f;
                x[pair] = pairs_of<Unit>(low, upper);
            }
            if constexpr (Shape::is_half) transpose_parts<Shape::units, high>(x);
#pragma GCC unroll 4
            for (int r = 0; r < high; ++r) {
                if (!to[r]) continue;
                T elements[block];
                std::memcpy(elements, &x[r], sizeof elements);
                store(elements, to[r]);
                to[r] += apart;
            }
        }
        sums.odd = odd;
    }

    const catalog_args& args;
    const Geometry& of;
    const Window window;
    const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
    const int threads;
    const std::int64_t blocks;  // of 32 channels
    const Image<const T> read;
    const Image<T> made;
    StripOfTaps<width> taps;
    std::int64_t columns = 1, span = 1, distance = 1;  // positions of a strip, pixels that they see, positions to the next strip
    std::int64_t strips_down = 1, of_chunk = 1;  // strips
    std::int64_t of_part = 1, parts = 1;         // blocks of channels of an item
    std::int64_t column_pieces = 1, items = 0, of_layer = 0;
    const std::ptrdiff_t* tiles_of[high] = {};  // of A, along the depth of each pair
    int steps[high] = {};
    Storing storing;
    bool is_taken = false;
    std::atomic<bool> out_of_memory = false, finite = true;
};

// The kernel of a row for narrow groups in AMX tiles. CATALOG_UNSUPPORTED: it is for other groups, or some result is not
// finite.
template <class Row, class Unit>
inline catalog_status multiply_groups(const catalog_args& args, const Geometry& of, const Window& window, int threads) {
    const auto multiply = [&](auto width) {
        return GroupProduct<Row, Unit, width>(args, of, window, threads).run();
    };
    switch (args.c / args.g) {
        case 2: return multiply(std::integral_constant<int, 2>{});
        case 4: return multiply(std::integral_constant<int, 4>{});
        case 8: return multiply(std::integral_constant<int, 8>{});
        case 16: return multiply(std::integral_constant<int, 16>{});
        case 32: return multiply(std::integral_constant<int, 32>{});
        default: return CATALOG_UNSUPPORTED;
    }
}

}  // namespace catalog::host
