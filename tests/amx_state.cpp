// For tests of AMX, preloaded into the process: counts and refuses requests for permission, reports tiles in use, and
// interrupts the process with a signal handler that uses tiles.
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/time.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>

namespace {

std::atomic<int> requests{0}, interrupts{0};

void use_tiles(int) {
    struct alignas(64) {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {4};
        std::uint8_t rows[16] = {1};
    } config;
    asm volatile("ldtilecfg %0; tilezero %%tmm0; tilerelease" : : "m"(config));
    ++interrupts;
}

}  // namespace

extern "C" {

long syscall(long number, ...) {
    long values[6];
    std::va_list list;
    va_start(list, number);
    for (long& value : values) value = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && values[0] == 0x1023) {
        ++requests;
        if (std::getenv("CATALOG_TEST_AMX_REFUSED")) {
            errno = EPERM;
            return -1;
        }
    }
    using Call = long (*)(long, ...);
    static const auto next = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "syscall"));
    return next(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

int asked() { return requests; }

// Whether the tile configuration or the tiles of this thread are in use: bits 17 and 18 of XINUSE.
int tiles_in_use() {
    std::uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
    return low >> 17 & 3;
}

// Sends SIGPROF whenever the process has run for `microseconds`; 0 stops it. Returns the number of signals handled.
int interrupt(int microseconds) {
    struct sigaction action = {};
    action.sa_handler = use_tiles;
    action.sa_flags = SA_RESTART;
    sigaction(SIGPROF, &action, nullptr);
    const itimerval interval = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_PROF, &interval, nullptr);
    return interrupts;
}
}
