// The gradient of depthwise weights of three neighbouring taps along a row. All taps of a column of the filter stay in
// registers, so an element is read once for each of them; rows are read in strips, which stay in the first cache until
// the last tap has met them. Strips are taken in chunks, whose sums are added at the end in the same order for any number
// of threads.
//
// With AVX512-BF16, two neighbouring positions are multiplied at once: bf16 become pairs in one instruction for two vectors,
// and floats in two for each.
#pragma once

#include "multiples.hpp"
#include "narrow.hpp"

namespace catalog::host {

template <class Row>
class DepthwiseGradients {
    using T = typename Row::dtype;
    using Unit = std::conditional_t<Row::in_pairs, BrainPair, float>;
    using Factor = typename Units<Unit>::Vector;
    static constexpr int at_once = Units<Unit>::depth;       // positions that a product adds up
    static constexpr int wide = 3, positions = 2 * at_once;  // taps of a row; positions that share what they read
    static constexpr std::int64_t strip = 28, blocks_per_item = 128 / vector_bytes;  // two lines of the cache

    // Of tensors from this size on, rows are prefetched while those before them are multiplied: a row is read in pieces of
    // two lines, which a CPU does not prefetch. On a Zen 5, that takes 10 to 40 % less time; smaller tensors take 5 % more.
    static constexpr std::int64_t least_bytes_ahead = 16 << 20;
    // Positions whose sums stay in registers. What is prefetched has to stay in the caches until then; smaller tensors take
    // 5 to 20 % less time with all rows of a piece.
    static constexpr std::int64_t few_positions = 56;
#if defined(__AVX512F__)
    static constexpr bool may_ask = true;
    static constexpr std::int64_t many_positions = 784;
#else
    static constexpr bool may_ask = false;  // not measured
    static constexpr std::int64_t many_positions = few_positions;
#endif

   public:
    DepthwiseGradients(const catalog_args& args, const Geometry& of, const Window& window, int threads)
        : args(args),
          window(window),
          threads(threads),
          groups(args),
          taps(window.taps()),
          interior(window.axis[2]),
          input(args.input, of.size, args.c, 1, 0, true),
          output(args.output, of.out, args.k, 1, 0, true),
          asks(may_ask && args.n * (input.volume() + output.volume()) * args.c >=
                              least_bytes_ahead / static_cast<std::int64_t>(sizeof(T))) {}

    // CATALOG_UNSUPPORTED for other rows, and for few channels.
    catalog_status run() {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        if (args.c < lanes || of_w.taps != wide || of_w.apart != 1 || of_w.stride > 2) return CATALOG_UNSUPPORTED;
        constexpr std::int64_t in_chunk = 1 << 22, most_chunks = 16, enough_items = 64;  // products
        const std::int64_t blocks = groups.blocks(), parts = (blocks + blocks_per_item - 1) / blocks_per_item;
        const std::int64_t rows = 28, bands = (of_h.count + rows - 1) / rows, pieces = args.n * of_d.count * bands;
        const std::int64_t most = std::clamp(enough_items / std::max<std::int64_t>(parts, 1), std::int64_t{1}, most_chunks);
        const std::int64_t products = args.n * window.positions() * blocks * taps * lanes;
        chunks = std::clamp<std::int64_t>(products / in_chunk, 1, std::clamp<std::int64_t>(pieces, 1, most));
        sums = thread_room<struct DepthwiseSums, float>().reserve(chunks * blocks * taps * lanes + 1);
        if (!sums) return CATALOG_NO_MEMORY;
        parallel_for(args, threads, chunks * parts, [&](std::int64_t item) {
            const Range part = piece_of(take_from(item, parts), blocks_per_item, blocks);
            float* const to = sums + item * blocks * taps * lanes;
            std::fill(to + part.first * taps * lanes, to + part.end * taps * lanes, 0.0f);
            with_step(of_w, [&](auto step) {
                if constexpr (step > 0)
                    for (std::int64_t piece = item * pieces / chunks; piece < (item + 1) * pieces / chunks; ++piece)
                        add_piece<step>(piece / bands, piece_of(piece % bands, rows, of_h.count), part, to);
            });
        });
        parallel_for(args, threads, blocks, [&](std::int64_t block) {
            store_gradients(args, groups, block, sums, taps * lanes, chunks);
        });
        return CATALOG_OK;
    }

   private:
    // The products of some rows of an image are added to the sums of some blocks of channels.
    template <int step>
    void add_piece(std::int64_t plane, const Range& rows, const Range& part, float* to) const {
        const Axis &of_d = window.axis[0], &of_h = window.axis[1], &of_w = window.axis[2];
        const std::int64_t d = take_from(plane, of_d.count), channels = args.c;
        const T* const seen = input.data + plane * input.stride_image;
        const T* const made = output.data + plane * output.stride_image + output.index(d, 0, 0) * channels;
        const Range deep = of_d.inside(d);
        const std::int64_t strips = std::max<std::int64_t>(of_w.count / strip, 1);
        for (std::int64_t s = 0; s < strips; ++s) {
            const Range across{s * strip, s + 1 < strips ? (s + 1) * strip : of_w.count};
            const std::int64_t of_sums = asks ? few_positions : many_positions;
            const std::int64_t most = std::max<std::int64_t>(of_sums / (across.end - across.first), 1);
            for (std::int64_t h = rows.first, end; h < rows.end; h = end) {
                const Range high = of_h.inside(h);
                const auto meets_alike = [&](const Range& row) { return row.first == high.first && row.end == high.end; };
                for (end = h + 1; end < std::min(h + most, rows.end) && meets_alike(of_h.inside(end));) ++end;
                for (std::int64_t number = part.first; number < part.end; ++number) {
                    const std::int64_t channel = groups.block(number).first;
                    const int first = static_cast<int>(high.first), last = static_cast<int>(high.end);
                    for (std::int64_t td = deep.first; td < deep.end; ++td)
                        for_blocks<3, 2, 1>(first, last, [&](auto some, int th) {
                            const std::int64_t at_d = of_d.origin + d * of_d.stride + td * of_d.apart;
                            const std::int64_t at_h = of_h.origin + h * of_h.stride + th * of_h.apart;
                            const T* const from = seen + input.index(at_d, at_h, 0) * channels + channel;
                            const T* const gradients = made + h * of_w.count * channels + channel;
                            float* const sums_of = to + (number * taps + (td * of_h.taps + th) * wide) * lanes;
                            if (asks)
                                add_rows<step, some, may_ask>(from, gradients, end - h, across, sums_of);
                            else
                                add_rows<step, some, false>(from, gradients, end - h, across, sums_of);
                        });
                }
            }
        }
    }

