/* See meet.h. */
#include "meet.h"
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

Meeting *meeting_join(const char *key, int rank, int size) {
    const char *folder = getenv("SHARDSCALE_STAND_IN_MEET");
    Meeting *meeting = calloc(1, sizeof *meeting);
    *meeting = (Meeting){.rank = rank, .size = size};
    snprintf(meeting->path, sizeof meeting->path, "%s/shardscale-nccl-%s",
             folder ? folder : "/tmp", key);
    size_t seats = size * sizeof(Seat), pipes = (size_t)size * size * sizeof(Pipe);
    meeting->bytes = sizeof(Door) + seats + pipes;
    int file = open(meeting->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    meeting->memory = MAP_FAILED;
    /* Zeros, and nothing on the disk where nobody writes. */
    if (file >= 0 && !ftruncate(file, (off_t)meeting->bytes))
        meeting->memory = mmap(NULL, meeting->bytes, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_NORESERVE, file, 0);
    if (meeting->memory == MAP_FAILED) {
        fprintf(stderr, "shardscale: ranks cannot meet in %s (%s): set SHARDSCALE_STAND_IN_MEET to "
                "a folder that all can write\n", meeting->path, strerror(errno));
        if (file >= 0)
            close(file);
        free(meeting);
        return NULL;
    }
    close(file);
    Door *door = meeting->memory;
    meeting->seats = (Seat *)(door + 1);
    meeting->pipes = (Pipe *)(meeting->seats + size);
    meeting->seats[rank].process = getpid();
    if (atomic_fetch_add(&door->joined, 1) + 1 == size)
        unlink(meeting->path); /* what is mapped stays, and nothing is left if somebody is killed */
    return meeting;
}

void meeting_leave(Meeting *meeting) {
    meeting->seats[meeting->rank].left = 1;
    if (((Door *)meeting->memory)->joined < meeting->size)
        unlink(meeting->path);
    munmap(meeting->memory, meeting->bytes);
    free(meeting);
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

const char *meeting_absence(const Meeting *meeting, int rank) {
    const Seat *seat = &meeting->seats[rank];
    if (seat->left)
        return "has left the group";
    if (seat->process && has_ended(seat->process))
        return "has ended";
    return NULL;
}
