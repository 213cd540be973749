/* The threads of host kernels, which all kernels of a process share. */
#ifndef CATALOG_POOL_H
#define CATALOG_POOL_H

#include <stdint.h>

typedef struct catalog_pool catalog_pool;

struct catalog_pool {
    /* Calls body(context, share) once for each share from 0 to shares - 1, on at most `threads` threads, the calling
     * thread among them, and returns when all calls have returned. Any thread may call it at any time, a body included.
     * It cannot fail: without other threads, the calling thread computes every share. A body must not throw. */
    void (*run)(catalog_pool* pool, int32_t threads, int64_t shares, void (*body)(void* context, int64_t share),
                void* context);
};

#endif /* CATALOG_POOL_H */