    // Those of `high` taps down and all across, for some rows from the first elements on.
    template <int step, int high, bool asks>
    [[gnu::noinline]] void add_rows(const T* seen, const T* made, std::int64_t rows, const Range& across, float* to) const {
        const Axis of_h = window.axis[1], of_w = window.axis[2];
        const std::int64_t pixel = args.c, row = of_w.extent * pixel;
        const Multiples apart(pixel * static_cast<std::int64_t>(sizeof(T)));
        const std::int64_t inner = std::clamp(interior.first, across.first, across.end);
        const std::int64_t end = std::clamp(interior.end, inner, across.end);
        Float total[high][wide];  // set one by one: as a whole, they would be set in memory
        const auto for_taps = [](auto body) {
#pragma GCC unroll 4
            for (int i = 0; i < high; ++i)
#pragma GCC unroll 4
                for (int j = 0; j < wide; ++j) body(i, j);
        };
        for_taps([&](int i, int j) { total[i][j] = Float{}; });
        constexpr int columns = step * positions + std::max(wide - step * at_once, 0);
        const std::int64_t later_seen = rows * of_h.stride * row, later_made = rows * of_w.count * pixel;
        for (; rows > 0; --rows, seen += of_h.stride * row, made += of_w.count * pixel) {
            // A position that does not meet a tap is zero in both factors: the other one could be an infinity.
            const auto add_checked = [&](std::int64_t p) {
                const T* const gradients = made + p * pixel;
                const std::int64_t w = of_w.origin + p * step;
#pragma GCC unroll 4
                for (int j = 0; j < wide; ++j) {
                    const bool first = is_inside(w + j, of_w.extent);
                    const bool second = at_once == 2 && p + 1 < across.end && is_inside(w + step + j, of_w.extent);
                    if (!first && !second) continue;
                    const auto factor = [&](const T* of_first, std::int64_t next) {
                        return factor_of(first ? of_first : zeros<T>, second ? of_first + next : zeros<T>);
                    };
                    const Factor gradient = factor(gradients, pixel);
#pragma GCC unroll 4
                    for (int i = 0; i < high; ++i) {
                        const T* const at = seen + i * of_h.apart * row + (w + j) * pixel;
                        Units<Unit>::multiply_add(total[i][j], factor(at, step * pixel), gradient);
                    }
                }
            };
            std::int64_t p = across.first;
            for (; p < inner; p += at_once) add_checked(p);
            const T* of_row[high];
#pragma GCC unroll 4
            for (int i = 0; i < high; ++i) of_row[i] = seen + i * of_h.apart * row + (of_w.origin + p * step) * pixel;
            const T* to_row = made + p * pixel;
            for (; p + positions <= end; p += positions, to_row = apart.at(to_row, positions)) {
                Factor gradient[positions / at_once];
#pragma GCC unroll 4
                for (int n = 0; n < positions; ++n) {
                    const T* const at = apart.at(to_row, n);
                    if (n % at_once == 0) gradient[n / at_once] = factor_of(at, apart.at(to_row, n + 1));
                    if constexpr (asks) prefetch_later(at + later_made);
                }
#pragma GCC unroll 4
                for (int i = 0; i < high; ++i) {
#pragma GCC unroll 16
                    for (int column = 0; column < columns; ++column) {
                        const T* const at = apart.at(of_row[i], column);
                        const Factor x = factor_of(at, apart.at(of_row[i], column + step));
                        if constexpr (asks)  // rows that the next ones meet and these do not
                            if (i + step >= high && column < step * positions) prefetch_later(at + later_seen);
#pragma GCC unroll 4
                        for (int n = 0; n < positions; n += at_once)
                            if (column >= n * step && column - n * step < wide)
                                Units<Unit>::multiply_add(total[i][column - n * step], x, gradient[n / at_once]);
                    }
                    of_row[i] = apart.at(of_row[i], positions * step);
                }
            }
            for (; p < across.end; p += at_once) add_checked(p);
        }
        for_taps([&](int i, int j) {
            float* const at = to + (i * wide + j) * lanes;
            store(at, load(at) + total[i][j]);
        });
    }

    // A vector of channels at a position; in pairs, also those at another one.
    static Factor factor_of(const T* first, [[maybe_unused]] const T* second) {
        if constexpr (at_once == 2)
            return Units<Unit>::across(load_bits<HalfBits>(first), load_bits<HalfBits>(second));
        else
            return load(first);
    }

    const catalog_args& args;
    const Window window;
    const int threads;
    const Groups<T, Reading::own> groups;
    const std::int64_t taps;
    const Interior interior;
    const Image<T> input, output;
    const bool asks;
    std::int64_t chunks = 1;
    float* sums = nullptr;
};

}  // namespace catalog::host
