// The product of a deep K in parts: each part keeps its sums in a workspace, then they are added in order. The workspace is the
// caller's if the number of parts was asked for, otherwise the thread's own.
#pragma once

#include <algorithm>
#include <atomic>

#include "epilogue.hpp"
#include "host/threads.hpp"

namespace catalog::host {

// How K is divided, which depends on nothing else than the sizes and the number of parts wanted.
struct Split {
    static constexpr std::int64_t grain = 256;  // whole vectors of units of every type

    std::int64_t depth, parts;

    explicit Split(const catalog_args& args) : Split(args.k, std::max<std::int64_t>(args.num_splits, 1)) {}

    Split(std::int64_t k, std::int64_t wanted) {
        depth = std::max<std::int64_t>((k / wanted + (k % wanted != 0) + grain - 1) / grain, 1) * grain;
        parts = std::max<std::int64_t>((k + depth - 1) / depth, 1);
    }
};

// The parts of a K that is deep beside C, if nobody asked for a number of them. Threads have little of C to share, and what
// is packed of a part stays in L2. Longer pieces are read faster, which counts where little is multiplied; where C has many
// columns or rows, whole ones are. Measured on a Zen 5.
inline std::int64_t parts_of_deep(const catalog_args& args) {
    constexpr std::int64_t most_sums = 1 << 14, few_sums = 1 << 10, longest = 512;
    if (std::max(args.m, args.n) > longest || args.m * args.n > most_sums) return 1;
    const std::int64_t least = args.m * args.n < few_sums ? 1 << 13 : 1 << 12;
    return args.k < 2 * least ? 1 : Split(args.k, args.k / least).parts;
}

template <class Row>
inline std::int32_t workspace_size(const catalog_args* args, catalog_workspace* size) noexcept {
    if (const catalog_status status = check_abi(args); status != CATALOG_OK) return status;
    if (!size || args->batch < 0 || args->m < 0 || args->n < 0 || args->k < 0) return CATALOG_BAD_ARGUMENT;
    *size = {1, 0};
    if (Row::grouped || args->num_splits < 2) return CATALOG_OK;
    const std::int64_t parts = Split(*args).parts;
    if (parts < 2) return CATALOG_OK;
    std::int64_t bytes = sizeof(float);  // of float and of int32_t
    for (const std::int64_t extent : {parts, args->batch, args->m, args->n})
        if (__builtin_mul_overflow(bytes, extent, &bytes)) return CATALOG_BAD_ARGUMENT;
    *size = {parts, bytes};
    return CATALOG_OK;
}

template <class Row, class Unit, class Product>
class SplitProduct {
    using T = typename Row::dtype;
    using Sum = SumOf<Row, Unit>;
    static constexpr std::int64_t width = 1024;  // columns that are added at a time

    struct Scratch {
        alignas(64) Sum sums[width];
    };

   public:
    // `count` products of the batch from `first` on.
    SplitProduct(const catalog_args& args, std::int64_t first, std::int64_t count, int threads)
        : args(args), split(args), first(first), count(count), threads(threads) {}

    // Not inlined: it is compiled once for parts that were asked for and others.
    __attribute__((noinline)) catalog_status run() {
        if (!args.c_acc.data || split.parts != args.num_splits) return CATALOG_BAD_ARGUMENT;
        const std::int64_t items = count * split.parts;
        const bool apart = items >= most_threads();  // otherwise threads share each part
        parallel_for(args, apart ? threads : 1, items, [&](std::int64_t item) {
            const catalog_args part = part_of(first + item / split.parts, item % split.parts);
            keep(Product(part, 0, apart ? 1 : threads).run());
        });
        if (status != CATALOG_OK) return status;
        const std::int64_t across = (args.n + width - 1) / width;
        const bool is_short = static_cast<double>(items) * static_cast<double>(args.m * args.n) < small_work;
        parallel_for(args, is_short ? 1 : threads, count * args.m * across, [&](std::int64_t item) {
            keep(add(first + item / across / args.m, item / across % args.m, item % across * width));
        });
        return status;
    }

