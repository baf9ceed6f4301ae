/* See refuse.h. */
#include "refuse.h"
#include <stdio.h>

int refuse(const char *name, int code, int *said) {
    if (!__atomic_exchange_n(said, 1, __ATOMIC_RELAXED))
        fprintf(stderr, "shardscale: the null GPU has no %s: it answers \"not supported\"\n", name);
    return code;
}
