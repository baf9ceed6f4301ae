/* See device.h. Each device has slots of the address space of its own, so that an address says
 * whose it is. */
#include "device.h"
#include "graphs.h"
#include "kept.h"
#include "timeline.h"
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
static const size_t SPACE = (size_t)1 << 46;     /* of all devices; a process has 2^47 */
static const size_t ALIGNMENT = 2 * MIB;         /* of whatever the driver hands out */
#define SLOT ((size_t)1 << 36)
#define SLOTS 1023 /* of SPACE; what mmap gave begins within one */

typedef struct Range {
    char *begin;
    size_t bytes;
    struct Range *next;
} Range;

typedef struct {
    size_t taken;
    char *next, *end; /* of the slots that it took last */
    bool has_context;
    Range *addresses_freed;
} Memory;

static Device machine[MOST_DEVICES];
static Memory memories[MOST_DEVICES]; /* by the machine's number */
static const Device *visible[MOST_DEVICES];
static int machine_count, visible_count;
static char *space_begin;
static int owners[SLOTS], slots_taken; /* the machine's number of each slot's device */
static atomic_size_t launches;
static pthread_once_t machine_once = PTHREAD_ONCE_INIT, visible_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;

/* A GPU per `;`: name, total bytes, context's bytes, major, minor, multiprocessors, MiB of L2, peer
 * access. */
static void read_machine(void) {
    const char *text = getenv("SHARDSCALE_NULL_GPUS");
    char *rest = strdup(text ? text : ""), *part;
    while ((part = strsep(&rest, ";")) && machine_count < MOST_DEVICES && *part) {
        Device *new = &machine[machine_count];
        int peer;
        if (sscanf(part, "%95[^,],%zu,%zu,%d,%d,%d,%d,%d", new->name, &new->total_bytes,
                   &new->context_bytes, &new->major, &new->minor, &new->multiprocessors,
                   &new->l2_mib, &peer)
            != 8) {
            fprintf(stderr, "shardscale: SHARDSCALE_NULL_GPUS describes no GPU: %s\n", part);
            break;
        }
        new->peer_access = peer;
        new->number = machine_count++;
    }
    if (!machine_count)
        return;
    space_begin = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space_begin == MAP_FAILED) {
        fputs("shardscale: the null GPU needs 64 TiB of address space (no memory), and the "
              "limit is lower: ulimit -v unlimited\n", stderr);
        machine_count = 0;
        return;
    }
    /* What mmap gave starts at a page of 4 KiB. */
    space_begin += ALIGNMENT - (uintptr_t)space_begin % ALIGNMENT;
}

static const Device *named(const char *word) {
    char uuid[64], *end;
    long number = strtol(word, &end, 10);
    if (end != word && !*end)
        return machine_device((int)number);
    for (int i = 0; i < machine_count; i++) {
        unsigned char raw[16];
        device_uuid(&machine[i], raw);
        int length = snprintf(uuid, sizeof uuid, "GPU-");
        for (int byte = 0; byte < 16; byte++)
            length += snprintf(uuid + length, sizeof uuid - length, "%s%02x",
                               byte == 4 || byte == 6 || byte == 8 || byte == 10 ? "-" : "",
                               raw[byte]);
        if (strlen(word) > 4 && !strncmp(uuid, word, strlen(word)))
            return &machine[i];
    }
    return NULL;
}

/* As CUDA reads it: the first that is not there ends the list, and none is there twice. */
static void read_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int number = 0; number < machine_device_count(); number++)
            visible[visible_count++] = &machine[number];
        return;
    }
    pthread_once(&machine_once, read_machine);
    char *copy = strdup(text), *rest = copy, *word;
    while ((word = strsep(&rest, ","))) {
        const Device *found = named(word + strspn(word, " "));
        for (int i = 0; found && i < visible_count; i++)
            if (visible[i] == found) {
                visible_count = 0;
                found = NULL;
            }
        if (!found)
            break;
        visible[visible_count++] = found;
    }
    free(copy);
}

