// A convolution as a product of packed panels. Weights are packed before, images by the tile when a thread multiplies it.
#pragma once

#include <atomic>

#include "host/around.hpp"
#include "host/blocks.hpp"
#include "image.hpp"
#include "row_strip.hpp"
#include "weights.hpp"

namespace catalog::host {

// A factor of a product: a matrix whose columns are the depth (`along`), or whose rows are. `kept`: all of it is packed
// before it is multiplied.
template <bool along_, bool kept_, class Matrix_>
struct Operand {
    static constexpr bool along = along_, kept = kept_;
    using Matrix = Matrix_;
};

// What the directions multiply: A has the rows of the result, B its columns.
template <class Row, Direction = Row::direction, bool = Row::last>
struct Operands;

template <class Row, Direction direction>
using WeightsOf = std::conditional_t<direction == Direction::forward, Weights<typename Row::dtype>,
                                     TransposedWeights<typename Row::dtype, Row::last>>;

// Positions x channels.
template <class Row, Direction direction>
struct Operands<Row, direction, true> {
    using A = Operand<true, false, ImageOfRows<typename Row::dtype>>;
    using B = Operand<direction == Direction::forward, true, WeightsOf<Row, direction>>;
};

// Channels x positions.
template <class Row, Direction direction>
struct Operands<Row, direction, false> {
    using A = Operand<true, true, WeightsOf<Row, direction>>;
    using B = Operand<false, false, ImageOfColumns<typename Row::dtype>>;
};

// Output channels x the other axes of a weight; the depth is positions.
template <class Row>
struct Operands<Row, Direction::bwd_weight, true> {
    using A = Operand<false, false, ImageOfRows<typename Row::dtype>>;
    using B = A;
};

template <class Row>
struct Operands<Row, Direction::bwd_weight, false> {
    using A = Operand<true, false, ImageOfColumns<typename Row::dtype>>;
    using B = A;
};

template <class Traits>
struct TiledRow : Traits {
    static constexpr bool a_along = Operands<Traits>::A::along;
};

template <class Traits, class Unit>
class WindowProduct {
    using Row = TiledRow<Traits>;
    using T = typename Row::dtype;
    using Result = typename Row::otype;
    using Sum = std::conditional_t<std::is_same_v<typename Units<Unit>::Sum, Float>, float, std::int32_t>;
    using Block = Blocks<Row, Unit>;
    using A = typename Operands<Traits>::A;
    using B = typename Operands<Traits>::B;
    static constexpr bool last = Row::last;
    static constexpr Direction direction = Row::direction;
    static constexpr int factors = Block::factors, panel = Block::panel, step = Block::step;
    static constexpr int tile_m = Row::tile_m, tile_n = Row::tile_n, tile_k = Row::tile_k;
    static constexpr std::int64_t a_step = Block::a_step;
    // Whether the result is rows of channels, which may be stored without being summed up in memory first. Panels of one vector
    // would not be whole lines.
    static constexpr bool makes_rows = last && direction != Direction::bwd_weight && (Row::in_tiles || panel > lanes);
    // The depth up to which rows of a matrix are multiplied in place: longer ones come from memory too late.
    static constexpr int most_in_place = Row::in_tiles ? 512 : 128;
    static constexpr int widest = std::max(tile_m, panel), gap = 16;
    template <class Of>
    static constexpr int room_stride = (Of::along ? tile_k : widest) + gap;

    // The gradient of a weight often has few tiles, and always a great depth. Parts of a tile would pack the same images;
    // so threads share the depth, of which a part has at least that many steps. The number of parts does not depend on the
    // number of threads.
    static constexpr std::int64_t most_shares = 32, least_steps = 4;

    // Rows and columns of a group's product.
    struct Tile {
        std::int64_t group, row, column;
        int rows, columns;
    };

    struct Scratch {
        static constexpr int row_s = tile_n + gap;
        alignas(64) Sum sums[tile_m * row_s];
        alignas(64) Unit a[a_step];
        alignas(64) Unit b[panel * step];
        alignas(64) T room[(widest + gap) * (tile_k + gap)];
    };
    static constexpr std::int64_t sums_of_tile = std::int64_t{tile_m} * Scratch::row_s;

