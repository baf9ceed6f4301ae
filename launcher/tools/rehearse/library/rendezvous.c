/* See rendezvous.h. */
#include "rendezvous.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Before the seats: how many have joined. */
typedef struct {
    atomic_int joined;
    char padding[4092];
} Door;

Rendezvous *rendezvous_join(const char *key, int rank, int size) {
    const char *folder = getenv("SHARDSCALE_NULL_GPU_RENDEZVOUS");
    Rendezvous *rendezvous = calloc(1, sizeof *rendezvous);
    *rendezvous = (Rendezvous){.rank = rank, .size = size};
    snprintf(rendezvous->path, sizeof rendezvous->path, "%s/shardscale-nccl-%s",
             folder ? folder : "/tmp", key);
    size_t seats = size * sizeof(Seat), pipes = (size_t)size * size * sizeof(Pipe);
    rendezvous->bytes = sizeof(Door) + seats + pipes;
    int file = open(rendezvous->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    rendezvous->memory = MAP_FAILED;
    /* Zeros, and nothing on the disk where nobody writes. */
    if (file >= 0 && !ftruncate(file, (off_t)rendezvous->bytes))
        rendezvous->memory = mmap(NULL, rendezvous->bytes, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_NORESERVE, file, 0);
    if (rendezvous->memory == MAP_FAILED) {
        fprintf(stderr, "shardscale: the ranks' rendezvous %s cannot be opened (%s): set "
                "SHARDSCALE_NULL_GPU_RENDEZVOUS to a folder that all can write\n", rendezvous->path, strerror(errno));
        if (file >= 0)
            close(file);
        free(rendezvous);
        return NULL;
    }
    close(file);
    Door *door = rendezvous->memory;
    rendezvous->seats = (Seat *)(door + 1);
    rendezvous->pipes = (Pipe *)(rendezvous->seats + size);
    rendezvous->seats[rank].process = getpid();
    if (atomic_fetch_add(&door->joined, 1) + 1 == size)
        unlink(rendezvous->path); /* what is mapped stays, and nothing is left if somebody is killed */
    return rendezvous;
}

void rendezvous_leave(Rendezvous *rendezvous) {
    rendezvous->seats[rendezvous->rank].left = 1;
    if (((Door *)rendezvous->memory)->joined < rendezvous->size)
        unlink(rendezvous->path);
    munmap(rendezvous->memory, rendezvous->bytes);
    free(rendezvous);
}

/* One that nobody has waited for yet (a zombie) has a number still. */
static bool has_ended(int process) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "r");
    if (!file)
        return kill(process, 0) && errno == ESRCH;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    /* The name, in parentheses, may have any characters. */
    const char *state = strrchr(text, ')');
    return state && (state[2] == 'Z' || state[2] == 'X');
}

const char *rendezvous_absence(const Rendezvous *rendezvous, int rank) {
    const Seat *seat = &rendezvous->seats[rank];
    if (seat->left)
        return "has left the group";
    if (seat->process && has_ended(seat->process))
        return "has ended";
    return NULL;
}
