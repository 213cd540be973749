/* The functions of libamdhip64 that the catalog calls, over host memory: counted, and failing on demand.
 *
 * A copy is done when its stream or an event is synchronised, not before, and is refused on the default stream of another
 * GPU than the memory's. ROCM is 5 or 6: which layout of
 * hipDeviceProp_t there is.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NAMES = 64, RESOURCES = 256, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101 };

static struct { const char* name; int calls, status; } functions[NAMES];
static struct { char* address; size_t size; int gpu; } resources[RESOURCES];
static struct { void *target; const void* source; size_t size; } pending[RESOURCES];
static int live, copies, gpus = 2, current, last_error;
static void* captured;

static int find(const char* name) {
    int i = 0;
    while (functions[i].name && strcmp(functions[i].name, name)) i++;
    functions[i].name = name;
    return i;
}

static int enter(const char* name) {
    const int i = find(name);
    functions[i].calls++;
    return functions[i].status;
}

#define ENTER do { int status = enter(__func__); if (status) return last_error = status; } while (0)

void fake_fail(const char* name, int status) { functions[find(strdup(name))].status = status; }
int fake_calls(const char* name) { return functions[find(strdup(name))].calls; }
int fake_live(void) { return live; }
void fake_reset(int count) {
    memset(functions, 0, sizeof functions);
    live = copies = current = last_error = 0;
    memset(resources, 0, sizeof resources);
    gpus = count;
}

static int make(void** out, size_t size) {
    for (int i = 0; i < RESOURCES; i++)
        if (!resources[i].address) {
            *out = resources[i].address = malloc(size);
            resources[i].size = size;
            resources[i].gpu = current;
            memset(*out, 0xee, size);
            live++;
            return 0;
        }
    return 2;
}

static int drop(void* address) {
    for (int i = 0; i < RESOURCES; i++)
        if (address && resources[i].address == address) {
            free(address);
            resources[i].address = NULL;
            live--;
            return 0;
        }
    return INVALID_VALUE; /* released before, or never made */
}

static void settle(void) {
    for (int i = 0; i < copies; i++) memcpy(pending[i].target, pending[i].source, pending[i].size);
    copies = 0;
}

const char* hipGetErrorName(int status) {
    switch (status) {
    case 1: return "hipErrorInvalidValue";
    case 2: return "hipErrorOutOfMemory";
    case 100: return "hipErrorNoDevice";
    case 101: return "hipErrorInvalidDevice";
    case 209: return "hipErrorNoBinaryForGpu";
    case 700: return "hipErrorIllegalAddress";
    default: return "hipErrorUnknown";
    }
}
const char* hipGetErrorString(int status) { return status == 2 ? "out of memory" : hipGetErrorName(status); }
int hipGetLastError(void) {
    const int told = enter(__func__), error = last_error;
    last_error = 0;
    return told ? told : error;
}
int hipRuntimeGetVersion(int* version) { ENTER; *version = ROCM * 10000000 + 200000 + 41133; return 0; }
int hipGetDeviceCount(int* count) { ENTER; *count = gpus; return 0; }
int hipGetDevice(int* index) { ENTER; *index = current; return 0; }
int hipSetDevice(int index) { ENTER; if (index >= gpus) return INVALID_DEVICE; current = index; return 0; }
int hipDeviceGetName(char* name, int size, int index) {
    ENTER;
    strncpy(name, index ? "" : "AMD Instinct MI300X", size);
    return 0;
}
int hipDeviceGetAttribute(int* value, int attribute, int index) {
    ENTER;
    *value = attribute == 63 ? 304 - index : -1;
    return 0;
}
int hipDeviceTotalMem(size_t* bytes, int index) { ENTER; (void)index; *bytes = (size_t)192 << 30; return 0; }

static int properties(char* filled, size_t size, size_t arch, int index) {
    memset(filled, 'x', size);
    strcpy(filled + arch, index ? "gfx1100" : "gfx942:sramecc+:xnack-");
    return 0;
}
int hipGetDeviceProperties(char* filled, int index) { ENTER; return properties(filled, 792, 396, index); }
#if ROCM >= 6
int hipGetDevicePropertiesR0600(char* filled, int index) { ENTER; return properties(filled, 1472, 1160, index); }
#endif

static int gpu_of(const char* address) {
    for (int i = 0; i < RESOURCES; i++)
        if (resources[i].address && address >= resources[i].address &&
            address < resources[i].address + resources[i].size)
            return resources[i].gpu;
    return -1;
}

int hipMalloc(void** out, size_t size) { ENTER; return make(out, size); }
int hipFree(void* address) { ENTER; settle(); return drop(address); }
int hipMemcpyAsync(void* target, const void* source, size_t size, int kind, void* stream) {
    ENTER;
    if ((kind != 1 && kind != 2) || copies == RESOURCES) return INVALID_VALUE;
    if (!stream && gpu_of(kind == 1 ? target : source) != current) return INVALID_VALUE; /* nothing orders it */
    pending[copies].target = target;
    pending[copies].source = source;
    pending[copies++].size = size;
    return 0;
}
int hipMemsetAsync(void* target, int value, size_t size, void* stream) {
    ENTER;
    if (gpu_of(target) != current) return INVALID_VALUE;
    memset(target, value, size);
    return 0;
}
int hipPointerGetAttributes(int* filled, char* address) {
    ENTER;
    const int gpu = gpu_of(address);
    if (gpu < 0) return INVALID_VALUE;
    filled[1] = gpu;
    return 0;
}
int hipStreamCreateWithFlags(void** out, unsigned flags) { ENTER; (void)flags; return make(out, 8); }
#if ROCM >= 6 /* older ones may lack it */
int hipStreamIsCapturing(void* stream, int* status) { ENTER; *status = stream && stream == captured; return 0; }
#endif
int hipStreamBeginCapture(void* stream, int mode) { ENTER; (void)mode; captured = stream; return stream ? 0 : 900; }
int hipStreamEndCapture(void* stream, void** graph) { ENTER; (void)stream; captured = NULL; return make(graph, 8); }
int hipGraphInstantiate(void** ready, void* graph, void* node, char* log, size_t size) {
    ENTER;
    (void)graph, (void)node, (void)log, (void)size;
    return make(ready, 8);
}
int hipGraphLaunch(void* ready, void* stream) { ENTER; (void)stream; return ready ? 0 : INVALID_VALUE; }
int hipGraphDestroy(void* graph) { ENTER; return drop(graph); }
int hipGraphExecDestroy(void* ready) { ENTER; return drop(ready); }
void fake_capture(void* stream) { captured = stream; }
int hipStreamSynchronize(void* stream) { ENTER; (void)stream; settle(); return 0; }
int hipStreamDestroy(void* stream) { ENTER; return drop(stream); }
int hipEventCreateWithFlags(void** out, unsigned flags) { ENTER; (void)flags; return make(out, sizeof(struct timespec)); }
int hipEventRecord(struct timespec* event, void* stream) {
    ENTER;
    (void)stream;
    return clock_gettime(CLOCK_MONOTONIC, event);
}
int hipEventSynchronize(void* event) { ENTER; (void)event; settle(); return 0; }
int hipEventElapsedTime(float* ms, const struct timespec* start, const struct timespec* stop) {
    ENTER;
    *ms = (float)((stop->tv_sec - start->tv_sec) * 1e3 + (stop->tv_nsec - start->tv_nsec) * 1e-6);
    return 0;
}
int hipEventDestroy(void* event) { ENTER; return drop(event); }
