// Uses the pool of threads as kernels do: `pool_driver SCENARIO`. Prints "done" if every share was computed once.
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#define private public  // for the number of NUMA nodes, which few machines for tests have
#include "host/threads.hpp"
#undef private

using namespace catalog::host;

namespace {

struct Args {
    catalog_pool* pool = nullptr;
    int num_threads = 0;
};

void require(bool holds, const char* what) {
    if (holds) return;
    std::printf("%s\n", what);
    std::fflush(stdout);
    std::_Exit(1);
}

void work(int microseconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
    while (std::chrono::steady_clock::now() < end) {
    }
}

// A launch whose shares count themselves in memory that is not atomic: what they write is visible when it returns.
void launch(int threads, std::int64_t shares, int microseconds = 0) {
    std::vector<int> computed(static_cast<std::size_t>(shares));
    parallel_for(Args{}, threads, shares, [&](std::int64_t share) {
        work(microseconds);
        ++computed[static_cast<std::size_t>(share)];
    });
    for (const int times : computed) require(times == 1, "a share was not computed once");
}

void at_once(int count, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
    for (std::thread& thread : threads) thread.join();
}

#if defined(__has_feature)
constexpr bool thread_sanitizer = __has_feature(thread_sanitizer);
#else
constexpr bool thread_sanitizer = false;
#endif

// Runs the body in a forked child, which has no thread but this one.
void in_child(const std::function<void()>& body) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        require(own_pool.helpers.load() == 0, "the child counts its parent's threads");
        body();
        std::_Exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child failed");
}

void launches() {
    for (const int shares : {0, 1, 2, 3, 100, 1000})
        for (const int threads : {1, 2, 5}) launch(threads, shares);
    launch(4, 64, 100);
    require(own_pool.helpers.load() == 4, "there are as many threads as the largest launch wanted");
}

void nodes() {
    launch(4, 100);
    for (const int count : {2, 3, Ranges::most}) {
        own_pool.nodes.store(count);
        for (const int shares : {2, 3, 100}) launch(4, shares, 10);
    }
}

void many() {
    at_once(64, [](int thread) {
        for (int i = 0; i < 20; ++i) launch(2 + thread % 3, 1 + (thread + i) % 17, 5);
    });
}

void nested() {
    std::atomic<int> computed = 0;
    parallel_for(Args{}, 3, 9, [&](std::int64_t) {
        parallel_for(Args{}, 3, 9, [&](std::int64_t) {
            parallel_for(Args{}, 3, 9, [&](std::int64_t) { work(1), ++computed; });
        });
    });
    require(computed == 9 * 9 * 9, "a nested share was not computed once");
}

void resized() {
    std::atomic<bool> over = false;
    std::thread other([&] {
        while (!over) launch(2, 8, 20);
    });
    for (const int threads : {2, 9, 3, 17, 1, 33}) launch(threads, 200, 10);
    over = true;
    other.join();
}