   private:
    void keep(catalog_status of_one) {
        if (of_one != CATALOG_OK) status = of_one;
    }

    // Threads that a part can keep busy. Panels of a tile are divided further, a stream is not.
    std::int64_t most_threads() const {
        if (!Row::streams && !Row::transposes) return threads;
        return std::min<std::int64_t>(threads, Product::tiles(args));
    }

    Sum* sums_of(std::int64_t batch, std::int64_t part) const {
        return static_cast<Sum*>(args.c_acc.data) + (part * count + batch - first) * args.m * args.n;
    }

    // A product of its own, whose sums stay sums: the epilogue sees that there are several parts.
    catalog_args part_of(std::int64_t batch, std::int64_t part) const {
        const std::int64_t first_k = part * split.depth;
        catalog_args of_part = args;
        of_part.batch = 1;
        of_part.k = std::min(split.depth, args.k - first_k);
        of_part.a.data = const_cast<T*>(factor_of<Row::a_along, T>(args.a, batch).from(0, first_k).data);
        of_part.b.data = const_cast<T*>(factor_of<Row::b_along, T>(args.b, batch).from(0, first_k).data);
        of_part.c_acc.data = sums_of(batch, part);
        if constexpr (scales_of<Row> == Scales::block) {
            static_assert(Split::grain % block_extent == 0, "a part begins with a whole block");
            of_part.scale_a.data = data_of<float>(args.scale_a, batch) + first_k / block_extent;
            of_part.scale_b.data = data_of<float>(args.scale_b, batch) + first_k / block_extent;
        }
        return of_part;
    }

    catalog_status add(std::int64_t batch, std::int64_t row, std::int64_t column) const {
        Scratch* const scratch = thread_scratch<Scratch>();
        if (!scratch) return CATALOG_NO_MEMORY;
        const int columns = static_cast<int>(std::min(width, args.n - column));
        std::copy_n(sums_of(batch, 0) + row * args.n + column, columns, scratch->sums);
        for (std::int64_t part = 1; part < split.parts; ++part) {
            const Sum* const more = sums_of(batch, part) + row * args.n + column;
            for (int j = 0; j < columns; ++j) scratch->sums[j] += more[j];
        }
        catalog_args whole = args;
        whole.num_splits = 1;
        finish<Row>(whole, batch, scratch->sums, width, row, column, 1, columns);
        return CATALOG_OK;
    }

    const catalog_args& args;
    const Split split;
    const std::int64_t first, count;
    const int threads;
    std::atomic<catalog_status> status = CATALOG_OK;
};

// A product that is divided of its own accord, if K is deep.
template <class Row, class Unit, class Product>
class InParts {
    using Sum = SumOf<Row, Unit>;

   public:
    static std::int64_t tiles(const catalog_args& args) {
        const std::int64_t parts = parts_of_deep(args);
        return parts > 1 ? parts : Product::tiles(args);
    }

    InParts(const catalog_args& args, std::int64_t batch, int threads) : args(args), batch(batch), threads(threads) {}

    catalog_status run() {
        const std::int64_t parts = parts_of_deep(args);
        if (parts < 2) return Product(args, batch, threads).run();
        Room<Sum>& room = thread_room<struct SumsOfParts, Sum>();
        catalog_args divided = args;
        divided.num_splits = parts;
        divided.c_acc.data = room.reserve(parts * args.m * args.n);
        if (!divided.c_acc.data) return CATALOG_NO_MEMORY;
        const catalog_status status = SplitProduct<Row, Unit, Product>(divided, batch, 1, threads).run();
        room.release_above(kept_units);
        return status;
    }

   private:
    const catalog_args& args;
    const std::int64_t batch;
    const int threads;
};

}  // namespace catalog::host
