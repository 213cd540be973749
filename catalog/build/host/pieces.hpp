// Sequences of different lengths, divided into pieces of work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "threads.hpp"

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
        starts = thread_room<Pieces, std::int64_t>().reserve(sequences + 1);
        if (!starts) return false;
        starts[0] = 0;
        for (std::int64_t s = 0; s < sequences; ++s)
            starts[s + 1] = starts[s] + (rows_of(s) + chunk - 1) / chunk * columns;
        return true;
    }

   private:
    std::int64_t* starts;  // in the calling thread's own room: number of pieces before each sequence, then the total
    std::int64_t sequences, columns;
};

}  // namespace catalog::host
