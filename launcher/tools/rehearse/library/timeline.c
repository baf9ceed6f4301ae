/* See timeline.h. A few hundred thousand entries at most: those of one step. */
#include "timeline.h"
#include "device.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    int32_t kind, operator; /* 0: of no operator */
    uint64_t stream, a, b;
} Entry;

static Entry *entries;
static size_t count, room;
static size_t apart_until; /* entries at the end of the last phase apart; 0: none */
static atomic_bool on, left_out;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
/* Of the operator that the calling thread runs. */
static __thread int32_t operator;
static __thread const void *operator_stream;

void timeline_add(Entry_kind kind, const void *stream, size_t a, size_t b) {
    if (!on || left_out)
        return;
    if (kind == KERNEL)
        stream = operator_stream;
    if (!stream) /* every GPU has a default one; no pointer is as small */
        stream = (const void *)(uintptr_t)(device_current() << 8);
    pthread_mutex_lock(&mutex);
    if (count == room) {
        size_t wanted = room ? 2 * room : 1 << 14;
        Entry *more = realloc(entries, wanted * sizeof *more);
        room = more ? wanted : room;
        entries = more ? more : entries;
    }
    if (count < room)
        entries[count++] = (Entry){kind, operator, (uintptr_t)stream, a, b};
    pthread_mutex_unlock(&mutex);
}

/* For Python: begin anew, or stop. */
void shardscale_timeline(bool start) {
    pthread_mutex_lock(&mutex);
    count = start ? 0 : count;
    on = start;
    left_out = false;
    apart_until = 0;
    pthread_mutex_unlock(&mutex);
}

/* A phase apart begins or ends, an evaluation or a save: it is no part of the step, and neither is
 * what lies between two of them, such as an evaluation's losses. */
void shardscale_timeline_apart(bool begins) {
    pthread_mutex_lock(&mutex);
    if (begins && apart_until && apart_until < count)
        count = apart_until;
    apart_until = count;
    left_out = begins;
    pthread_mutex_unlock(&mutex);
}

/* A phase of the step goes on: what comes now lies between no two phases apart. */
void shardscale_timeline_goes_on(void) { apart_until = 0; }

/* The calling thread dispatches operator `number`, whose kernels go to `stream`; 0: it has. */
void shardscale_timeline_operator(int number, const void *stream, bool in_hook) {
    operator = number;
    operator_stream = stream;
    if (number)
        timeline_add(OPERATOR, stream, in_hook, 0);
}

void shardscale_timeline_hook(int kind) { timeline_add(HOOK, NULL, kind, 0); }

/* The host waits for a value. */
void shardscale_timeline_wait(const void *stream) { timeline_add(SYNCHRONIZE, stream, 0, 0); }

/* Write all entries to a file; false where that failed. */
bool shardscale_timeline_write(const char *path) {
    FILE *file = fopen(path, "wb");
    bool written = file && fwrite(entries, sizeof *entries, count, file) == count;
    return (!file || !fclose(file)) && written;
}
