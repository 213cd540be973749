// The pool of threads that a host library brings along.
//
// Every library has one, but a process uses only one of them: the runtime passes the pool of the first library that it
// loads to all others, as a member of the argument struct. A pool starts threads when a launch wants them, and ends
// those that have been idle for some seconds.
//
// The calling thread is one of those that compute a launch's shares, and waits only for shares that others have begun:
// never for a thread that has had no core yet. An idle thread spins briefly, in case that the next launch follows at once,
// and then sleeps. It stops spinning when another thread wants its core.
//
// In a process that computes with an OpenMP runtime, the runtime's threads take the place of these.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "abi/pool.h"

#ifndef CATALOG_POOL_IDLE_S  // fewer in tests
#define CATALOG_POOL_IDLE_S 10
#endif

namespace catalog::host {

// Of a clock that only goes forward.
inline std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

// The shares of a launch, in a range for each thread or NUMA node, which others help with when their own is done. A launch of
// as many shares as the last one gives each the same ones, which are neighbours: what they read and write is in its memory
// and its caches.
class Ranges {
   public:
    static constexpr int most = 64;

    void divide(std::int64_t shares, std::int64_t wanted) {
        count = static_cast<int>(std::min<std::int64_t>(wanted, most));
        for (int i = 0; i < count; ++i) {
            range[i].next.store(shares * i / count, std::memory_order_relaxed);
            range[i].end = shares * (i + 1) / count;
        }
    }

    // Calls body(share) for shares of the range `own`, modulo their number, then for those that others have left.
    template <class Body>
    void compute(int own, Body body) {
        for (int i = 0; i < count; ++i) {
            Range& shares = range[(own + i) % count];
            while (shares.next.load(std::memory_order_relaxed) < shares.end) {
                const std::int64_t share = shares.next.fetch_add(1, std::memory_order_relaxed);
                if (share < shares.end) body(share);
            }
        }
    }

   private:
    struct alignas(64) Range {
        std::atomic<std::int64_t> next{0};
        std::int64_t end = 0;
    };

    int count = 0;
    Range range[most];
};

class Pool : public catalog_pool {
   public:
    constexpr Pool() : catalog_pool{&Pool::enter} {}

    // The number of cores that this process may use.
    static int usable_cores() {
#if defined(__linux__)
        cpu_set_t cores;
        if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
#endif
        return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
    }

    // In a forked child, which has none of the threads: what they held and counted is as if they had never been.
    void start_anew() {
        if (used.load(std::memory_order_relaxed)) new (this) Pool;
    }

   private:
    using Body = void (*)(void* context, std::int64_t share);

    static constexpr int most_jobs = 8;  // launches at once that have helpers; further ones run on their own thread
    static constexpr std::int64_t spin_ns = 50'000, yield_ns = 10'000;
    static constexpr std::int64_t idle_s = CATALOG_POOL_IDLE_S;

    // A launch. `state` is what threads agree by: the other members are written before `open` is set, and by nobody while
    // a helper is counted.
    struct alignas(64) Job {
        static constexpr std::uint32_t open = 1U << 31, waiting = 1U << 30, helper = 1, most_helpers = (1U << 15) - 1;
        static constexpr int limit_shift = 15;

        std::atomic<std::uint32_t> state{0};  // open, waiting, the number of helpers allowed, and of those at work
        Body body = nullptr;
        void* context = nullptr;
        std::fenv_t environment{};  // of floating point, so that a share has the same result on every thread
        Ranges ranges;

        static std::uint32_t at_work(std::uint32_t state) { return state & most_helpers; }
        // How many more helpers may join.
        static int room(std::uint32_t state) {
            const std::uint32_t allowed = state & open ? state >> limit_shift & most_helpers : 0;
            return std::max(0, static_cast<int>(allowed) - static_cast<int>(at_work(state)));
        }

        bool idle() const { return at_work(state.load(std::memory_order_acquire)) == 0; }

        bool join() {
            std::uint32_t seen = state.load(std::memory_order_relaxed);
            while (room(seen))
                if (state.compare_exchange_weak(seen, seen + helper, std::memory_order_acquire, std::memory_order_relaxed))
                    return true;
            return false;
        }

