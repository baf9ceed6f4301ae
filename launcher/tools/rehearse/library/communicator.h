/* A communicator of NCCL's, as one of its ranks holds it. */
#pragma once
#include "rendezvous.h"
#include <pthread.h>

/* ncclResult_t */
enum { SUCCESS, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };

typedef struct {
    char key[40]; /* names the file of its rendezvous */
    int rank, size, device;
    Rendezvous *rendezvous; /* NULL: this rank answers for all */
    pthread_mutex_t mutex;
    unsigned long collectives, splits, *sent, *received; /* calls so far; the last two per peer */
    atomic_int aborted;
} Communicator;

/* Say a sentence, keep it for ncclGetLastError, and return the code. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Bytes of every rank, all of the same number, in the order of ranks: on the host, and at once even
 * in an open group. */
int exchange(Communicator *its, const void *from, void *to, size_t bytes);
