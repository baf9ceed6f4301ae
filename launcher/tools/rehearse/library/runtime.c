/* libcudart: memory, copies, streams, events and launches that are done before they begin.
 *
 * A kernel's results are never there, so a copy to the host brings zeros, but for a single byte, a
 * check's answer, which is "true" unless $SHARDSCALE_NULL_GPU_CHECKS is something else. Small copies
 * from the host come back as they were, until the next kernel may have written over them: DeepSpeed
 * compares the lists of ranks on the device.
 */
#include "device.h"
#include "graphs.h"
#include "host.h"
#include "kept.h"
#include "refuse.h"
#include "timeline.h"
#include "watchdog.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SUCCEEDS(name, ...) \
    cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
/* A function that answers with one value. */
#define ANSWERS(name, value, type, ...) \
    cudaError_t name(type *out __VA_OPT__(, ) __VA_ARGS__) { \
        *out = value; \
        return cudaSuccess; \
    }

static __thread cudaError_t last_error;

static cudaError_t failed(cudaError_t error) { return last_error = error; }

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

int refuse_runtime(const char *name, int *said) {
    return (int)failed((cudaError_t)refuse(name, cudaErrorNotSupported, said));
}

/* The devices. */
ANSWERS(cudaDriverGetVersion, CUDART_VERSION, int)
ANSWERS(cudaRuntimeGetVersion, CUDART_VERSION, int)
ANSWERS(cudaGetDeviceFlags, 0, unsigned)
SUCCEEDS(cudaSetDeviceFlags, unsigned)
SUCCEEDS(cudaProfilerStart, void)
SUCCEEDS(cudaProfilerStop, void)