int machine_device_count(void) {
    pthread_once(&machine_once, read_machine);
    return machine_count;
}

const Device *machine_device(int number) {
    return number >= 0 && number < machine_device_count() ? &machine[number] : NULL;
}

int device_count(void) {
    pthread_once(&visible_once, read_visible);
    return visible_count;
}

const Device *device(int ordinal) {
    return ordinal >= 0 && ordinal < device_count() ? visible[ordinal] : NULL;
}

void device_uuid(const Device *of, unsigned char out[16]) {
    memset(out, 0, 16);
    memcpy(out, "shardscale", 10);
    out[15] = (unsigned char)of->number;
}

/* Without a lock. */
static Memory *memory_with_context(int ordinal) {
    Memory *memory = &memories[device(ordinal)->number];
    if (!memory->has_context)
        memory->taken += device(ordinal)->context_bytes;
    memory->has_context = true;
    return memory;
}

int device_current(void) { return current; }

bool device_select(int ordinal) {
    if (!device(ordinal))
        return false;
    current = ordinal;
    pthread_mutex_lock(&mutex);
    memory_with_context(ordinal);
    pthread_mutex_unlock(&mutex);
    return true;
}

size_t device_free_bytes(int ordinal) {
    pthread_mutex_lock(&mutex);
    size_t taken = memory_with_context(ordinal)->taken, total = device(ordinal)->total_bytes;
    pthread_mutex_unlock(&mutex);
    return total > taken ? total - taken : 0;
}

size_t machine_device_used_bytes(int number) {
    pthread_mutex_lock(&mutex);
    size_t taken = memories[number].taken;
    pthread_mutex_unlock(&mutex);
    return taken;
}

bool device_take(int ordinal, size_t bytes) {
    pthread_mutex_lock(&mutex);
    Memory *memory = memory_with_context(ordinal);
    size_t total = device(ordinal)->total_bytes;
    bool fits = memory->taken <= total && bytes <= total - memory->taken;
    memory->taken += fits ? bytes : 0;
    pthread_mutex_unlock(&mutex);
    return fits;
}

void device_give_back(int ordinal, size_t bytes) {
    pthread_mutex_lock(&mutex);
    memories[device(ordinal)->number].taken -= bytes;
    pthread_mutex_unlock(&mutex);
}

