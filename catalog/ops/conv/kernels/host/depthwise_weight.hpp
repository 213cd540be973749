// The gradient of depthwise weights of three neighbouring taps along a row. All taps of a column of the filter stay in
// registers, so an element is read once for each of them; rows are read in strips, which stay in the first cache until
// the last tap has met them. Strips are taken in chunks, whose sums are added at the end in the same order for any number
// of threads.
#pragma once

#include "multiples.hpp"
#include "narrow.hpp"

namespace catalog::host {

template <class Row>
class DepthwiseGradients {
    using T = typename Row::dtype;
    static constexpr int wide = 3, positions = 2;  // taps of a row; positions that share what they read
    static constexpr std::int64_t strip = 28, blocks_per_item = 128 / vector_bytes;  // two lines of the cache
    static constexpr std::int64_t in_registers = 56;  // positions whose sums stay there

    // Of tensors from this size on, rows are prefetched while those before them are multiplied: a row is read in pieces of
    // two lines, which a CPU does not prefetch. On a Zen 5, that takes 10 to 40 % less time; smaller tensors take 5 % more.
    static constexpr std::int64_t least_bytes_ahead = 16 << 20;
#if defined(__AVX512F__)
    static constexpr bool may_ask = true;
#else
    static constexpr bool may_ask = false;  // not measured
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
            const std::int64_t most = std::max<std::int64_t>(in_registers / (across.end - across.first), 1);
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
        const std::int64_t later_seen = rows * of_h.stride * row, later_made = rows * of_w.count * pixel;
        for (; rows > 0; --rows, seen += of_h.stride * row, made += of_w.count * pixel) {
            const auto add_checked = [&](std::int64_t p) {
                const Float gradient = load(made + p * pixel);
                const std::int64_t w = of_w.origin + p * step;
#pragma GCC unroll 4
                for (int j = 0; j < wide; ++j)
                    if (is_inside(w + j, of_w.extent))
#pragma GCC unroll 4
                        for (int i = 0; i < high; ++i)
                            total[i][j] += load(seen + i * of_h.apart * row + (w + j) * pixel) * gradient;
            };
            std::int64_t p = across.first;
            for (; p < inner; ++p) add_checked(p);
            const T* of_row[high];
#pragma GCC unroll 4
            for (int i = 0; i < high; ++i) of_row[i] = seen + i * of_h.apart * row + (of_w.origin + p * step) * pixel;
            const T* to_row = made + p * pixel;
            for (; p + positions <= end; p += positions, to_row = apart.at(to_row, positions)) {
                Float gradient[positions];
#pragma GCC unroll 4
                for (int n = 0; n < positions; ++n) {
                    gradient[n] = load(apart.at(to_row, n));
                    if constexpr (asks) prefetch_later(apart.at(to_row, n) + later_made);
                }
#pragma GCC unroll 4
                for (int i = 0; i < high; ++i) {
#pragma GCC unroll 8
                    for (int column = 0; column < step * (positions - 1) + wide; ++column) {
                        const Float x = load(apart.at(of_row[i], column));
                        if constexpr (asks)  // rows that the next ones meet and these do not
                            if (i + step >= high && column < step * positions)
                                prefetch_later(apart.at(of_row[i], column) + later_seen);
#pragma GCC unroll 4
                        for (int n = 0; n < positions; ++n)
                            if (column >= n * step && column - n * step < wide)
                                total[i][column - n * step] += x * gradient[n];
                    }
                    of_row[i] = apart.at(of_row[i], positions * step);
                }
            }
            for (; p < across.end; ++p) add_checked(p);
        }
        for_taps([&](int i, int j) {
            float* const at = to + (i * wide + j) * lanes;
            store(at, load(at) + total[i][j]);
        });
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
