/* See host.h. torch asks posix_memalign, free and mmap, so these are defined here before the C
 * library's, and hand on whatever is not large. */
#define _GNU_SOURCE
#include "host.h"
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const size_t SPACE = (size_t)1 << 43;

typedef struct Block {
    char *begin;
    size_t bytes; /* a multiple of LARGE */
    bool shared;
    struct Block *next;
} Block;

extern void __libc_free(void *);
typedef int (*Memalign)(void **, size_t, size_t);
typedef void (*Free)(void *);

static char *space_begin, *space_used;
static Block *blocks;
static size_t budget, taken;
static int chunk = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void begin(void) {
    const char *text = getenv("SHARDSCALE_NULL_GPU_HOST_BYTES");
    if (!text)
        return;
    budget = strtoull(text, NULL, 10);
    void *space = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    chunk = memfd_create("shardscale", MFD_CLOEXEC);
    if (space == MAP_FAILED || chunk < 0 || ftruncate(chunk, LARGE))
        return;
    space_begin = space_used = space;
}

/* Pages of the block's own, or those that all share. */
static bool back(Block *block) {
    if (!block->shared)
        return mmap(block->begin, block->bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
            != MAP_FAILED;
    for (size_t at = 0; at < block->bytes; at += LARGE)
        if (mmap(block->begin + at, LARGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, chunk, 0)
            == MAP_FAILED)
            return false;
    return true;
}

static void unback(const Block *block) {
    mmap(block->begin, block->bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void *host_block(size_t bytes) {
    pthread_once(&once, begin);
    size_t whole = (bytes + LARGE - 1) / LARGE * LARGE;
    if (!space_begin || bytes < LARGE || whole < bytes)
        return NULL;
    Block *block = malloc(sizeof *block);
    if (!block)
        return NULL;
    pthread_mutex_lock(&mutex);
    bool room = whole <= (size_t)(space_begin + SPACE - space_used);
    if (room) {
        *block = (Block){space_used, whole, taken + whole > budget, blocks};
        room = back(block);
    }
    if (room) {
        space_used += whole; /* addresses are not used twice */
        taken += whole;
        blocks = block;
    }
    pthread_mutex_unlock(&mutex);
    if (room)
        return block->begin;
    __libc_free(block);
    return NULL;
}

bool host_block_free(void *address) {
    if (!space_begin || (char *)address < space_begin || (char *)address >= space_begin + SPACE)
        return false;
    Block *found = NULL;
    pthread_mutex_lock(&mutex);
    for (Block **link = &blocks; *link; link = &(*link)->next)
        if ((*link)->begin == address) {
            found = *link;
            *link = found->next;
            taken -= found->bytes;
            unback(found);
            break;
        }
    pthread_mutex_unlock(&mutex);
    free(found);
    return true;
}

/* Bytes after which a tensor at `address` repeats itself, for Python to ask; 0: it does not. */
size_t shardscale_repeats(const void *address) {
    size_t bytes = 0;
    pthread_mutex_lock(&mutex);
    for (const Block *block = blocks; block; block = block->next)
        if ((const char *)address >= block->begin && (const char *)address < block->begin + block->bytes)
            bytes = block->shared ? LARGE : 0;
    pthread_mutex_unlock(&mutex);
    return bytes;
}

static bool is_of_torch(const void *caller) {
    Dl_info info;
    return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libc10.so");
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    static Memalign next;
    if (bytes >= LARGE && is_of_torch(__builtin_return_address(0)) && (*out = host_block(bytes)))
        return 0;
    if (!next)
        next = (Memalign)dlsym(RTLD_NEXT, "posix_memalign");
    return next ? next(out, alignment, bytes) : ENOMEM;
}

void free(void *address) {
    static Free next;
    static __thread bool looking; /* dlsym may free by itself */
    if (host_block_free(address))
        return;
    if (!next && !looking) {
        looking = true;
        next = (Free)dlsym(RTLD_NEXT, "free");
        looking = false;
    }
    (next ? next : __libc_free)(address);
}

/* torch maps a file of weights as a private copy that it could write to, for which Linux wants as
 * much memory as the file is long: one larger than the machine would be refused. */
void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (file >= 0 && bytes >= LARGE && flags & MAP_PRIVATE)
        flags |= MAP_NORESERVE;
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

_Static_assert(sizeof(off_t) == sizeof(off64_t), "mmap64 is mmap");
void *mmap64(void *, size_t, int, int, int, off64_t) __attribute__((alias("mmap")));
