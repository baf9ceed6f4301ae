/* What a step asks of the device, in the order in which the host asks, for the launcher to price. */
#pragma once
#include <stddef.h>

typedef enum {
    OPERATOR, /* the host dispatches one; a: in a hook, whose time is known as a whole */
    KERNEL,
    COPY,       /* a: bytes, b: a Direction */
    COLLECTIVE, /* a: bytes as Call has them; b: 2^32 x its kind + ranks */
    RECORD_EVENT, /* a: the event */
    WAIT_EVENT,   /* a: the event */
    SYNCHRONIZE, /* the host waits: for the stream, for event a, or for the device (b: 1) */
    HOOK,        /* a: its kind, see inside/shardscale_rehearsal/engines.py */
} Entry_kind;

typedef enum { ON_DEVICE, TO_DEVICE, TO_HOST } Direction;

/* Append an entry while a timeline is written, else do nothing. Kernels lie on the stream of the
 * operator that launches them. */
void timeline_add(Entry_kind kind, const void *stream, size_t a, size_t b);