cudaError_t cudaGetDeviceCount(int *out) {
    *out = device_count();
    return *out ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *out) {
    *out = device_current();
    return device_count() ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int ordinal) {
    return device_select(ordinal) ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

cudaError_t cudaInitDevice(int ordinal, unsigned device_flags, unsigned flags) {
    (void)device_flags, (void)flags;
    return device(ordinal) ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr number, int ordinal) {
    if (!device(ordinal))
        return failed(cudaErrorInvalidDevice);
    *out = device_attribute(ordinal, number);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *out, int from, int to) {
    if (!device(from) || !device(to))
        return failed(cudaErrorInvalidDevice);
    *out = from != to && device(from)->peer_access && device(to)->peer_access;
    return cudaSuccess;
}

SUCCEEDS(cudaDeviceEnablePeerAccess, int, unsigned)

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int ordinal) {
#define ATTRIBUTE(name) device_attribute(ordinal, cudaDevAttr##name)
    const Device *of = device(ordinal);
    if (!of)
        return failed(cudaErrorInvalidDevice);
    *out = (struct cudaDeviceProp){
        .totalGlobalMem = of->total_bytes,
        .major = of->major,
        .minor = of->minor,
        .pciBusID = ATTRIBUTE(PciBusId),
        .multiProcessorCount = of->multiprocessors,
        .warpSize = ATTRIBUTE(WarpSize),
        .maxThreadsPerBlock = ATTRIBUTE(MaxThreadsPerBlock),
        .maxThreadsPerMultiProcessor = ATTRIBUTE(MaxThreadsPerMultiProcessor),
        .maxBlocksPerMultiProcessor = ATTRIBUTE(MaxBlocksPerMultiprocessor),
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .sharedMemPerBlock = ATTRIBUTE(MaxSharedMemoryPerBlock),
        .sharedMemPerBlockOptin = ATTRIBUTE(MaxSharedMemoryPerBlockOptin),
        .sharedMemPerMultiprocessor = ATTRIBUTE(MaxSharedMemoryPerMultiprocessor),
        .reservedSharedMemPerBlock = ATTRIBUTE(ReservedSharedMemoryPerBlock),
        .regsPerBlock = ATTRIBUTE(MaxRegistersPerBlock),
        .regsPerMultiprocessor = ATTRIBUTE(MaxRegistersPerMultiprocessor),
        .l2CacheSize = ATTRIBUTE(L2CacheSize),
        .totalConstMem = ATTRIBUTE(TotalConstantMemory),
        .textureAlignment = ATTRIBUTE(TextureAlignment),
        .memoryBusWidth = ATTRIBUTE(GlobalMemoryBusWidth),
        .unifiedAddressing = 1,
        .concurrentKernels = 1,
        .asyncEngineCount = ATTRIBUTE(AsyncEngineCount),
    };
    snprintf(out->name, sizeof out->name, "%s", of->name);
    device_uuid(of, (unsigned char *)out->uuid.bytes);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int bytes, int ordinal) {
    if (!device(ordinal))
        return failed(cudaErrorInvalidDevice);
    snprintf(out, bytes, "0000:%02X:00.0", device(ordinal)->number + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

/* Memory. */
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    if (!device_count())
        return failed(cudaErrorNoDevice);
    *free_bytes = device_free_bytes(device_current());
    *total = device(device_current())->total_bytes;
    return cudaSuccess;
}

enum { MOST_BLOCKS = 1 << 16 };
static struct {
    void *address;
    size_t bytes;
} blocks[MOST_BLOCKS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* The entry of `address`, -1 for none; that of NULL is a free one. */
static int entry_of(const void *address) {
    for (int number = 0; number < MOST_BLOCKS; number++)
        if (blocks[number].address == address)
            return number;
    return -1;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
    int ordinal = device_current();
    if (!device_count())
        return failed(cudaErrorNoDevice);
    if (!device_take(ordinal, bytes))
        return failed(cudaErrorMemoryAllocation);
    void *address = device_addresses(ordinal, bytes);
    pthread_mutex_lock(&mutex);
    int number = address ? entry_of(NULL) : -1;
    if (number >= 0) {
        blocks[number].address = *out = address;
        blocks[number].bytes = bytes;
    }
    pthread_mutex_unlock(&mutex);
    if (number >= 0)
        return cudaSuccess;
    device_give_back(ordinal, bytes);
    return failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *address) {
    if (!address)
        return cudaSuccess;
    pthread_mutex_lock(&mutex);
    int number = entry_of(address);
    size_t bytes = number < 0 ? 0 : blocks[number].bytes;
    if (number >= 0)
        blocks[number].address = NULL;
    pthread_mutex_unlock(&mutex);
    if (number < 0)
        return failed(cudaErrorInvalidValue);
    device_give_back(device_of(address), bytes);
    device_addresses_free(address, bytes);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) {
    (void)stream;
    return cudaMalloc(out, bytes);
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    (void)stream;
    return cudaFree(address);
}

/* The host may use it, so it is the host's: pages that nobody touches cost nothing. */
cudaError_t cudaMallocManaged(void **out, size_t bytes, unsigned flags) {
    return cudaHostAlloc(out, bytes, flags);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    (void)flags;
    *out = bytes < LARGE ? NULL : host_block(bytes);
    if (!*out && posix_memalign(out, 4096, bytes))
        return failed(cudaErrorMemoryAllocation);
    pin(*out, bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
    unpin(address);
    free(address);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    (void)flags;
    pin(address, bytes);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
    unpin(address);
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **out, void *address, unsigned flags) {
    (void)flags;
    *out = address;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered};
    int ordinal = device_of(address);
    if (ordinal < 0 && !is_pinned(address))
        return cudaSuccess;
    out->type = ordinal < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->device = ordinal < 0 ? device_current() : ordinal;
    out->devicePointer = (void *)address;
    out->hostPointer = ordinal < 0 ? (void *)address : NULL;
    return cudaSuccess;
}

/* Copies. */
static bool checks_are_true(void) {
    const char *answer = getenv("SHARDSCALE_NULL_GPU_CHECKS");
    return !answer || !strcmp(answer, "true");
}

static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t stream) {
    bool to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
    if (to_device || from_device)
        timeline_add(COPY, stream, bytes, !from_device ? TO_DEVICE : !to_device ? TO_HOST : ON_DEVICE);
    if (to_device && from_device) {
        keep_copy(to, from, bytes);
    } else if (to_device) {
        keep(to, from, bytes);
    } else if (!from_device) {
        memcpy(to, from, bytes);
    } else {
        note("copy_to_host", bytes);
        if (!recall(from, to, bytes) && bytes == 1)
            *(char *)to = checks_are_true();
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    (void)kind;
    note("blocking_copy", bytes);
    copy(to, from, bytes, NULL);
    timeline_add(SYNCHRONIZE, NULL, 0, 0);
    watchdogs_look();
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    return copy(to, from, bytes, stream);
}

cudaError_t cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, stream);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
    char values[FEW_KEPT];
    timeline_add(COPY, stream, bytes, ON_DEVICE);
    if (device_of(address) < 0) {
        memset(address, value, bytes);
    } else if (bytes <= FEW_KEPT) {
        memset(values, value, bytes);
        keep(address, values, bytes);
    } else {
        forget(address, bytes);
    }
    return cudaSuccess;
}

cudaError_t cudaMemset(void *address, int value, size_t bytes) {
    return cudaMemsetAsync(address, value, bytes, NULL);
}

cudaError_t cudaMemcpyPeerAsync(
    void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream) {
    (void)to_device, (void)from_device;
    return copy(to, from, bytes, stream);
}

SUCCEEDS(cudaMemcpyToSymbol, const void *, const void *, size_t, size_t, enum cudaMemcpyKind)
ANSWERS(cudaGetSymbolAddress, device_addresses(device_current(), 1), void *, const void *)