   public:
    WindowProduct(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : args(args),
          of(of),
          window(window),
          threads(threads),
          channels_in(args.c / args.g),
          channels_out(args.k / args.g) {
        const std::int64_t positions = args.n * window.positions();
        const std::int64_t read = direction == Direction::bwd_data ? channels_out : channels_in;
        const std::int64_t seen = window.taps() * read, made = channels_in + channels_out - read;
        m = direction == Direction::bwd_weight ? channels_out : last ? positions : made;
        n = direction == Direction::bwd_weight ? seen : last ? made : positions;
        k = direction == Direction::bwd_weight ? positions : seen;
        constexpr int whole = factors * Block::whole;
        units = (k + whole - 1) / whole * Block::whole;
        steps = (units + step - 1) / step;
        const catalog_tensor& computed = direction == Direction::forward    ? args.output
                                         : direction == Direction::bwd_data ? args.input
                                                                            : args.weight;
        const std::int64_t bytes = args.g * m * n * static_cast<std::int64_t>(sizeof(Result));
        storing = Row::in_tiles ? Storing(computed.data, bytes, least_bytes_around_tiles) : Storing(computed.data, bytes);
        if constexpr (makes_rows) {
            const Image<Result> image = result(0);
            const bool lines = image.channels % lanes == 0 && image.all_channels % lanes == 0;
            const bool images_follow = args.n == 1 || image.stride_image == image.volume() * image.all_channels;
            stores_rows = steps == 1 && window.is_dense() && images_follow &&
                          (Row::in_tiles || lines || !storing.is_around());
        }
        if constexpr (direction == Direction::bwd_weight) {
            const std::int64_t tiles = args.g * ((m + tile_m - 1) / tile_m) * ((n + tile_n - 1) / tile_n);
            parts = std::max<std::int64_t>(std::min(most_shares / std::max<std::int64_t>(tiles, 1), steps / least_steps), 1);
        }
    }

    catalog_status run() {
        if (m == 0 || n == 0) return CATALOG_OK;
        const std::int64_t tiles = (m + tile_m - 1) / tile_m, panels = (n + panel - 1) / panel;
        const std::int64_t of_group = A::kept ? tiles * steps * a_step : B::kept ? panels * panel * units : 0;
        Room<Unit>& room = thread_room<struct PackedWeights, Unit>();
        kept = room.reserve(args.g * of_group + 1);
        if (!kept) return CATALOG_NO_MEMORY;
        parallel_for(args, threads, of_group ? args.g * (A::kept ? tiles : panels) * steps : 0, [&](std::int64_t task) {
            const std::int64_t index = task / steps, at = task % steps;
            with_scratch([&](Scratch& scratch) {
                if constexpr (A::kept)
                    pack_a(scratch, index / tiles, index % tiles * tile_m, tile_m, at, kept + task * a_step);
                else if constexpr (B::kept)
                    pack_b(scratch, index / panels, index % panels * panel, at,
                           kept + (index * units + at * step) * panel);
            });
        });
        const Division<Row> division(args.g, m, n, parts > 1 ? 1 : threads);
        const std::int64_t items = args.g * division.items();
        Sum* all_sums = nullptr;
        if (parts > 1) {
            all_sums = thread_room<struct SumsOfParts, Sum>().reserve(parts * items * sums_of_tile);
            if (!all_sums) return CATALOG_NO_MEMORY;
        }
        const auto tile_of = [&](std::int64_t item) {
            const std::int64_t group = item / division.items(), of_group = item % division.items();
            const std::int64_t row = of_group % division.down * division.item_rows;
            const std::int64_t column = of_group / division.down * division.item_columns;
            return Tile{group, row, column, static_cast<int>(std::min<std::int64_t>(division.item_rows, m - row)),
                        static_cast<int>(std::min<std::int64_t>(division.item_columns, n - column))};
        };
        parallel_for(args, threads, items * parts, [&](std::int64_t share) {
            const std::int64_t item = share / parts, part = share % parts;
            with_scratch([&](Scratch& scratch) {
                [[maybe_unused]] const typename Block::State state;
                const Tile tile = tile_of(item);
                const Unit* const of_tile = kept + tile.group * of_group;
                if constexpr (makes_rows)
                    if (stores_rows) return store_panels(scratch, tile, of_tile);
                Sum* const sums = parts > 1 ? all_sums + share * sums_of_tile : scratch.sums;
                multiply_tile(scratch, tile, of_tile, steps * part / parts, steps * (part + 1) / parts, sums);
                if (parts == 1) store_tile(sums, tile);
            });
        });
        if (parts > 1) {
            constexpr int slice = lanes, slices = tile_m / slice;
            parallel_for(args, threads, items * slices, [&](std::int64_t task) {
                Tile tile = tile_of(task / slices);
                const int first = static_cast<int>(task % slices) * slice;
                tile.row += first;
                tile.rows = std::min(tile.rows - first, slice);
                add_parts(all_sums + task / slices * parts * sums_of_tile + first * Scratch::row_s, tile);
            });
        }
        constexpr std::size_t most_units = 16 << 20;  // that stay in memory for the next launch
        room.release_above(most_units);
        return out_of_memory ? CATALOG_NO_MEMORY : CATALOG_OK;
    }

   private:
    template <class Body>
    void with_scratch(Body body) {
        if (Scratch* const scratch = thread_scratch<Scratch>())
            body(*scratch);
        else
            out_of_memory = true;
    }

    template <class Element>
    Image<Element> input(std::int64_t group) const {
        return {args.input, of.size, args.c, args.g, group, last};
    }

    template <class Element>
    Image<Element> output(std::int64_t group) const {
        return {args.output, of.out, args.k, args.g, group, last};
    }

    template <class Element>
    Element* weight(std::int64_t group) const {
        return static_cast<Element*>(args.weight.data) + group * channels_out * args.weight.stride_first;
    }

    template <class Matrix>
    Matrix matrix(std::int64_t group) const {
        if constexpr (std::is_same_v<Matrix, Weights<T>>)
            return {weight<const T>(group), args.weight.stride_first};
        else if constexpr (std::is_same_v<Matrix, TransposedWeights<T, last>>)
            return {window, of, weight<const T>(group), args.weight.stride_first, channels_in, channels_out};
        else if constexpr (direction == Direction::bwd_data)
            return {window, output<const T>(group)};
        else
            return {window, input<const T>(group)};
    }

    // `count` rows or columns of an operand, and a step of its depth: in place, or copied to `room`, `stride` apart.
    template <class Of, class Matrix>
    Factor<Of::along, T> part(const Matrix& matrix, std::int64_t first, std::int64_t count, std::int64_t at, T* room,
                              std::int64_t stride) const {
        const std::int64_t begin = at * tile_k, depth = depth_of(at);
        const Rows<const T> rows = Of::along ? matrix.block(first, count, begin, depth, room, stride)
                                             : matrix.block(begin, depth, first, count, room, stride);
        return {rows.data, rows.stride};
    }

    std::int64_t depth_of(std::int64_t at) const { return std::min<std::int64_t>(tile_k, k - at * tile_k); }
    int units_of(std::int64_t at) const { return static_cast<int>(std::min<std::int64_t>(step, units - at * step)); }

    void pack_a(Scratch& scratch, std::int64_t group, std::int64_t row, std::int64_t rows, std::int64_t at,
                Unit* to) const {
        const int count = static_cast<int>(std::min(rows, m - row));
        const auto pack = [&](const auto& matrix) {
            constexpr std::int64_t plain = Block::template plain_distance<T>();
            T* const room = plain ? reinterpret_cast<T*>(to) : scratch.room;
            const auto from = part<A>(matrix, row, count, at, room, plain ? plain : room_stride<A>);
            if (!plain || from.data != room) return Block::pack_a(from, count, depth_of(at), to);
            const int depth = static_cast<int>(depth_of(at)), whole = round_up(depth, factors * Block::whole);
            if (A::along && whole > depth)
                for (int i = 0; i < count; ++i) std::fill(room + i * plain + depth, room + i * plain + whole, T{});
        };
        if constexpr (direction == Direction::bwd_weight)
            pack(typename A::Matrix(itself, output<const T>(group)));
        else
            pack(matrix<typename A::Matrix>(group));
    }

    void pack_b(Scratch& scratch, std::int64_t group, std::int64_t column, std::int64_t at, Unit* to) const {
        const int count = static_cast<int>(std::min<std::int64_t>(panel, n - column));
        const auto matrix = this->template matrix<typename B::Matrix>(group);
        constexpr bool plain = !B::along && factors == 1 && holds_neighbours<Unit, T>;
        T* const room = plain ? reinterpret_cast<T*>(to) : scratch.room;
        const auto from = part<B>(matrix, column, count, at, room, plain ? panel : room_stride<B>);
        if (!plain || from.data != room)
            pack_panel<Unit, panel>(from, count, depth_of(at), units_of(at), to);
        else if (count < panel)
            for (std::int64_t i = 0; i < depth_of(at); ++i) std::fill(room + i * panel + count, room + (i + 1) * panel, T{});
    }

    // A step of the rows of a tile of A: in place, or packed.
    auto rows_of_a(Scratch& scratch, const Tile& tile, std::int64_t at) const {
        if constexpr (Block::template plain_distance<T>() > 0 && Block::any_distance) {
            const bool whole = k % (factors * Block::whole) == 0 && (!Row::in_tiles || tile.rows % lanes == 0);
            if (k <= most_in_place && whole) {
                const auto matrix = this->template matrix<typename A::Matrix>(tile.group);
                const auto from = part<A>(matrix, tile.row, tile.rows, at, reinterpret_cast<T*>(scratch.a),
                                          Block::template plain_distance<T>());
                const bool aligned = reinterpret_cast<std::uintptr_t>(from.data) % alignof(Unit) == 0;
                if (aligned && from.stride % factors == 0)
                    return typename Block::RowsOfA{reinterpret_cast<const Unit*>(from.data), from.stride / factors};
            }
        }
        pack_a(scratch, tile.group, tile.row, tile.rows, at, scratch.a);
        return Block::packed(scratch.a);
    }

    // The sums of a tile whose depth is one step become rows of the result. Those of a panel that is not whole are stored by
    // way of the sums. Not inlined: in one function with multiply_tile(), g++ keeps sums in memory.
    __attribute__((noinline)) void store_panels(Scratch& scratch, Tile tile, const Unit* kept) const {
        const auto a = rows_of_a(scratch, tile, 0);
        const Image<Result> image = result(tile.group);
        const std::int64_t apart = image.all_channels;
        const int depth = static_cast<int>(units);
        if constexpr (Row::in_tiles) {
            auto& strip = *new (scratch.sums) RowStrip<Row, Unit>;
            static_assert(sizeof strip <= sizeof scratch.sums);
            const int most_rows = strip.rows_for(tile.columns);
            for (int i = 0; i < tile.rows; i += most_rows) {
                const int rows = std::min(tile.rows - i, most_rows);
                Result* const to = image.data + (tile.row + i) * apart + tile.column;
                strip.multiply(a.data + i * a.apart, tiles_of_rows(a.apart), rows, kept + tile.column * units,
                               panel * units, depth, tile.columns, {storing.is_around() ? nullptr : to, apart});
                strip.store(0, rows, to, apart, storing);
            }
        } else {
            for (; tile.columns > 0; tile.column += panel, tile.columns -= panel) {
                Result* const to = image.data + tile.row * apart + tile.column;
                const Unit* const b = kept + tile.column * units;
                const bool whole = tile.columns >= panel;
                Block::multiply(a, tile.rows, b, depth, [&, whole, sums = scratch.sums](int i, int j, auto sum) {
                    if (whole)
                        storing.store_whole(to + i * apart + j, sum);
                    else
                        store(sums + i * panel + j, sum);
                });
                for (int i = 0; !whole && i < tile.rows; ++i)
                    store_run(scratch.sums + i * panel, tile.columns, to + i * apart);
            }
        }
        storing.finish();
    }

    // The sums of a tile, over some steps of the depth.
    void multiply_tile(Scratch& scratch, const Tile& tile, const Unit* kept, std::int64_t first_step,
                       std::int64_t end_step, Sum* sums) const {
        constexpr int row_s = Scratch::row_s;
        const int width = round_up(tile.columns, panel), skipped = A::kept ? static_cast<int>(tile.row % tile_m) : 0;
        if (first_step == end_step)
            for (int i = 0; i < tile.rows; ++i) std::fill_n(sums + i * row_s, width, Sum{});
        for (std::int64_t at = first_step; at < end_step; ++at) {
            const auto a = [&] {
                if constexpr (A::kept)
                    return kept + (tile.row / tile_m * steps + at) * a_step;
                else if constexpr (Row::in_tiles)
                    return rows_of_a(scratch, tile, at);
                else
                    return pack_a(scratch, tile.group, tile.row, tile.rows, at, scratch.a), scratch.a;
            }();
            for (int j = 0; j < width; j += panel) {
                const Unit* b = kept + (tile.column + j) * units + at * step * panel;
                if constexpr (!B::kept) pack_b(scratch, tile.group, tile.column + j, at, scratch.b), b = scratch.b;
                Block::template multiply<row_s>(at > first_step, a, skipped, tile.rows, b, units_of(at), sums + j);
            }
        }
    }

    // Adds the parts of a tile's sums, in order, and stores them; those of the first part are overwritten.
    void add_parts(Sum* sums, const Tile& tile) const {
        for (int i = 0; i < tile.rows; ++i)
            for (int j = 0; j < tile.columns; j += lanes) {
                Sum* const to = sums + i * Scratch::row_s + j;
                auto sum = load(to);
                for (std::int64_t part = 1; part < parts; ++part) sum += load(to + part * sums_of_tile);
                store(to, sum);
            }
        store_tile(sums, tile);
    }

    // The image that is computed.
    Image<Result> result(std::int64_t group) const {
        return direction == Direction::forward ? output<Result>(group) : input<Result>(group);
    }

    // Calls visit(i, channels) for each row of a tile of positions, with the channels of the result there.
    template <class Visit>
    void each_position(const Tile& tile, Visit visit) const {
        const Image<Result> image = result(tile.group);
        Position position(window, tile.row);
        for (int i = 0; i < tile.rows; ++i, position.advance(window, 1)) {
            const auto at = [&](int axis) { return window.axis[axis].first + position.at[axis] * window.axis[axis].step; };
            visit(i, image.data + position.image * image.stride_image +
                         image.index(at(0), at(1), at(2)) * image.all_channels);
        }
    }

    // Sums become a tile of the result.
    void store_tile(const Sum* sums, const Tile& tile) const {
        constexpr int row_s = Scratch::row_s;
        if constexpr (direction == Direction::bwd_weight) {
            const std::int64_t stride = args.weight.stride_first;
            Result* const to = weight<Result>(tile.group) + tile.row * stride + tile.column;
            for (int i = 0; i < tile.rows; ++i) store_run(sums + i * row_s, tile.columns, to + i * stride);
        } else if constexpr (last) {
            each_position(tile, [&](int i, Result* channels) {
                store_run(sums + i * row_s, tile.columns, channels + tile.column);
            });
        } else {
            const Image<Result> image = result(tile.group);
            const auto index = [&](const Position& at) {
                const auto of_axis = [&](int i) { return window.axis[i].first + at.at[i] * window.axis[i].step; };
                return image.index(of_axis(0), of_axis(1), of_axis(2));
            };
            Position position(window, tile.column);
            const std::int64_t apart = window.axis[2].step;
            for (int j = 0; j < tile.columns;) {
                const int count =
                    static_cast<int>(std::min<std::int64_t>(window.axis[2].count - position.at[2], tile.columns - j));
                Result* const to = image.data + position.image * image.stride_image + index(position);
                for (int i = 0; i < tile.rows; ++i)
                    store_run(sums + i * row_s + j, count, to + (tile.row + i) * image.volume(), apart);
                j += count;
                position.advance(window, count);
            }
        }
        storing.finish();
    }

    void store_run(const Sum* sums, int count, Result* to, std::int64_t apart = 1) const {
        for (int j = 0; j < count; j += lanes) {
            if (apart == 1) {
                storing.store(to + j, load(sums + j), count - j);
            } else {
                Result some[lanes];
                store(some, load(sums + j));
                for (int i = 0; i < std::min(lanes, count - j); ++i) to[(j + i) * apart] = some[i];
            }
        }
    }

    const catalog_args& args;
    const Geometry& of;
    const Window& window;
    const Window itself = identity_window(of.out);
    const int threads;
    const std::int64_t channels_in, channels_out;
    std::int64_t m, n, k, units, steps, parts = 1;
    Storing storing;
    bool stores_rows = false;
    Unit* kept;
    std::atomic<bool> out_of_memory = false;
};

}  // namespace catalog::host
