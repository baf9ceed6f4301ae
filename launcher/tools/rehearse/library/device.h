/* What the parts of the library share: the devices, their memory, what is known of its content, and
 * the log.
 *
 * Device memory is addresses with nothing behind them: code on the host that reads or writes them
 * dies, as with a real GPU's.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>

enum { MOST_DEVICES = 64 };

/* One GPU as $SHARDSCALE_NULL_GPUS describes it. `number` is that of the machine, as NVML counts;
 * a process counts only those that $CUDA_VISIBLE_DEVICES leaves, in its order. */
typedef struct {
    char name[96];
    size_t total_bytes, context_bytes;
    int major, minor, multiprocessors, l2_mib, number;
    bool peer_access;
} Device;

/* All of the machine's, then those visible to this process. */
int machine_device_count(void);
const Device *machine_device(int number);
int device_count(void);
const Device *device(int ordinal); /* NULL: there is none */
void device_uuid(const Device *of, unsigned char out[16]);

/* The calling thread's; false where there is none of this ordinal. */
int device_current(void);
bool device_select(int ordinal);

/* Bytes that nobody has taken yet, after this process's context if it has one. */
size_t device_free_bytes(int ordinal);
/* What this process has taken of a device of the machine, its context included. */
size_t machine_device_used_bytes(int number);

/* Take bytes off a device's, or give them back; false where there are not so many. */
bool device_take(int ordinal, size_t bytes);
void device_give_back(int ordinal, size_t bytes);

/* Addresses on a device that nobody else has, and their end. */
void *device_addresses(int ordinal, size_t bytes);
void device_addresses_free(void *address, size_t bytes);
/* The device's ordinal; -1 for memory of the host. */
int device_of(const void *address);

/* A kernel is launched; how many have been so far, for Python to ask. */
void device_launch(void);
size_t device_launches(void);

/* Page-locked host memory. */
void pin(void *address, size_t bytes);
void unpin(void *address);
bool is_pinned(const void *address);

/* What a device answers to an attribute's number, which runtime and driver have in common. */
int device_attribute(int ordinal, int number);

/* Append one line to the file that $SHARDSCALE_NULL_GPU_LOG names. */
void note(const char *what, size_t bytes);
