/* libnccl: calls of a communicator. Each knows its rank and size. Messages of at most MOST_KEPT bytes,
 * or MOST_SENT from one rank to another unless they are torch's objects, travel between the processes
 * (rendezvous.h) and are reduced for real where their values are known; of larger ones nothing is there, so
 * nobody waits for them.
 *
 * A call returns when its message has arrived, as if the stream had been waited for. In a group
 * (ncclGroupStart) all of its calls go on together, in any order that the ranks allow. As in
 * cublas.c, a function that needs no arguments has none.
 */
#include "communicator.h"
#include "device.h"
#include "reduce.h"
#include "timeline.h"
#include "watchdog.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE } Kind;
static const char *const names[] = {
    "ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter",
    "ncclAlltoAll", "ncclSend", "ncclRecv",
};

/* One call. `bytes` is what this rank contributes, or, to a broadcast or receive, gets. */
typedef struct Call {
    Communicator *communicator;
    Kind kind;
    const void *from;
    void *to;
    size_t bytes;
    int type, operation, root; /* the root or the peer */
    unsigned long number;
    bool posted;
    struct Call *next;
} Call;

static __thread Call *calls; /* of the open group */
static __thread int groups;
static __thread char last_error[256] = "no error";

int fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    fprintf(stderr, "shardscale: %s\n", last_error);
    return code;
}

const char *ncclGetLastError(void) { return last_error; }

/* ncclCommSplit has its values on the host. */
/* What is not known of a message that is known in part is 0, as to everybody who reads it: pickles
 * are sent with room to spare. */
static bool values_of(const void *address, void *out, size_t bytes) {
    if (device_of(address) >= 0)
        return knows(address, bytes) && recall(address, out, bytes) > 0;
    memcpy(out, address, bytes);
    return true;
}

static void set_values(void *address, const void *values, size_t bytes, bool known) {
    if (device_of(address) >= 0 && known)
        keep(address, values, bytes);
    else if (device_of(address) >= 0)
        forget(address, bytes);
    else if (known)
        memcpy(address, values, bytes);
}

/* Bytes of the call's result. */
static size_t result_bytes(const Call *call) {
    size_t size = (size_t)call->communicator->size;
    return call->kind == ALL_GATHER       ? call->bytes * size
           : call->kind == REDUCE_SCATTER ? call->bytes / size
           : call->kind == SEND           ? 0
                                          : call->bytes;
}

static bool gets_result(const Call *call) {
    return call->kind != SEND && (call->kind != REDUCE || call->root == call->communicator->rank);
}

static bool needs(const Call *call, int rank) {
    return call->kind == BROADCAST ? rank == call->root : gets_result(call);
}

/* The result from what each rank has posted. */
static void finish_collective(
    const Call *call, Entry *const *entries, const char *const *values) {
    Communicator *its = call->communicator;
    const char *inputs[its->size];
    size_t bytes = result_bytes(call), part = call->bytes / its->size;
    bool known = true;
    if (call->kind == ALL_GATHER || call->kind == ALL_TO_ALL) {
        bool gathers = call->kind == ALL_GATHER;
        part = gathers ? call->bytes : part;
        for (int rank = 0; rank < its->size; rank++)
            set_values((char *)call->to + rank * part,
                       values[rank] + (gathers ? 0 : its->rank * part), part,
                       entries[rank]->known);
        return;
    }
    if (call->kind == BROADCAST) {
        set_values(call->to, values[call->root], bytes, entries[call->root]->known);
        return;
    }
    for (int rank = 0; rank < its->size; rank++) {
        known = known && entries[rank]->known;
        inputs[rank] = values[rank] + (call->kind == REDUCE_SCATTER ? its->rank * part : 0);
    }
    char *result = known ? malloc(bytes) : NULL;
    known = known && reduce(call->type, call->operation, its->size, inputs, result,
                            bytes / type_bytes(call->type));
    set_values(call->to, result, bytes, known);
    free(result);
}

static void fill(Entry *entry, char *values, const Call *call) {
    entry->operation = (int)call->kind;
    entry->type = call->type;
    entry->root = call->root;
    entry->bytes = call->bytes;
    /* Who contributes nothing has nothing to look up. */
    bool contributes = call->kind != BROADCAST || call->root == call->communicator->rank;
    entry->known = contributes && values_of(call->from, values, call->bytes);
}