void forked() {
    launch(4, 64, 20);
    in_child([] { launch(4, 64, 20), in_child([] { launch(4, 64, 20); }); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // by now the threads sleep
    in_child([] { launch(4, 64, 20); });
    launch(4, 64, 20);
}

// Other threads are amid launches at the fork, and hold whatever a launch holds. If one of them opens a library just then,
// as a launch does that starts threads, the child waits forever for a lock of the thread sanitizer's own: with it, all
// threads are started before.
void forked_amid() {
    if (thread_sanitizer) launch(3, 20);
    std::atomic<bool> over = false;
    std::thread others([&] { at_once(6, [&](int) { while (!over) launch(3, 20, 1); }); });
    for (int i = 0; i < 20; ++i) in_child([] { launch(3, 64, 5); });
    over = true;
    others.join();
}

// An OpenMP runtime of four threads.
int four() { return 4; }

thread_local int number = 0;
int number_of_thread() { return number; }

catalog_pool* pool_of(void (*parallel)(void (*)(void*), void*, unsigned, unsigned)) {
    return catalog_openmp_pool(reinterpret_cast<void*>(parallel), reinterpret_cast<void*>(&four),
                               reinterpret_cast<void*>(&number_of_thread));
}

unsigned asked = 0;

void run_four(void (*body)(void*), void* of, unsigned threads, unsigned) {
    asked = threads;
    at_once(threads ? static_cast<int>(threads) : four(), [&](int i) { number = i, body(of); });
}

// A launch leaves the size of a team to the runtime, unless more threads are wanted, and uses no more than are wanted.
void team() {
    Args args;
    args.pool = pool_of(&run_four);
    for (const unsigned threads : {2U, 3U, 4U, 9U}) {
        std::atomic<int> computed = 0;
        std::mutex mutex;
        std::set<std::thread::id> seen;
        parallel_for(args, static_cast<int>(threads), 50, [&](std::int64_t) {
            work(100), ++computed;
            const std::lock_guard<std::mutex> lock(mutex);
            seen.insert(std::this_thread::get_id());
        });
        require(computed == 50, "a share was not computed once");
        require(seen.size() <= threads, "a launch uses more threads than it may");
        openmp_pool.own_until = 0;  // however late the team's threads were
        parallel_for(args, static_cast<int>(threads), 2, [&](std::int64_t) { work(100); });
        require(asked == (threads > 4 ? threads : 0), "a launch changes the size of the team");
    }
}

// Of as many shares as threads, which wait for each other, each launch gives a thread the same one.
void ranges() {
    launch(4, 100);
    own_pool.nodes.store(1);
    for (catalog_pool* const pool : {static_cast<catalog_pool*>(&own_pool), pool_of(&run_four)}) {
        Args args;
        args.pool = pool;
        std::array<std::thread::id, 4> of_share{};
        std::array<int, 4> numbers{};
        for (int times = 0; times < 20; ++times) {
            std::atomic<int> begun = 0;
            std::array<std::thread::id, 4> before = of_share;
            openmp_pool.own_until = 0;
            parallel_for(args, 4, 4, [&](std::int64_t share) {
                of_share[static_cast<std::size_t>(share)] = std::this_thread::get_id();
                numbers[static_cast<std::size_t>(share)] = number;
                for (++begun; begun < 4;) std::this_thread::yield();
            });
            if (pool == &own_pool)  // run_four() has new threads each time
                require(times == 0 || before == of_share, "a thread has other shares than before");
            else
                require(numbers == std::array<int, 4>{0, 1, 2, 3}, "a thread of a team has shares of another");
        }
    }
}

// The environment of floating point is the caller's on every thread.
void environment() {
    std::fesetround(FE_UPWARD);
    std::atomic<int> others = 0;
    parallel_for(Args{}, 4, 64, [&](std::int64_t) { work(50), others += std::fegetround() != FE_UPWARD; });
    require(others == 0, "a thread rounds differently");
}

// An OpenMP runtime of one thread, which its other threads keep waiting.
int teams = 0;  // launches that it has had
std::chrono::microseconds lateness{0};

void run_team(void (*body)(void*), void* of, unsigned, unsigned) {
    ++teams;
    body(of);
    std::this_thread::sleep_for(lateness);
}

void launch_beside(int microseconds = 0) {
    Args args;
    args.pool = pool_of(&run_team);
    parallel_for(args, 3, 9, [&](std::int64_t) { work(microseconds); });
}

void sleep_until(std::int64_t ns) {
    while (now_ns() < ns) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// A runtime whose threads come late computes nothing for a while, which is longer if they are late again.
void late() {
    constexpr std::int64_t pause = OpenMPPool::first_pause_ns;
    lateness = std::chrono::milliseconds(100);
    launch_beside();
    require(teams == 1 && openmp_pool.own_until == 0, "a runtime may not even start threads");
    teams = 0;
    for (int times = 1; times <= 2; ++times) {
        launch_beside();
        const std::int64_t until = openmp_pool.own_until;
        require(until > now_ns() + times * pause / 2, "the pool does not leave late threads alone");
        while (now_ns() < until - pause / 5) launch_beside();
        require(teams == times, "late threads compute");
        sleep_until(until);
    }
    lateness = std::chrono::microseconds(0);
    for (int i = 0; i < 100 && openmp_pool.pause_ns != pause; ++i) {  // the system may take this thread's core at times
        sleep_until(openmp_pool.own_until);
        launch_beside();
    }
    require(openmp_pool.pause_ns == pause && openmp_pool.own_until < now_ns(), "punctual threads do not compute");
}

// So it does not if the library's own threads are even slower.
void slower() {
    launch_beside();
    lateness = std::chrono::milliseconds(5);
    launch_beside();
    require(openmp_pool.own_until > now_ns(), "the pool does not leave late threads alone");
    launch_beside(10'000);
    const std::int64_t until = openmp_pool.team_until;
    require(until > 0 && openmp_pool.own_until == 0, "the pool stays with slower threads");
    const int before = teams;
    int launches = 0;
    for (; now_ns() < until - OpenMPPool::first_pause_ns / 5; ++launches) launch_beside();
    require(teams == before + launches, "the pool leaves threads that are faster");
}

// Threads that nobody wants end.
void idle() {
    launch(3, 64, 100);
    std::this_thread::sleep_for(std::chrono::seconds(Pool::idle_s + 1));
    require(own_pool.helpers.load() == 0, "an idle thread stays");
    launch(3, 64, 100);
}

// The process ends while threads are at work.
void ended() {
    std::thread([] {
        for (;;) launch(3, 64, 100);
    }).detach();
    work(2000);
}

void thrown() {
    parallel_for(Args{}, 3, 64, [](std::int64_t share) {
        work(10);
        if (share == 40) throw std::runtime_error("of a share");
    });
}

// Two threads write to the same places. They are many, as the sanitizer examines a place once: where it cannot restore the
// stack of the other access then, it reports nothing.
void raced() {
    std::atomic<int> begun = 0;
    std::array<std::int64_t, 1000> sums{};
    parallel_for(Args{}, 2, 2, [&](std::int64_t share) {
        begun.fetch_add(1, std::memory_order_relaxed);
        while (begun.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
        for (std::int64_t& sum : sums) {
            sum += share;
            std::this_thread::yield();
        }
    });
}

const std::map<std::string, void (*)()> scenarios{
    {"launches", launches}, {"nodes", nodes},   {"many", many},       {"nested", nested},
    {"resized", resized},   {"forked", forked}, {"amid", forked_amid}, {"environment", environment},
    {"team", team},         {"ranges", ranges}, {"late", late},       {"slower", slower},
    {"idle", idle},         {"ended", ended},   {"thrown", thrown},   {"raced", raced},
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) return 2;
    scenarios.at(arguments[1])();
    std::puts("done");
}
