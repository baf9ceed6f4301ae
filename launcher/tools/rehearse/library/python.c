/* What inside/ asks of the library, by ctypes. */
#include "kept.h"

void shardscale_keep(const void *address, const void *values, size_t bytes) {
    keep(address, values, bytes);
}

size_t shardscale_recall(const void *address, void *out, size_t bytes) {
    return recall(address, out, bytes);
}

void shardscale_hold(const void *address, const void *values, size_t bytes) {
    hold(address, values, bytes);
}

void shardscale_release(const void *address, size_t bytes) { release(address, bytes); }

size_t shardscale_recall_held(const void *address, void *out, size_t bytes) {
    return recall_held(address, out, bytes);
}

void shardscale_forget(const void *address, size_t bytes) { forget(address, bytes); }

void shardscale_follow(bool on) { follow(on); }
