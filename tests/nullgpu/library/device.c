/* See device.h. The GPU is an H200, with the figures that torch, cuBLAS and Triton ask for. */
#include "device.h"
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
static const size_t CONTEXT = 520 * MIB; /* about what CUDA itself takes */
static const size_t SPACE = (size_t)1 << 45;
static const size_t ALIGNMENT = 2 * MIB; /* of whatever the driver hands out */

static char *space_begin;
static atomic_size_t space_used, taken, launches;

size_t device_total(void) { return 143771 * MIB; }

size_t device_free_bytes(void) { return device_total() - CONTEXT - taken; }

bool device_take(size_t bytes) {
    if (atomic_fetch_add(&taken, bytes) + bytes <= device_total() - CONTEXT)
        return true;
    atomic_fetch_sub(&taken, bytes);
    return false;
}

void device_give_back(size_t bytes) { atomic_fetch_sub(&taken, bytes); }

__attribute__((constructor)) static void open_space(void) {
    space_begin =
        mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space_begin == MAP_FAILED) {
        perror("nullgpu: no address space for the device");
        abort();
    }
}

void *device_addresses(size_t bytes) {
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    /* What mmap gave starts at a page of 4 KiB. */
    uintptr_t first = ((uintptr_t)space_begin + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    size_t offset = atomic_fetch_add(&space_used, rounded);
    if (offset + rounded + ALIGNMENT > SPACE) {
        fputs("nullgpu: out of addresses\n", stderr);
        abort();
    }
    return (void *)(first + offset);
}

bool on_device(const void *address) {
    return (uintptr_t)address - (uintptr_t)space_begin < SPACE;
}

void device_launch(void) {
    atomic_fetch_add(&launches, 1);
    device_writes();
}

size_t device_launches(void) { return launches; }

typedef struct Range {
    char *begin;
    size_t bytes;
    struct Range *next;
} Range;

static Range *pinned;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void pin(void *address, size_t bytes) {
    Range *range = malloc(sizeof *range);
    pthread_mutex_lock(&mutex);
    *range = (Range){address, bytes, pinned};
    pinned = range;
    pthread_mutex_unlock(&mutex);
}

void unpin(void *address) {
    pthread_mutex_lock(&mutex);
    for (Range **link = &pinned; *link; link = &(*link)->next)
        if ((*link)->begin == address) {
            Range *range = *link;
            *link = range->next;
            free(range);
            break;
        }
    pthread_mutex_unlock(&mutex);
}

bool is_pinned(const void *address) {
    bool found = false;
    pthread_mutex_lock(&mutex);
    for (Range *range = pinned; range && !found; range = range->next)
        found = (uintptr_t)address - (uintptr_t)range->begin < range->bytes;
    pthread_mutex_unlock(&mutex);
    return found;
}

int device_attribute(int number) {
    static const int attributes[] = {
        [cudaDevAttrComputeCapabilityMajor] = MAJOR,
        [cudaDevAttrComputeCapabilityMinor] = MINOR,
        [cudaDevAttrMultiProcessorCount] = 132,
        [cudaDevAttrWarpSize] = 32,
        [cudaDevAttrMaxThreadsPerBlock] = 1024,
        [cudaDevAttrMaxThreadsPerMultiProcessor] = 2048,
        [cudaDevAttrMaxBlocksPerMultiprocessor] = 32,
        [cudaDevAttrMaxBlockDimX] = 1024,
        [cudaDevAttrMaxBlockDimY] = 1024,
        [cudaDevAttrMaxBlockDimZ] = 64,
        [cudaDevAttrMaxGridDimX] = 2147483647,
        [cudaDevAttrMaxGridDimY] = 65535,
        [cudaDevAttrMaxGridDimZ] = 65535,
        [cudaDevAttrMaxSharedMemoryPerBlock] = 49152,
        [cudaDevAttrMaxSharedMemoryPerBlockOptin] = 232448,
        [cudaDevAttrMaxSharedMemoryPerMultiprocessor] = 233472,
        [cudaDevAttrReservedSharedMemoryPerBlock] = 1024,
        [cudaDevAttrMaxRegistersPerBlock] = 65536,
        [cudaDevAttrMaxRegistersPerMultiprocessor] = 65536,
        [cudaDevAttrL2CacheSize] = 62914560,
        [cudaDevAttrTotalConstantMemory] = 65536,
        [cudaDevAttrTextureAlignment] = 512,
        [cudaDevAttrGlobalMemoryBusWidth] = 6144,
        [cudaDevAttrClockRate] = 1980000,       /* kHz */
        [cudaDevAttrMemoryClockRate] = 3201000, /* kHz */
        [cudaDevAttrUnifiedAddressing] = 1,
        [cudaDevAttrConcurrentKernels] = 1,
        [cudaDevAttrAsyncEngineCount] = 3,
    };
    int count = sizeof attributes / sizeof *attributes;
    return number >= 0 && number < count ? attributes[number] : 0;
}

void note(const char *what, size_t bytes) {
    const char *path = getenv("NULLGPU_LOG");
    if (!path)
        return;
    char line[128];
    int length = snprintf(line, sizeof line, "%s %zu\n", what, bytes);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0 || write(file, line, length) != length)
        perror(path);
    close(file);
}
