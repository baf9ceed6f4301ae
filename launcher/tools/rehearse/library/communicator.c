/* libnccl: how communicators are made, asked and ended. */
#include "communicator.h"
#include "device.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

typedef struct {
    char bytes[128];
} UniqueId;

int ncclGetVersion(int *out) {
    *out = 22809;
    return SUCCESS;
}

int ncclGetUniqueId(UniqueId *out) {
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return INTERNAL_ERROR;
    memset(out, 0, sizeof *out);
    snprintf(out->bytes, sizeof out->bytes, "%016lx%016lx", random[0], random[1]);
    return SUCCESS;
}

/* Take a seat with a GPU; SUCCESS unless another rank has it, as NCCL wants one for each. */
static int take_gpu(const Communicator *its) {
    Seat *seats = its->rendezvous->seats;
    const Device *gpu = device(its->device);
    seats[its->rank].gpu = gpu ? gpu->number + 1 : 0;
    for (int other = 0; gpu && other < its->size; other++)
        if (other != its->rank && seats[other].gpu == gpu->number + 1)
            return fail(INVALID_USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA "
                "device %d, where each needs its own, as torch.cuda.set_device(LOCAL_RANK) selects",
                its->rank, other, gpu->number);
    return SUCCESS;
}

static int make(Communicator **out, const char *key, int rank, int size, int device) {
    if (size < 1 || rank < 0 || rank >= size)
        return fail(INVALID_ARGUMENT, "rank %d of %d is none", rank, size);
    Communicator *new = calloc(1, sizeof *new);
    snprintf(new->key, sizeof new->key, "%s", key);
    new->rank = rank;
    new->size = size;
    new->device = device;
    new->sent = calloc(2 * size, sizeof *new->sent);
    new->received = new->sent + size;
    pthread_mutex_init(&new->mutex, NULL);
    const char *alone = getenv("SHARDSCALE_NULL_GPU_ALONE");
    if (size > 1 && (!alone || strcmp(alone, "1"))) {
        new->rendezvous = rendezvous_join(new->key, rank, size);
        if (!new->rendezvous)
            return fail(INTERNAL_ERROR, "rank %d of %d cannot join the rendezvous", rank, size);
    }
    *out = new;
    return new->rendezvous ? take_gpu(new) : SUCCESS;
}

int ncclCommInitRank(Communicator **out, int size, UniqueId id, int rank) {
    return make(out, id.bytes, rank, size, device_current());
}

int ncclCommInitRankConfig(Communicator **out, int size, UniqueId id, int rank, void *config) {
    (void)config;
    return make(out, id.bytes, rank, size, device_current());
}

int ncclCommInitRankScalable(
    Communicator **out, int size, int rank, int id_count, UniqueId *ids, void *config) {
    (void)id_count, (void)config;
    return make(out, ids->bytes, rank, size, device_current());
}

/* All ranks in this process. */
int ncclCommInitAll(Communicator **out, int size, const int *devices) {
    UniqueId id;
    int status = ncclGetUniqueId(&id);
    for (int rank = 0; rank < size && status == SUCCESS; rank++)
        status = make(&out[rank], id.bytes, rank, size, devices ? devices[rank] : rank);
    return status;
}

/* FNV-1a, twice from different starts: a name that no other split of this parent has. */
static void name_split(char out[40], const Communicator *parent, int color) {
    char text[96];
    uint64_t hashes[2] = {0xcbf29ce484222325, 0x84222325cbf29ce4};
    snprintf(text, sizeof text, "%s/%lu/%d", parent->key, parent->splits, color);
    for (int half = 0; half < 2; half++)
        for (const char *c = text; *c; c++)
            hashes[half] = (hashes[half] ^ (unsigned char)*c) * 0x100000001b3;
    snprintf(out, 40, "%016lx%016lx", hashes[0], hashes[1]);
}

/* Ranks of one color, ordered by key and then by their rank in the parent. */
int ncclCommSplit(Communicator *parent, int color, int key, Communicator **out, void *config) {
    (void)config;
    int own[2] = {color, key}, (*all)[2] = calloc(parent->size, sizeof own);
    int status = exchange(parent, own, all, sizeof own), rank = 0, size = 0;
    char name[40];
    for (int i = 0; i < parent->size && status == SUCCESS; i++) {
        bool before = all[i][1] < key || (all[i][1] == key && i < parent->rank);
        size += all[i][0] == color;
        rank += all[i][0] == color && before;
    }
    free(all);
    parent->splits++;
    *out = NULL;
    if (status != SUCCESS || color < 0) /* NCCL_SPLIT_NOCOLOR: a member of none */
        return status;
    name_split(name, parent, color);
    /* A rank alone counts as the whole group in each of its parts. */
    return make(out, name, parent->rendezvous ? rank : parent->rank, size, parent->device);
}

int ncclCommCount(const Communicator *its, int *out) {
    *out = its->size;
    return SUCCESS;
}

int ncclCommUserRank(const Communicator *its, int *out) {
    *out = its->rank;
    return SUCCESS;
}

int ncclCommCuDevice(const Communicator *its, int *out) {
    *out = its->device;
    return SUCCESS;
}

int ncclCommGetAsyncError(const Communicator *its, int *out) {
    (void)its;
    *out = SUCCESS;
    return SUCCESS;
}

int ncclCommFinalize(Communicator *its) {
    (void)its;
    return SUCCESS;
}

int ncclCommDestroy(Communicator *its) {
    if (its->rendezvous)
        rendezvous_leave(its->rendezvous);
    free(its->sent);
    free(its);
    return SUCCESS;
}

/* Another thread may be waiting in a call, so nothing is freed. */
int ncclCommAbort(Communicator *its) {
    its->aborted = 1;
    if (its->rendezvous)
        its->rendezvous->seats[its->rank].left = 1;
    return SUCCESS;
}

int ncclCommRegister(const Communicator *its, void *buffer, size_t bytes, void **handle) {
    (void)its, (void)bytes;
    *handle = buffer;
    return SUCCESS;
}

int ncclCommDeregister(const Communicator *its, void *handle) {
    (void)its, (void)handle;
    return SUCCESS;
}

/* The values of an operation of the caller's own are not computed. */
int ncclRedOpCreatePreMulSum(
    int *out, void *scalar, int type, int residence, const Communicator *its) {
    (void)scalar, (void)type, (void)residence, (void)its;
    *out = 7;
    return SUCCESS;
}

int ncclRedOpDestroy(int operation, const Communicator *its) {
    (void)operation, (void)its;
    return SUCCESS;
}

const char *ncclGetErrorString(int error) {
    switch (error) {
    case SUCCESS: return "no error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    default: return "internal error";
    }
}