        void compute_shares(int own) {
            ranges.compute(own, [this](std::int64_t share) { body(context, share); });
            state.fetch_and(~open, std::memory_order_relaxed);
        }
    };

    static void enter(catalog_pool* pool, std::int32_t threads, std::int64_t shares, Body body, void* context) {
        static_cast<Pool*>(pool)->run_shares(threads, shares, body, context);
    }

    void run_shares(std::int32_t threads, std::int64_t shares, Body body, void* context) {
        const std::int64_t others = std::min<std::int64_t>(std::min<std::int64_t>(threads, shares) - 1, Job::most_helpers);
        const int place = others > 0 ? take_place() : -1;
        if (place < 0) {
            for (std::int64_t share = 0; share < shares; ++share) body(context, share);
            return;
        }
        if (!used.load(std::memory_order_relaxed)) used.store(true, std::memory_order_relaxed);
        grow(static_cast<int>(others));
        Job& job = jobs[place];
        job.body = body;
        job.context = context;
        std::fegetenv(&job.environment);
        const int of_nodes = nodes.load(std::memory_order_relaxed);
        job.ranges.divide(shares, of_nodes > 1 ? of_nodes : others + 1);
        job.state.store(Job::open | static_cast<std::uint32_t>(others) << Job::limit_shift, std::memory_order_release);
        epoch.fetch_add(1);
        wake(static_cast<int>(others));
        job.compute_shares(range_of_thread());
        await(job);
        taken.fetch_and(~(1U << place), std::memory_order_release);
    }

    // The index of a job that is now the caller's; -1 if there is none left.
    int take_place() {
        std::uint32_t seen = taken.load(std::memory_order_relaxed);
        for (;;) {
            int place = 0;
            while (place < most_jobs && seen >> place & 1) ++place;
            if (place == most_jobs) return -1;
            if (taken.compare_exchange_weak(seen, seen | 1U << place, std::memory_order_acquire, std::memory_order_relaxed))
                return place;
        }
    }

    void await(Job& job) {
        if (!spin([&] { return job.idle(); })) {
            pthread_mutex_lock(&mutex);
            job.state.fetch_or(Job::waiting, std::memory_order_relaxed);
            while (!job.idle()) pthread_cond_wait(&finished, &mutex);
            pthread_mutex_unlock(&mutex);
        }
        job.state.store(0, std::memory_order_relaxed);
    }

    // Wakes two threads at most, each of which wakes two more if they are wanted: the caller should not wake them all.
    void wake(int wanted) {
        if (wanted == 0 || sleeping.load() == 0) return;
        pthread_mutex_lock(&mutex);  // then all who count as sleeping do wait
        pthread_mutex_unlock(&mutex);
        for (int i = 0; i < std::min(wanted, 2); ++i) pthread_cond_signal(&started);
    }

    // The range of shares of this thread.
    int range_of_thread() const { return nodes.load(std::memory_order_relaxed) > 1 ? current_node() : number(); }

    // Of a thread of the pool, from 1; others, which launch, have 0.
    static int& number() {
        static thread_local int number = 0;
        return number;
    }

    // What a thread of the pool does.
    void help() {
        number() = numbers.fetch_add(1, std::memory_order_relaxed) + 1;
        for (;;) {
            const std::uint32_t seen = epoch.load();
            if (compute_any()) continue;
            if (!spin([&] { return epoch.load(std::memory_order_acquire) != seen; }) && !sleep_after(seen)) return;
        }
    }

    // Computes shares of a job that has room for one more thread, if there is one.
    bool compute_any() {
        const std::uint32_t seen = taken.load(std::memory_order_acquire);
        for (int place = 0; place < most_jobs; ++place) {
            Job& job = jobs[place];
            if (!(seen >> place & 1) || !job.join()) continue;
            wake(Job::room(job.state.load(std::memory_order_relaxed)));
            std::fesetenv(&job.environment);
            job.compute_shares(range_of_thread());
            const std::uint32_t before = job.state.fetch_sub(Job::helper, std::memory_order_acq_rel);
            if (before & Job::waiting && Job::at_work(before) == 1) {
                pthread_mutex_lock(&mutex);
                pthread_cond_broadcast(&finished);
                pthread_mutex_unlock(&mutex);
            }
            return true;
        }
        return false;
    }