static size_t rounded(size_t bytes) {
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Give a device slots for so many bytes: which of a process's devices want most is not known
 * before, and torch asks for 9/8 of a GPU's memory per expandable segment. With the lock. */
static void take_slots(Memory *memory, int number, size_t bytes) {
    size_t count = bytes / SLOT + (bytes % SLOT != 0);
    if (count > (size_t)(SLOTS - slots_taken))
        return;
    memory->next = space_begin + slots_taken * SLOT;
    memory->end = memory->next + count * SLOT;
    while (count--)
        owners[slots_taken++] = number;
}

/* Those of a freed block of the same size, else new ones. */
void *device_addresses(int ordinal, size_t bytes) {
    int number = device(ordinal)->number;
    Memory *memory = &memories[number];
    char *found = NULL;
    bytes = rounded(bytes ? bytes : 1);
    pthread_mutex_lock(&mutex);
    for (Range **link = &memory->addresses_freed; *link && !found; link = &(*link)->next)
        if ((*link)->bytes == bytes) {
            Range *range = *link;
            found = range->begin;
            *link = range->next;
            free(range);
            break;
        }
    if (!found && bytes > (size_t)(memory->end - memory->next))
        take_slots(memory, number, bytes);
    if (!found && bytes <= (size_t)(memory->end - memory->next)) {
        found = memory->next;
        memory->next += bytes;
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

void device_addresses_free(void *address, size_t bytes) {
    int ordinal = device_of(address);
    if (ordinal < 0)
        return;
    Memory *memory = &memories[device(ordinal)->number];
    Range *range = malloc(sizeof *range);
    forget(address, bytes);
    pthread_mutex_lock(&mutex);
    *range = (Range){address, rounded(bytes ? bytes : 1), memory->addresses_freed};
    memory->addresses_freed = range;
    pthread_mutex_unlock(&mutex);
}

int device_of(const void *address) {
    size_t slot = ((uintptr_t)address - (uintptr_t)space_begin) / SLOT;
    if (!space_begin || slot >= (size_t)slots_taken)
        return -1;
    for (int ordinal = 0; ordinal < device_count(); ordinal++)
        if (visible[ordinal]->number == owners[slot])
            return ordinal;
    return -1;
}

/* It may have written anywhere. */
void device_launch(void) {
    if (graph_takes_kernel())
        return;
    atomic_fetch_add(&launches, 1);
    timeline_add(KERNEL, NULL, 0, 0);
    forget_all();
}

size_t device_launches(void) { return launches; }

static Range *pinned;
static pthread_mutex_t pinned_mutex = PTHREAD_MUTEX_INITIALIZER;

void pin(void *address, size_t bytes) {
    Range *range = malloc(sizeof *range);
    pthread_mutex_lock(&pinned_mutex);
    *range = (Range){address, bytes, pinned};
    pinned = range;
    pthread_mutex_unlock(&pinned_mutex);
}

void unpin(void *address) {
    pthread_mutex_lock(&pinned_mutex);
    for (Range **link = &pinned; *link; link = &(*link)->next)
        if ((*link)->begin == address) {
            Range *range = *link;
            *link = range->next;
            free(range);
            break;
        }
    pthread_mutex_unlock(&pinned_mutex);
}

bool is_pinned(const void *address) {
    bool found = false;
    pthread_mutex_lock(&pinned_mutex);
    for (Range *range = pinned; range && !found; range = range->next)
        found = (uintptr_t)address - (uintptr_t)range->begin < range->bytes;
    pthread_mutex_unlock(&pinned_mutex);
    return found;
}

/* Per compute capability: CUDA C++ Programming Guide, "Technical Specifications". */
typedef struct {
    int capability, threads, blocks, shared_kib, optin_kib;
} Generation;

static const Generation *generation(const Device *of) {
    static const Generation all[] = {
        {70, 2048, 32, 96, 96},   {75, 1024, 16, 64, 64},   {80, 2048, 32, 164, 163},
        {86, 1536, 16, 100, 99},  {89, 1536, 24, 100, 99},  {90, 2048, 32, 228, 227},
        {100, 2048, 32, 228, 227}, {120, 1536, 24, 100, 99},
    };
    int count = sizeof all / sizeof *all, last = 0;
    for (int i = 0; i < count; i++)
        if (all[i].capability <= 10 * of->major + of->minor)
            last = i;
    return &all[last];
}

int device_attribute(int ordinal, int number) {
    const Device *of = device(ordinal);
    const Generation *its = generation(of);
    switch (number) {
    case cudaDevAttrComputeCapabilityMajor: return of->major;
    case cudaDevAttrComputeCapabilityMinor: return of->minor;
    case cudaDevAttrMultiProcessorCount: return of->multiprocessors;
    case cudaDevAttrPciBusId: return of->number + 1;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return its->threads;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return its->blocks;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return its->optin_kib << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return its->shared_kib << 10;
    case cudaDevAttrReservedSharedMemoryPerBlock: return of->major >= 8 ? 1024 : 0;
    case cudaDevAttrL2CacheSize: return of->l2_mib << 20;
    case cudaDevAttrClockRate: return 1980000;       /* kHz, of all */
    case cudaDevAttrMemoryClockRate: return 3201000; /* kHz, of all */
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: return 1024;
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrConcurrentKernels: return 1;
    case cudaDevAttrManagedMemory: return 1;
    case cudaDevAttrAsyncEngineCount: return 3;
    default: return 0;
    }
}

void note(const char *what, size_t bytes) {
    const char *path = getenv("SHARDSCALE_NULL_GPU_LOG");
    if (!path)
        return;
    char line[128];
    int length = snprintf(line, sizeof line, "%s %zu\n", what, bytes);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0 || write(file, line, length) != length)
        perror(path);
    close(file);
}
