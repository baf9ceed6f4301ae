/* Host memory of large tensors, which a rehearsal fills and seldom looks at.
 *
 * Blocks of at least LARGE bytes are counted per process. Those beyond the budget in
 * $SHARDSCALE_NULL_GPU_HOST_BYTES share the pages of one chunk: they can be written and read, hold
 * one another's values, and cost no memory. So a model that is larger than the machine's memory can
 * be built, loaded and cast on the host. A file of weights may be larger, too.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>

enum { LARGE = 64 << 20 };

/* A block of a large size, or NULL: then the C library's own allocator is to be asked. */
void *host_block(size_t bytes);
/* Give it back; false where `address` is none. */
bool host_block_free(void *address);
