// Sequences of different lengths, divided into pieces of work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

namespace catalog::host {

// One of the `chunks` of a sequence, for one of its columns, such as a head.
struct Piece {
    std::int64_t sequence, column, chunk, chunks;
};

// Each sequence has as many pieces as its own length needs, so short ones next to a long one cost only their own work.
class Pieces {
   public:
    std::int64_t size() const { return starts[sequences]; }

    // Order: all columns of a chunk, then the next chunk, then the next sequence.
    Piece operator[](std::int64_t index) const {
        const std::int64_t sequence = std::upper_bound(starts, starts + sequences, index) - starts - 1;
        return {sequence, index % columns, (index - starts[sequence]) / columns,
                (starts[sequence + 1] - starts[sequence]) / columns};
    }

    // Chunks of `chunk` rows, for sequences of rows_of(sequence) rows. False: out of memory.
    template <class RowsOf>
    bool divide(std::int64_t sequences, std::int64_t columns, std::int64_t chunk, RowsOf rows_of) {
        this->sequences = sequences;
        this->columns = columns;
        if (!reserve(sequences + 1)) return false;
        starts[0] = 0;
        for (std::int64_t s = 0; s < sequences; ++s)
            starts[s + 1] = starts[s] + (rows_of(s) + chunk - 1) / chunk * columns;
        return true;
    }

   private:
    // Memory of the calling thread for `count` starts, kept for its next launch.
    bool reserve(std::int64_t count) {
        thread_local std::unique_ptr<std::int64_t[]> room;
        thread_local std::int64_t size = 0;
        if (size < count) {
            room.reset(new (std::nothrow) std::int64_t[count]);
            size = room ? count : 0;
        }
        starts = room.get();
        return size >= count;
    }

    std::int64_t* starts;  // number of pieces before each sequence, then the total
    std::int64_t sequences, columns;
};

}  // namespace catalog::host