/* Streams. Whatever is put into one has happened. */
ANSWERS(cudaStreamCreate, malloc(1), cudaStream_t)
ANSWERS(cudaStreamCreateWithFlags, malloc(1), cudaStream_t, unsigned)
ANSWERS(cudaStreamCreateWithPriority, malloc(1), cudaStream_t, unsigned, int)
SUCCEEDS(cudaStreamDestroy, cudaStream_t)
SUCCEEDS(cudaStreamQuery, cudaStream_t)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *)

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    timeline_add(WAIT_EVENT, stream, (size_t)event, 0);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) {
    (void)stream;
    *out = 0;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    (void)stream;
    function(argument);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t function, void *argument, unsigned flags) {
    (void)flags;
    function(stream, cudaSuccess, argument);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (graph_records(stream))
        return failed(cudaErrorStreamCaptureUnsupported);
    timeline_add(SYNCHRONIZE, stream, 0, 0);
    note("stream_synchronize", 0);
    watchdogs_look();
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    if (graph_records(NULL))
        return failed(cudaErrorStreamCaptureUnsupported);
    timeline_add(SYNCHRONIZE, NULL, 0, 1);
    note("device_synchronize", 0);
    watchdogs_look();
    return cudaSuccess;
}

/* Events: when the host got there. */
typedef struct {
    double recorded_ms; /* 0: never */
    bool timed;
} Event;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    Event *event = malloc(sizeof *event);
    *event = (Event){0, !(flags & cudaEventDisableTiming)};
    *out = (cudaEvent_t)event;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    struct timespec now;
    timeline_add(RECORD_EVENT, stream, (size_t)event, 0);
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((Event *)event)->recorded_ms = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}

SUCCEEDS(cudaEventQuery, cudaEvent_t)

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    timeline_add(SYNCHRONIZE, NULL, (size_t)event, 0);
    note("event_synchronize", 0);
    watchdogs_look();
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *out_ms, cudaEvent_t first, cudaEvent_t last) {
    Event *from = (Event *)first, *to = (Event *)last;
    if (!from->timed || !to->timed || !from->recorded_ms || !to->recorded_ms)
        return failed(cudaErrorInvalidResourceHandle);
    *out_ms = (float)(to->recorded_ms - from->recorded_ms);
    return cudaSuccess;
}

/* Kernels. What nvcc generates for `kernel<<<...>>>` pushes the launch's shape and pops it. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} launch;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    launch.grid = grid;
    launch.block = block;
    launch.shared = shared;
    launch.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = launch.grid;
    *block = launch.block;
    *shared = launch.shared;
    *(void **)stream = launch.stream;
    return cudaSuccess;
}

#define LAUNCHES(name, ...) \
    cudaError_t name(__VA_ARGS__) { \
        device_launch(); \
        return cudaSuccess; \
    }

ANSWERS(__cudaGetKernel, (void *)function, void *, const void *function)
LAUNCHES(__cudaLaunchKernel, void *, dim3, dim3, void **, size_t, cudaStream_t)
LAUNCHES(cudaLaunchKernel, const void *, dim3, dim3, void **, size_t, cudaStream_t)
LAUNCHES(cudaLaunchKernelExC, const cudaLaunchConfig_t *, const void *, void **)
SUCCEEDS(cudaFuncSetAttribute, const void *, enum cudaFuncAttribute, int)
ANSWERS(cudaOccupancyMaxActiveBlocksPerMultiprocessor, 2, int, const void *, int, size_t)
ANSWERS(
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2, int, const void *, int, size_t,
    unsigned)

/* What a GPU runs of torch's wheels, which hold these (torch.cuda.get_arch_list(), 2.8 to 2.13):
 * cub refuses any other. */
static int compiled_architecture(const Device *of) {
    static const int all[] = {120, 100, 90, 86, 80, 75, 70};
    int capability = 10 * of->major + of->minor;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] <= capability)
            return all[i];
    return capability;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    (void)function;
    const Device *of = device(device_current());
    if (!of)
        return failed(cudaErrorNoDevice);
    int architecture = compiled_architecture(of);
    *out = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .ptxVersion = architecture,
        .binaryVersion = architecture,
        .maxDynamicSharedSizeBytes =
            device_attribute(device_current(), cudaDevAttrMaxSharedMemoryPerBlockOptin),
    };
    return cudaSuccess;
}

char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

/* torch asks for the driver's functions by name: see driver.c. */
void *driver_function(const char *name);

static cudaError_t entry_point(
    const char *name, void **out, enum cudaDriverEntryPointQueryResult *found) {
    *out = driver_function(name);
    if (found)
        *found = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*out)
        note(name, 0);
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **out, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found) {
    (void)version, (void)flags;
    return entry_point(name, out, found);
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(
    const char *name, void **out, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found) {
    (void)flags;
    return entry_point(name, out, found);
}
#endif
