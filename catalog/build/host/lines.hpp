// Prefetching of what a kernel will read next while it computes.
#pragma once

#include <algorithm>
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

    // Prefetches at least `count` lines in whole rows.
    void ask_rows(int count) {
        for (const int stop = std::min(row + std::max(count / lines, 1), end); row < stop; ++row) {
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
    void ask_rows(int) {}
};

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
