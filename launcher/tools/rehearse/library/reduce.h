/* Arithmetic of NCCL's types. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* ncclRedOp_t */
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

/* Bytes of one ncclDataType_t; 0 for one that is not known. */
size_t type_bytes(int type);
/* Reduce `size` inputs of `count` elements into `out`, which is none of them; false where the type
 * has no arithmetic here, or the operation is the caller's own. */
bool reduce(int type, int operation, int size, const char *const *inputs, char *out, size_t count);
