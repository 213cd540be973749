// The threads of an OpenMP runtime that the process computes with anyway, such as PyTorch's, as a pool. After its own work
// such a runtime keeps its threads spinning for milliseconds, and threads of another pool would get no core meanwhile.
//
// A runtime ends threads that a team has no use for, and starts them again for a larger one, which takes longer than small
// launches do. So a launch asks for the team that the others have, too, and leaves threads idle that it does not need.
//
// But a launch waits until each of them has had a core. Where that takes long, because threads of others keep the cores,
// the library's own pool computes for a while, unless that turns out to be slower.
#pragma once

#include <sys/resource.h>

#include <utility>

#include "pool.hpp"

namespace catalog::host {

class OpenMPPool : public catalog_pool {
   public:
    // GOMP_parallel of GNU's runtime, which LLVM's and Intel's have, too: calls what it is given on each thread.
    using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
    // omp_get_max_threads, of a team for which no number is given; omp_get_thread_num, which is 0 on the calling thread.
    using Number = int (*)();

    constexpr OpenMPPool() : catalog_pool{&OpenMPPool::enter} {}

    // Null: the library's own pool computes. So it is in a forked child, where the runtime has lost its threads.
    std::atomic<Parallel> parallel{nullptr};
    std::atomic<Number> max_threads{nullptr}, thread_number{nullptr};

   private:
    using Body = void (*)(void* context, std::int64_t share);

    static constexpr std::int64_t waking_ns = 500'000;  // threads may take this long to wake up
    static constexpr std::int64_t first_pause_ns = 50'000'000, longest_pause_ns = 2'000'000'000;

    struct Launch {
        Body body;
        void* context;
        std::int64_t threads, shares;
        std::int64_t begin;
        Number number;  // of a thread of the team
        std::fenv_t environment{};
        Ranges ranges{};
        std::atomic<std::int64_t> computing{0};         // the time of all shares
        std::atomic<std::int64_t> longest{0};           // that of the longest share of a thread that kept its core
        std::atomic<std::int64_t> cut{0}, cut_time{0};  // threads that lost it, and the time of the longest share of each

        void compute_shares(int number) {
            if (number >= threads) return;
            bool begun = false;
            std::int64_t first = 0, last = 0, most = 0;
            ranges.compute(number, [&](std::int64_t share) {
                if (!std::exchange(begun, true)) std::fesetenv(&environment), first = last = now_ns();
                body(context, share);
                const std::int64_t now = now_ns();
                most = std::max(most, now - last);
                last = now;
            });
            if (!begun) return;
            computing.fetch_add(last - first, std::memory_order_relaxed);
            if (most > waking_ns && lost_core()) {
                cut.fetch_add(1, std::memory_order_relaxed);
                cut_time.fetch_add(most, std::memory_order_relaxed);
            } else {
                std::int64_t seen = longest.load(std::memory_order_relaxed);
                while (seen < most && !longest.compare_exchange_weak(seen, most, std::memory_order_relaxed)) {
                }
            }
        }

        // Whether this thread has had to leave its core to another one since it was asked last.
        static bool lost_core() {
#if defined(RUSAGE_THREAD)
            static thread_local long count = 0;
            rusage usage;
            if (getrusage(RUSAGE_THREAD, &usage) == 0) return std::exchange(count, usage.ru_nivcsw) != usage.ru_nivcsw;
#endif
            return false;
        }

        // Whether the threads had no core for much of the time until `end`. Threads that have one need at most twice the
        // time that the longest share or an equal division of all would take, in whatever order the shares are (Graham,
        // Bounds for Certain Multiprocessing Anomalies, 1966).
        bool is_late(std::int64_t end) const {
            const std::int64_t whole = shares - cut, time = computing - cut_time;
            const std::int64_t mean = whole > 0 ? time / whole : computing / shares;
            const std::int64_t divided = (shares + threads - 1) / threads * mean;
            return end - begin > 2 * std::max<std::int64_t>(longest, divided) + waking_ns;
        }
    };

    static void enter(catalog_pool* pool, std::int32_t threads, std::int64_t shares, Body body, void* context) {
        static_cast<OpenMPPool*>(pool)->run_shares(threads, shares, body, context);
    }

