/* The rendezvous of the processes of one communicator: a file that all map, with a seat per rank and
 * a pipe per pair. Each has a ring of entries, so that a rank may be some messages ahead of another. */
#pragma once
#include "kept.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

enum {
    ENTRIES = 8,
    MOST_SENT = 1 << 16, /* bytes of a message of a pipe, but for those of torch's objects */
};

/* One message. `known`: its values are there, and not only its size. */
typedef struct {
    int operation, type, root;
    size_t bytes;
    bool known;
} Entry;

typedef struct {
    atomic_ulong posted, done; /* collectives that this rank has called, and finished */
    atomic_int process;        /* 0: not here yet */
    atomic_int gpu;            /* its number in the machine + 1; 0: not here yet */
    atomic_int left;
    Entry entries[ENTRIES];
    char values[ENTRIES][MOST_KEPT];
} Seat;

typedef struct {
    atomic_ulong sent, received;
    Entry entries[ENTRIES];
    char values[ENTRIES][MOST_KEPT];
} Pipe;

typedef struct {
    char path[256];
    int rank, size;
    size_t bytes;
    void *memory;
    Seat *seats;
    Pipe *pipes; /* from * size + to */
} Rendezvous;

/* Join as a rank; NULL, with a sentence, where there is no room for the file. Waits for nobody. */
Rendezvous *rendezvous_join(const char *key, int rank, int size);
void rendezvous_leave(Rendezvous *rendezvous);

/* Why `rank` will never come: a sentence's end, or NULL. */
const char *rendezvous_absence(const Rendezvous *rendezvous, int rank);
