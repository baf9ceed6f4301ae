/* The device of the null NCCL, without CUDA: addresses from 2^44 on. */
#include "device.h"
#include <stdint.h>

int device_of(const void *address) { return (uintptr_t)address >> 44 == 1 ? 0 : -1; }
int device_current(void) { return 0; }
/* Each rank has a GPU of its own, whose number none needs. */
const Device *device(int ordinal) {
    (void)ordinal;
    return NULL;
}