    void run_shares(std::int32_t threads, std::int64_t shares, Body body, void* context) {
        const Parallel with_team = parallel.load(std::memory_order_relaxed);
        const std::int64_t begin = now_ns();
        const bool avoids_team = begin < own_until.load(std::memory_order_relaxed);
        if (!with_team || shares <= 1 || avoids_team) {
            own_pool.run(&own_pool, threads, shares, body, context);
            if (avoids_team) compare(body, shares, now_ns() - begin);
        } else {
            Launch launch{body, context, std::clamp<std::int64_t>(shares, 1, std::max(threads, 1)), shares, begin,
                          thread_number.load(std::memory_order_relaxed)};
            std::fegetenv(&launch.environment);
            launch.ranges.divide(shares, launch.threads);
            const int team = threads <= max_threads.load(std::memory_order_relaxed)() ? 0 : threads;
            const auto compute = [](void* of) {
                Launch& of_team = *static_cast<Launch*>(of);
                of_team.compute_shares(of_team.number());
            };
            with_team(compute, &launch, static_cast<unsigned>(team), 0);
            // In the first launch, the runtime may have had to start threads.
            if (has_launched.exchange(true, std::memory_order_relaxed)) judge(launch);
        }
    }

    // Leaves the team for a while if the launch was late.
    void judge(const Launch& launch) {
        const std::int64_t end = now_ns();
        if (!launch.is_late(end)) {
            pause_ns.store(first_pause_ns, std::memory_order_relaxed);
        } else if (end >= team_until.load(std::memory_order_relaxed)) {
            late_body.store(launch.body, std::memory_order_relaxed);
            late_shares.store(launch.shares, std::memory_order_relaxed);
            late_ns.store(end - launch.begin, std::memory_order_relaxed);
            own_launches.store(0, std::memory_order_relaxed);
            own_ns.store(0, std::memory_order_relaxed);
            own_until.store(end + next_pause(), std::memory_order_relaxed);
        }
    }

    // Returns to the team if the own pool takes longer for the same work on average, of four launches at least.
    void compare(Body body, std::int64_t shares, std::int64_t ns) {
        if (body != late_body.load(std::memory_order_relaxed) || shares != late_shares.load(std::memory_order_relaxed))
            return;
        const std::int64_t launches = own_launches.fetch_add(1, std::memory_order_relaxed) + 1;
        const std::int64_t sum = own_ns.fetch_add(ns, std::memory_order_relaxed) + ns;
        if (sum <= std::max<std::int64_t>(launches, 4) * late_ns.load(std::memory_order_relaxed)) return;
        own_until.store(0, std::memory_order_relaxed);
        team_until.store(now_ns() + next_pause(), std::memory_order_relaxed);
    }

    std::int64_t next_pause() {
        const std::int64_t pause = pause_ns.load(std::memory_order_relaxed);
        pause_ns.store(std::min(2 * pause, longest_pause_ns), std::memory_order_relaxed);
        return pause;
    }

    // Threads that launch at once write these in any order: they only decide which threads compute.
    std::atomic<bool> has_launched{false};
    std::atomic<std::int64_t> own_until{0}, team_until{0}, pause_ns{first_pause_ns};
    std::atomic<Body> late_body{nullptr};  // the launch for which the team was left
    std::atomic<std::int64_t> late_shares{0}, late_ns{0};
    std::atomic<std::int64_t> own_launches{0}, own_ns{0};  // since then, of the same work
};

inline OpenMPPool openmp_pool;

// In a forked child, which has none of the threads: what they held and counted is as if they had never been.
inline void start_anew() {
    openmp_pool.parallel.store(nullptr, std::memory_order_relaxed);
    own_pool.start_anew();
}

[[gnu::used]] inline const int fork_handler = pthread_atfork(nullptr, nullptr, &start_anew);

}  // namespace catalog::host

// The library's own pool.
extern "C" __attribute__((visibility("default"), used)) inline catalog_pool* catalog_own_pool(void) {
    return &catalog::host::own_pool;
}

// The threads of an OpenMP runtime of the process, whose functions GOMP_parallel, omp_get_max_threads and
// omp_get_thread_num are given.
extern "C" __attribute__((visibility("default"), used)) inline catalog_pool* catalog_openmp_pool(void* gomp_parallel,
                                                                                                 void* max_threads,
                                                                                                 void* thread_number) {
    using catalog::host::openmp_pool, catalog::host::OpenMPPool;
    openmp_pool.max_threads = reinterpret_cast<OpenMPPool::Number>(max_threads);
    openmp_pool.thread_number = reinterpret_cast<OpenMPPool::Number>(thread_number);
    openmp_pool.parallel = reinterpret_cast<OpenMPPool::Parallel>(gomp_parallel);
    return &openmp_pool;
}
