// Prefetching of what a kernel will read next while it computes.
#pragma once

#include <utility>

#include "vector.hpp"

namespace catalog::host {

// Prefetches the cache lines of some rows once each and in order, whatever the order in which the kernel reads: memory
// is half as fast when rows are read in turn.
template <class Source>
class Lines {
    using Data = decltype(std::declval<const Source>()[0]);
    static constexpr int line = 64 / static_cast<int>(sizeof(*Data{}));

   public:
    // Elements 0 to `width` of the rows from `first` to `end`.
    Lines(Source rows, int first, int end, int width) : rows(rows), row(first - 1), end(end), width(width) { next_row(); }

    // Prefetches the next elements, if there are any left.
    void ask(int elements) {
        for (owed += elements; owed >= line && data; owed -= line) {
            prefetch_once(data);
            data += line;
            if (data >= stop) next_row();
        }
    }

   private:
    void next_row() {
        if (++row >= end) return void(data = nullptr);
        data = rows[row];
        stop = data + width;
    }

    const Source rows;
    Data data = nullptr, stop = nullptr;
    int row, owed = 0;
    const int end, width;
};

}  // namespace catalog::host
