// The threads of a launch, and memory that each keeps for the next one.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>

#include "openmp_pool.hpp"

namespace catalog::host {

// The number of threads that the argument struct of an operation asks for.
template <class Args>
inline int threads_for(const Args& args) {
    return args.num_threads > 0 ? args.num_threads : Pool::usable_cores();
}

// Multiplications of a launch that one thread finishes before others could join.
inline constexpr double small_work = 1 << 18;

// Calls body(share) once for each share from 0 to shares - 1, in any order, on at most `threads` threads of the
// process's pool, and returns when all calls have returned. Shares that take longest should come first. What a share
// computes must not depend on `threads` or on the thread: then results do not, either.
template <class Args, class Body>
inline void parallel_for(const Args& args, int threads, std::int64_t shares, Body&& body) {
    if (threads < 2 || shares < 2) {
        for (std::int64_t share = 0; share < shares; ++share) body(share);
        return;
    }
    using Called = std::remove_reference_t<Body>;
    catalog_pool* const pool = args.pool ? args.pool : &own_pool;
    // An exception would leave the launch half done, with other threads at work on it: it ends the process.
    const auto call = [](void* context, std::int64_t share) noexcept { (*static_cast<Called*>(context))(share); };
    pool->run(pool, threads, shares, call, const_cast<std::remove_const_t<Called>*>(&body));
}

// Memory that is aligned to pages of this size consists of such pages, if the system has any: there are fewer addresses to look
// up. On a Xeon, large products take 3 % less time.
inline constexpr std::size_t large_page = 2 << 20;

// Memory that is freed with it. No std::unique_ptr: reading <memory> would take a twentieth of a row's compile time.
class Allocation {
   public:
    Allocation() = default;
    Allocation(const Allocation&) = delete;
    ~Allocation() { std::free(memory); }

    void* get() const { return memory; }

    // Frees what it has, then takes `bytes`, a multiple of `alignment`; nullptr if out of memory.
    void* renew(std::size_t alignment, std::size_t bytes) {
        std::free(memory);
        memory = bytes ? std::aligned_alloc(alignment, bytes) : nullptr;
#if defined(MADV_HUGEPAGE)
        if (memory && alignment >= large_page) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
        return memory;
    }

   private:
    void* memory = nullptr;
};

// The thread's own scratch; nullptr if out of memory.
template <class Memory>
inline Memory* thread_scratch() {
    thread_local Allocation scratch;
    if (!scratch.get() && scratch.renew(alignof(Memory), sizeof(Memory))) new (scratch.get()) Memory;
    return static_cast<Memory*>(scratch.get());
}

// Memory that grows, and is kept for the next use.
template <class Element>
class Room {
   public:
    // Room for `count` elements; nullptr if out of memory. What was in it is lost.
    Element* reserve(std::size_t count) {
        constexpr std::size_t small_page = 4096;
        const std::size_t page = count * sizeof(Element) < 2 * large_page ? small_page : large_page;
        const std::size_t bytes = (count * sizeof(Element) / page + 1) * page;
        if (!memory.get() || size < count) size = memory.renew(page, bytes) ? count : 0;
        return static_cast<Element*>(memory.get());
    }

    // Frees room for more than `count` elements.
    void release_above(std::size_t count) {
        if (size <= count) return;
        memory.renew(0, 0);
        size = 0;
    }

   private:
    Allocation memory;
    std::size_t size = 0;
};

// The calling thread's own room for a purpose.
template <class Purpose, class Element>
inline Room<Element>& thread_room() {
    thread_local Room<Element> room;
    return room;
}

}  // namespace catalog::host