/* 1: has happened, 0: has to wait, below 0: the error's code. */
static int progress_collective(Call *call, int *waits_for) {
    Communicator *its = call->communicator;
    Rendezvous *rendezvous = its->rendezvous;
    Seat *own = &rendezvous->seats[its->rank];
    unsigned long slot = call->number % ENTRIES;
    if (!call->posted) {
        if (own->posted != call->number)
            return *waits_for = its->rank, 0; /* another thread's call comes first */
        for (int rank = 0; rank < its->size; rank++)
            if (rendezvous->seats[rank].done + ENTRIES <= call->number)
                return *waits_for = rank, 0;
        fill(&own->entries[slot], own->values[slot], call);
        own->posted = call->number + 1;
        call->posted = true;
    }
    Entry *entries[its->size];
    const char *values[its->size];
    for (int rank = 0; rank < its->size; rank++) {
        entries[rank] = &rendezvous->seats[rank].entries[slot];
        values[rank] = rendezvous->seats[rank].values[slot];
        if (!needs(call, rank))
            continue;
        if (rendezvous->seats[rank].posted <= call->number)
            return *waits_for = rank, 0;
        if (entries[rank]->operation != (int)call->kind || entries[rank]->bytes != call->bytes)
            return -fail(INVALID_USAGE,
                         "rank %d calls %s with %zu bytes where rank %d of %d calls %s with %zu",
                         its->rank, names[call->kind], call->bytes, rank, its->size,
                         names[entries[rank]->operation], entries[rank]->bytes);
    }
    if (own->done != call->number)
        return *waits_for = its->rank, 0;
    if (gets_result(call))
        finish_collective(call, entries, values);
    own->done = call->number + 1;
    return 1;
}

static int progress_pair(Call *call, int *waits_for) {
    Communicator *its = call->communicator;
    bool sends = call->kind == SEND;
    int from = sends ? its->rank : call->root, to = sends ? call->root : its->rank;
    Pipe *pipe = &its->rendezvous->pipes[from * its->size + to];
    Entry *entry = &pipe->entries[call->number % ENTRIES];
    char *values = pipe->values[call->number % ENTRIES];
    *waits_for = call->root;
    if (sends) {
        if (pipe->sent != call->number || pipe->received + ENTRIES <= call->number)
            return 0;
        fill(entry, values, call);
        pipe->sent = call->number + 1;
        return 1;
    }
    if (pipe->received != call->number || pipe->sent <= call->number)
        return 0;
    if (entry->bytes != call->bytes)
        return -fail(INVALID_USAGE, "rank %d receives %zu bytes where rank %d sends %zu", its->rank,
                     call->bytes, from, entry->bytes);
    set_values(call->to, values, call->bytes, entry->known);
    pipe->received = call->number + 1;
    return 1;
}

/* The broadcast of this rank's own part in the open group: torch 2.15 gathers by one of each rank's
   part. */
static __thread Call own_part;

