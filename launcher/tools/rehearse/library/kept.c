/* See kept.h. A handful of ranges is alive at a time, so a list is enough. */
#include "kept.h"
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct Kept {
    uintptr_t begin;
    size_t bytes;
    struct Kept *next;
    char values[];
} Kept;

static Kept *first, *held;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static Kept *new_range(uintptr_t begin, const void *values, size_t bytes, Kept *next) {
    Kept *range = malloc(sizeof *range + bytes);
    range->begin = begin;
    range->bytes = bytes;
    range->next = next;
    memcpy(range->values, values, bytes);
    return range;
}

/* Cut [begin, end) out of a list: of a range its head and tail stay. */
static void cut_out_of(Kept **list, uintptr_t begin, uintptr_t end) {
    for (Kept **link = list; *link;) {
        Kept *range = *link;
        uintptr_t range_end = range->begin + range->bytes;
        if (range_end <= begin || end <= range->begin) {
            link = &range->next;
            continue;
        }
        *link = range->next;
        if (end < range_end)
            *link = new_range(end, range->values + (end - range->begin), range_end - end, *link);
        if (range->begin < begin)
            *link = new_range(range->begin, range->values, begin - range->begin, *link);
        /* Neither overlaps any more, so the next round passes them. */
        free(range);
    }
}

static void cut(uintptr_t begin, uintptr_t end) {
    cut_out_of(&first, begin, end);
    cut_out_of(&held, begin, end);
}

void forget(const void *address, size_t bytes) {
    pthread_mutex_lock(&mutex);
    cut((uintptr_t)address, (uintptr_t)address + bytes);
    pthread_mutex_unlock(&mutex);
}

/* Drop the large ranges that are older than the newest LARGE_KEPT bytes of them. */
static void trim(void) {
    size_t left = LARGE_KEPT;
    for (Kept **link = &first; *link;) {
        Kept *range = *link;
        bool large = range->bytes > FEW_KEPT;
        if (large && range->bytes > left) {
            *link = range->next;
            free(range);
            continue;
        }
        left -= large ? range->bytes : 0;
        link = &range->next;
    }
}

void keep(const void *address, const void *values, size_t bytes) {
    pthread_mutex_lock(&mutex);
    cut((uintptr_t)address, (uintptr_t)address + bytes);
    if (bytes <= MOST_KEPT)
        first = new_range((uintptr_t)address, values, bytes, first);
    if (bytes > FEW_KEPT)
        trim();
    pthread_mutex_unlock(&mutex);
}

void hold(const void *address, const void *values, size_t bytes) {
    uintptr_t begin = (uintptr_t)address;
    pthread_mutex_lock(&mutex);
    cut_out_of(&held, begin, begin + bytes);
    held = new_range(begin, values, bytes, held);
    Kept *last = held;
    for (size_t left = LARGE_KEPT; last->next && left > last->bytes; last = last->next)
        left -= last->bytes;
    while (last->next) {
        Kept *oldest = last->next;
        last->next = oldest->next;
        free(oldest);
    }
    pthread_mutex_unlock(&mutex);
}

void release(const void *address, size_t bytes) {
    pthread_mutex_lock(&mutex);
    cut_out_of(&held, (uintptr_t)address, (uintptr_t)address + bytes);
    pthread_mutex_unlock(&mutex);
}

void keep_copy(const void *to, const void *from, size_t bytes) {
    uintptr_t begin = (uintptr_t)from, end = begin + bytes;
    Kept *copies = NULL;
    pthread_mutex_lock(&mutex);
    for (Kept *range = first; range && bytes <= MOST_KEPT; range = range->next) {
        uintptr_t range_end = range->begin + range->bytes;
        uintptr_t low = range->begin > begin ? range->begin : begin;
        uintptr_t high = range_end < end ? range_end : end;
        if (low < high)
            copies = new_range((uintptr_t)to + (low - begin), range->values + (low - range->begin),
                               high - low, copies);
    }
    cut((uintptr_t)to, (uintptr_t)to + bytes);
    while (copies) {
        Kept *copied = copies;
        copies = copied->next;
        copied->next = first;
        first = copied;
    }
    if (bytes > FEW_KEPT)
        trim();
    pthread_mutex_unlock(&mutex);
}

bool knows(const void *address, size_t bytes) {
    uintptr_t begin = (uintptr_t)address, end = begin + bytes;
    bool found = false;
    pthread_mutex_lock(&mutex);
    for (Kept *range = first; range && !found; range = range->next)
        found = range->begin < end && begin < range->begin + range->bytes;
    pthread_mutex_unlock(&mutex);
    return found;
}

static size_t recall_from(Kept *range, const void *address, void *out, size_t bytes) {
    uintptr_t begin = (uintptr_t)address, end = begin + bytes;
    size_t known = 0;
    memset(out, 0, bytes);
    for (; range; range = range->next) {
        uintptr_t from = range->begin > begin ? range->begin : begin;
        uintptr_t range_end = range->begin + range->bytes, to = range_end < end ? range_end : end;
        if (from >= to)
            continue;
        memcpy((char *)out + (from - begin), range->values + (from - range->begin), to - from);
        known += to - from;
    }
    return known;
}

size_t recall(const void *address, void *out, size_t bytes) {
    pthread_mutex_lock(&mutex);
    size_t known = recall_from(first, address, out, bytes);
    pthread_mutex_unlock(&mutex);
    return known;
}

size_t recall_held(const void *address, void *out, size_t bytes) {
    pthread_mutex_lock(&mutex);
    size_t known = recall_from(held, address, out, bytes);
    pthread_mutex_unlock(&mutex);
    return known;
}

static __thread bool followed;

void follow(bool on) { followed = on; }

bool follows(void) { return followed; }

void forget_all(void) {
    if (followed)
        return;
    pthread_mutex_lock(&mutex);
    while (first) {
        Kept *range = first;
        first = range->next;
        free(range);
    }
    pthread_mutex_unlock(&mutex);
}
