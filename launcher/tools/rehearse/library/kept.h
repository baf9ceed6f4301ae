/* Bytes of device memory whose values are known: small ones that the host has sent. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

enum {
    MOST_KEPT = 1 << 22,  /* bytes of one copy, as a pickled object is; a larger one is dropped */
    FEW_KEPT = 1 << 16,   /* of those above this, such as weights, only the newest stay */
    LARGE_KEPT = 1 << 26, /* bytes of these in all, and of those that are held */
};

/* Keep the values at a device's address; more than MOST_KEPT bytes are forgotten instead. */
void keep(const void *address, const void *values, size_t bytes);
/* Keep at `to` what is known at `from`, and nothing else. */
void keep_copy(const void *to, const void *from, size_t bytes);
/* Copy what is known, and 0 for the rest; return how many bytes are known. */
size_t recall(const void *address, void *out, size_t bytes);
/* Hold values beyond the next kernels: the caller says whether one has written there, which is asked
 * with `recall_held` alone. Copies and messages to the range end it. */
void hold(const void *address, const void *values, size_t bytes);
void release(const void *address, size_t bytes);
size_t recall_held(const void *address, void *out, size_t bytes);
/* Some of its bytes are known. */
bool knows(const void *address, size_t bytes);
/* Something else may be there now. */
void forget(const void *address, size_t bytes);
void forget_all(void);
/* Until `false`, the calling thread says itself what its kernels have written: forget_all does
 * nothing. */
void follow(bool on);
bool follows(void);