/* As if all others had contributed what this rank does. */
static void answer_alone(Call *call) {
    Communicator *its = call->communicator;
    Entry own, *entries[its->size];
    const char *values[its->size];
    if (call->kind == BROADCAST && call->root == its->rank)
        own_part = groups ? *call : (Call){0};
    else if (call->kind == BROADCAST && own_part.communicator == its && own_part.bytes == call->bytes)
        call->from = own_part.from, call->root = its->rank;
    if (call->kind == SEND || (call->kind == BROADCAST && call->from == call->to))
        return; /* a root sends what is there already */
    if (call->kind == RECEIVE) {
        set_values(call->to, NULL, call->bytes, false);
        return;
    }
    char *contributed = malloc(call->bytes);
    fill(&own, contributed, call);
    for (int rank = 0; rank < its->size; rank++) {
        entries[rank] = &own;
        values[rank] = contributed;
    }
    if (gets_result(call))
        finish_collective(call, entries, values);
    free(contributed);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static double timeout_s(void) {
    const char *text = getenv("SHARDSCALE_NULL_GPU_TIMEOUT_S");
    return text ? atof(text) : 1800;
}

/* Take each call as far as it goes until all have happened, or one cannot. */
static int run(Call *first) {
    double until = now_s() + timeout_s();
    int suspect = -1;
    for (long rounds = 0;; rounds++) {
        bool moved = false;
        Call *waiting = NULL;
        int waits_for = 0;
        for (Call **link = &first; *link;) {
            Call *call = *link;
            int blocker = 0;
            int state = call->kind < SEND ? progress_collective(call, &blocker)
                                          : progress_pair(call, &blocker);
            if (state < 0)
                return -state;
            if (state == 0) {
                waiting = call;
                waits_for = blocker;
                link = &call->next;
                continue;
            }
            moved = true;
            *link = call->next;
            free(call);
        }
        if (!waiting)
            return SUCCESS;
        if (moved)
            continue;
        Communicator *its = waiting->communicator;
        if (its->aborted)
            return INTERNAL_ERROR;
        const char *absence = rendezvous_absence(its->rendezvous, waits_for);
        if (!absence && now_s() > until)
            absence = its->rendezvous->seats[waits_for].process ? "has not called it in time"
                                                             : "has never joined the group";
        bool sure = absence && suspect == waits_for; /* it may have posted just before */
        suspect = absence ? waits_for : -1;
        if (sure && waits_for != its->rank)
            return fail(REMOTE_ERROR, "%s of rank %d waits for rank %d of %d, which %s",
                        names[waiting->kind], its->rank, waits_for, its->size, absence);
        long pause_ns = rounds < 100 ? 20000 : 1000000;
        nanosleep(&(struct timespec){0, pause_ns}, NULL);
    }
}

static int start(Call call) {
    Communicator *its = call.communicator;
    if (!type_bytes(call.type))
        return fail(INVALID_ARGUMENT, "%s: type %d is not known", names[call.kind], call.type);
    if (call.bytes > (call.kind < SEND || follows() ? MOST_KEPT : MOST_SENT)) {
        if (gets_result(&call))
            set_values(call.to, NULL, result_bytes(&call), false);
        return SUCCESS;
    }
    if (!its->rendezvous) {
        answer_alone(&call);
        return SUCCESS;
    }
    pthread_mutex_lock(&its->mutex);
    call.number = call.kind == SEND      ? its->sent[call.root]++
                  : call.kind == RECEIVE ? its->received[call.root]++
                                         : its->collectives++;
    pthread_mutex_unlock(&its->mutex);
    Call *queued = malloc(sizeof *queued);
    *queued = call;
    if (!groups)
        return run(queued);
    Call **last = &calls;
    while (*last)
        last = &(*last)->next;
    *last = queued;
    return SUCCESS;
}

int ncclGroupStart(void) {
    groups++;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    if (--groups)
        return SUCCESS;
    own_part = (Call){0};
    Call *all = calls;
    calls = NULL;
    return all ? run(all) : SUCCESS;
}

int exchange(Communicator *its, const void *from, void *to, size_t bytes) {
    int open = groups;
    groups = 0;
    int status = start((Call){.communicator = its, .kind = ALL_GATHER, .from = from, .to = to, .bytes = bytes});
    groups = open;
    return status;
}

static int start_on(const void *stream, Call call) {
    watchdogs_owe();
    timeline_add(COLLECTIVE, stream, call.bytes, (size_t)call.kind << 32 | call.communicator->size);
    return start(call);
}

#define CALL(...) start_on(stream, (Call){.communicator = its, .type = type, __VA_ARGS__})
#define BYTES (count * type_bytes(type))

int ncclAllReduce(
    const void *from, void *to, size_t count, int type, int operation, Communicator *its,
    void *stream) {
    return CALL(.kind = ALL_REDUCE, .from = from, .to = to, .bytes = BYTES, .operation = operation);
}

int ncclReduce(
    const void *from, void *to, size_t count, int type, int operation, int root,
    Communicator *its, void *stream) {
    return CALL(.kind = REDUCE, .from = from, .to = to, .bytes = BYTES, .operation = operation,
                .root = root);
}

int ncclBroadcast(
    const void *from, void *to, size_t count, int type, int root, Communicator *its,
    void *stream) {
    return CALL(.kind = BROADCAST, .from = from, .to = to, .bytes = BYTES, .root = root);
}

int ncclBcast(
    void *buffer, size_t count, int type, int root, Communicator *its, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, its, stream);
}

int ncclAllGather(
    const void *from, void *to, size_t count, int type, Communicator *its, void *stream) {
    return CALL(.kind = ALL_GATHER, .from = from, .to = to, .bytes = BYTES);
}

int ncclReduceScatter(
    const void *from, void *to, size_t count, int type, int operation, Communicator *its,
    void *stream) {
    return CALL(.kind = REDUCE_SCATTER, .from = from, .to = to, .bytes = BYTES * its->size,
                .operation = operation);
}

int ncclAlltoAll(
    const void *from, void *to, size_t count, int type, Communicator *its, void *stream) {
    return CALL(.kind = ALL_TO_ALL, .from = from, .to = to, .bytes = BYTES * its->size);
}

int ncclSend(
    const void *from, size_t count, int type, int peer, Communicator *its, void *stream) {
    return CALL(.kind = SEND, .from = from, .bytes = BYTES, .root = peer);
}

int ncclRecv(
    void *to, size_t count, int type, int peer, Communicator *its, void *stream) {
    return CALL(.kind = RECEIVE, .to = to, .bytes = BYTES, .root = peer);
}
