/* Functions of CUDA's libraries that nothing here stands in for: each has a weak definition that the
 * build generates, which any other one replaces. */
#pragma once

/* Say the function's name once, and return the code. */
int refuse(const char *name, int code, int *said);
int refuse_runtime(const char *name, int *said);

#define REFUSING(name, call) \
    int name(void) __attribute__((weak)); \
    int name(void) { \
        static int said; \
        return call; \
    }
#define REFUSES_DRIVER(name) REFUSING(name, refuse(#name, 801, &said))
#define REFUSES_RUNTIME(name) REFUSING(name, refuse_runtime(#name, &said))
#define REFUSES_CUBLAS(name) REFUSING(name, refuse(#name, 15, &said))
#define REFUSES_CUDNN(name) REFUSING(name, refuse(#name, 3000, &said))
#define REFUSES_NCCL(name) REFUSING(name, refuse(#name, 5, &said))

/* It writes somewhere on the device, with a number of kernels that nobody knows. */
#include "kept.h"
#include "timeline.h"
#define COMPUTES(name) \
    int name(void) __attribute__((weak)); \
    int name(void) { \
        timeline_add(KERNEL, NULL, 0, 0); \
        forget_all(); \
        return 0; \
    }
