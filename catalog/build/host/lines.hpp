// Prefetching of what a kernel will read next while it computes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "vector.hpp"

namespace catalog::host {

// Rows that a kernel reads some time after those that it reads now, of `width` elements. Their cache lines are
// prefetched in order, and a few at a time: memory is slower in other orders, and after many prefetches at once.
template <int width, class Source>
class RowsAhead {
    using Data = decltype(std::declval<const Source>()[0]);
    static constexpr int lines = std::max(width * static_cast<int>(sizeof(*Data{})) / 64, 1);

   public:
    RowsAhead(Source rows, int first, int end) : rows(rows), row(first), end(end) {}

    // Prefetches the next line, if there is any left.
    void ask() {
        if (row >= end) return;
        prefetch_line(line);
        if (++line == lines) line = 0, ++row;
    }

    // Prefetches about `count` lines, but whole rows, at least one.
    void ask_lines(int count) { ask_rows(std::max(count / lines, 1)); }

    // Prefetches `count` rows, or those that are left.
    void ask_rows(int count) {
        for (const int stop = std::min(row + count, end); row < stop; ++row) {
#pragma GCC unroll 16
            for (int i = 0; i < lines; ++i) prefetch_line(i);
        }
    }

   private:
    __attribute__((always_inline)) void prefetch_line(int i) const {
        prefetch_once(reinterpret_cast<const char*>(rows[row]) + i * 64);
    }

    Source rows;
    int row, end, line = 0;
};

struct NothingAhead {
    void ask() {}
    void ask_lines(int) {}
    template <int>
    void ask(const void*, int) const {}
    void pass(int) {}
    static constexpr bool is_any() { return false; }
};
inline NothingAhead nothing_ahead;

// What a product reads some time after what it reads now: either `later` bytes after it, line by line, or a piece of
// several rows, `stride` bytes apart, which begins at `piece` and has `width` bytes of each. The body of visit() gets what
// prefetches it.
class DistantLines {
 public:
    DistantLines(std::ptrdiff_t later, const void*, std::ptrdiff_t, std::int64_t) : later(later) {}

    bool is_any() const { return later != 0; }

    // Prefetches as much as number `index` of what is read in one step: `bytes`, which are read at `from`.
    template <int bytes>
    __attribute__((always_inline)) void ask(const void* from, int) const {
        prefetch_later(static_cast<const char*>(from) + later);
    }

    // After a step that read `bytes`.
    void pass(int) {}

    template <class Body>
    void visit(Body body) {
        body(*this);
    }

 private:
    std::ptrdiff_t later;
};

// A piece is prefetched a row after the other. A product reads the rows side by side, in runs too short for a CPU to
// prefetch them well: on a Zen 5, it is 1.05 to 1.9 times as fast with pieces. CPUs that are not AMD's get lines.
class PieceAhead {
 public:
    static constexpr int most_bytes = 2048;  // of a row

    PieceAhead(std::ptrdiff_t later, const void* piece, std::ptrdiff_t stride, std::int64_t width)
        : lines(later, piece, stride, width),
          line(static_cast<const char*>(piece)),
          stride(stride),
          width(static_cast<int>(std::min<std::int64_t>(width, most_bytes))),
          left(this->width) {}

    template <class Body>
    void visit(Body body) {
        if (!prefetches_once()) return lines.visit(body);
        Asker asker{line, stride, width, left};
        body(asker);
        line = asker.line, left = asker.left;
    }

 private:
    struct Asker {
        const char* line;
        std::ptrdiff_t stride;
        int width, left;

        static constexpr bool is_any() { return true; }

        template <int bytes>
        __attribute__((always_inline)) void ask(const void*, int index) const {
            if (index * bytes % 64 != 0) return;
#pragma GCC unroll 4
            for (int i = 0; i < bytes; i += 64) prefetch_past(line + index * bytes + i);
        }

        __attribute__((always_inline)) void pass(int bytes) {
            line += bytes;
            if ((left -= bytes) > 0) return;
            line += stride - (width - left);
            left = width;
        }
    };

    DistantLines lines;
    const char* line;
    std::ptrdiff_t stride;
    int width, left;
};

// Other CPUs were not measured.
#if defined(__AVX512F__)
using ReadAhead = PieceAhead;
#else
using ReadAhead = DistantLines;
#endif

// The memory that is read after the work at hand.
struct ReadNext {
    const char* data;
    std::int64_t bytes;
};

// The same, of which each step of the work prefetches an equal share.
class SharesAhead {
   public:
    SharesAhead(ReadNext next, std::int64_t steps)
        : at(next.data), share(static_cast<int>((next.bytes + steps - 1) / steps)) {}

    __attribute__((always_inline)) void operator()() {
        for (int i = 0; i < share; i += 64) prefetch_later(at + i);
        at += share;
    }

   private:
    const char* at;
    int share;
};

// Two such blocks at once: of both factors of a product.
class BothAhead {
   public:
    BothAhead(ReadNext a, ReadNext b, std::int64_t steps) : of_a(a, steps), of_b(b, steps) {}

    __attribute__((always_inline)) void operator()() {
        of_b();
        of_a();
    }

   private:
    SharesAhead of_a, of_b;
};

// What a thread does at each step of a product: nothing.
struct NothingBeside {
    template <class... At>
    void operator()(const At&...) const {}
};

// The most elements of a row that a product reads before it goes on to another piece.
#if defined(__AVX512F__)
template <class T>
inline constexpr int most_ahead = PieceAhead::most_bytes / static_cast<int>(sizeof(T));
#else
template <class T>
inline constexpr int most_ahead = 1 << 30;
#endif

// Prefetches as many lines as are read when reading some bytes for the time number `index`.
template <int bytes, class Ahead>
__attribute__((always_inline)) inline void ask_alike(Ahead& ahead, int index) {
    if (bytes >= 64) {
#pragma GCC unroll 16
        for (int line = 0; line < bytes / 64; ++line) ahead.ask();
    } else if (index % (64 / bytes) == 0) {
        ahead.ask();
    }
}

}  // namespace catalog::host