    // Sleeps until a launch comes. False: none came for a long time, and the thread no longer counts.
    bool sleep_after(std::uint32_t seen) {
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += idle_s;
        pthread_mutex_lock(&mutex);
        sleeping.fetch_add(1);
        bool late = false;
        while (epoch.load() == seen && !late) late = pthread_cond_timedwait(&started, &mutex, &until) != 0;
        sleeping.fetch_sub(1);
        const bool stays = epoch.load() != seen;
        if (!stays) helpers.fetch_sub(1, std::memory_order_relaxed);
        pthread_mutex_unlock(&mutex);
        return stays;
    }

    // Starts threads until there are `wanted`, as far as the system allows.
    void grow(int wanted) {
        if (helpers.load(std::memory_order_relaxed) >= wanted) return;
        pthread_mutex_lock(&mutex);
        if (nodes.load(std::memory_order_relaxed) == 0) {
            keep_library();
            nodes.store(node_count(), std::memory_order_relaxed);
        }
        if (helpers.load(std::memory_order_relaxed) == 0) numbers.store(0, std::memory_order_relaxed);
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        pthread_t thread;
        while (helpers.load(std::memory_order_relaxed) < wanted && pthread_create(&thread, &detached, &start, this) == 0)
            helpers.fetch_add(1, std::memory_order_relaxed);
        pthread_attr_destroy(&detached);
        spins.store(helpers.load(std::memory_order_relaxed) < usable_cores(), std::memory_order_relaxed);
        pthread_mutex_unlock(&mutex);
    }

    static void* start(void* pool) {
        // Signals are for the threads of the program, except those that a fault of this thread raises.
        sigset_t signals;
        sigfillset(&signals);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF})
            sigdelset(&signals, fault);
        pthread_sigmask(SIG_SETMASK, &signals, nullptr);
#if defined(__linux__)
        pthread_setname_np(pthread_self(), "catalog");
#endif
        static_cast<Pool*>(pool)->help();
        return nullptr;
    }

    // Threads run the library's code, so it must never be unloaded.
    void keep_library() const {
        Dl_info library;
        if (dladdr(this, &library)) dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    }

    // Spins until done() or for a short time, which ends early if another thread wants this core. Returns done().
    template <class Done>
    bool spin(Done done) const {
        constexpr int pauses = 32;
        if (!spins.load(std::memory_order_relaxed)) return done();
        for (const std::int64_t begin = now_ns();;) {
            for (int i = 0; i < pauses; ++i) {
                if (done()) return true;
                relax();
            }
            const std::int64_t before = now_ns();
            sched_yield();
            if (before - begin > spin_ns || now_ns() - before > yield_ns) return done();
        }
    }

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");  // yield is a no-op on most cores
#endif
    }

    // The NUMA node of the core that this thread runs on.
    static int current_node() {
        unsigned node = 0;
#if defined(__linux__)
        unsigned core;
        if (getcpu(&core, &node) != 0) return 0;
#endif
        return static_cast<int>(node);
    }

    // The number of NUMA nodes of this machine, at most Ranges::most.
    static int node_count() {
        char text[256] = {};  // such as 0 or 0-3
        const int file = open("/sys/devices/system/node/online", O_RDONLY | O_CLOEXEC);
        if (file < 0) return 1;
        const ssize_t size = read(file, text, sizeof text - 1);
        close(file);
        const char* last = text;
        for (ssize_t i = 0; i < size; ++i)
            if (text[i] == '-' || text[i] == ',') last = text + i + 1;
        return std::clamp(std::atoi(last) + 1, 1, Ranges::most);
    }

    alignas(64) std::atomic<std::uint32_t> epoch{0};  // counts launches that want helpers
    alignas(64) std::atomic<std::uint32_t> taken{0};  // the jobs that are some launch's, a bit for each
    std::atomic<int> sleeping{0}, helpers{0};
    std::atomic<int> numbers{0};  // that threads of the pool have
    std::atomic<bool> spins{false}, used{false};
    std::atomic<int> nodes{0};  // of the machine, 0 before the first thread
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t started = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;
    Job jobs[most_jobs];
};

// Never destroyed: its threads may outlive main().
inline Pool own_pool;

}  // namespace catalog::host
