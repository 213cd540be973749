// The threads of a launch, and memory that each keeps for the next one.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace catalog::host {

// The number of threads that the argument struct of an operation asks for.
template <class Args>
inline int threads_for([[maybe_unused]] const Args& args) {
#if defined(_OPENMP)
    return args.num_threads > 0 ? args.num_threads : omp_get_max_threads();
#else
    return 1;
#endif
}

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};

// The thread's own scratch; nullptr if out of memory.
template <class Memory>
inline Memory* thread_scratch() {
    thread_local std::unique_ptr<Memory, Free> scratch;
    if (!scratch) {
        void* memory = std::aligned_alloc(alignof(Memory), sizeof(Memory));
        if (memory) scratch.reset(new (memory) Memory);
    }
    return scratch.get();
}

// Memory of the calling thread for `count` elements, which the next call with the same Use returns again; nullptr if out
// of memory.
template <class Use, class Element>
inline Element* thread_room(std::size_t count) {
    constexpr std::size_t page = 4096;
    thread_local std::unique_ptr<Element, Free> room;
    thread_local std::size_t size = 0;
    if (size < count) {
        room.reset();
        size = (count * sizeof(Element) + page - 1) / page * page;
        room.reset(static_cast<Element*>(std::aligned_alloc(page, size)));
        size = room ? size / sizeof(Element) : 0;
    }
    return room.get();
}

}  // namespace catalog::host
