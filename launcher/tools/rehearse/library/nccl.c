/* libnccl, for a group of one: what it would send is on the device, where nothing is. As in
 * cublas.c, a function that needs no arguments has none. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define SUCCEEDS(name) \
    int name(void) { return 0; }
#define CREATES(name) \
    int name(void **out) { \
        *out = malloc(1); \
        return 0; \
    }
#define ANSWERS(name, value) \
    int name(void *communicator, int *out) { \
        (void)communicator; \
        *out = value; \
        return 0; \
    }

int ncclGetVersion(int *out) {
    *out = 22809;
    return 0;
}

int ncclGetUniqueId(char out[128]) {
    memset(out, 7, 128);
    return 0;
}

const char *ncclGetErrorString(int error) {
    return error ? "an error of the stand-in" : "no error";
}

const char *ncclGetLastError(void) { return "no error"; }

CREATES(ncclCommInitRank)
CREATES(ncclCommInitRankConfig)
CREATES(ncclCommInitRankScalable)
SUCCEEDS(ncclCommAbort)
SUCCEEDS(ncclCommDestroy)
SUCCEEDS(ncclCommFinalize)
ANSWERS(ncclCommCount, 1)
ANSWERS(ncclCommUserRank, 0)
ANSWERS(ncclCommGetAsyncError, 0)

int ncclCommSplit(void *whole, int color, int key, void **out) {
    (void)whole, (void)color, (void)key;
    *out = malloc(1);
    return 0;
}

int ncclCommRegister(void *communicator, void *buffer, size_t bytes, void **handle) {
    (void)communicator, (void)bytes;
    *handle = buffer;
    return 0;
}

SUCCEEDS(ncclCommDeregister)
SUCCEEDS(ncclGroupStart)
SUCCEEDS(ncclGroupEnd)
SUCCEEDS(ncclAllReduce)
SUCCEEDS(ncclReduceScatter)
SUCCEEDS(ncclBroadcast)
SUCCEEDS(ncclBcast)
SUCCEEDS(ncclReduce)
SUCCEEDS(ncclSend)
SUCCEEDS(ncclRecv)
SUCCEEDS(ncclRedOpDestroy)

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream);

/* DDP compares how many parameters each rank has, in numbers of 8 bytes. */
int ncclAllGather(const void *from, void *to, size_t count, int type) {
    return cudaMemcpyAsync(to, from, count * (type == 4 || type == 5 ? 8 : 1), 0, NULL);
}

int ncclRedOpCreatePreMulSum(int *out) {
    *out = 7;
    return 0;
}
