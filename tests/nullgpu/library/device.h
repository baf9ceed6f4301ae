/* What the libraries share: the one device, its memory, and the log.
 *
 * Device memory is addresses with nothing behind them: whoever reads or writes them on the host
 * dies, as with a real GPU's.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>

#define GPU_NAME "NVIDIA H200"
enum { VERSION_OF_CUDA = 13000, MAJOR = 9, MINOR = 0 };

/* What the whole device has, and what nobody has taken yet; bytes. */
size_t device_total(void);
size_t device_free_bytes(void);

/* Take bytes off the device's, or give them back; false where there are not so many. */
bool device_take(size_t bytes);
void device_give_back(size_t bytes);

/* Addresses on the device that nobody else has. They are never used again. */
void *device_addresses(size_t bytes);
bool on_device(const void *address);

/* A kernel may have written anywhere on the device. */
void device_writes(void);

/* A kernel is launched; how many have been so far, for Python to ask. */
void device_launch(void);
size_t device_launches(void);

/* Page-locked host memory. */
void pin(void *address, size_t bytes);
void unpin(void *address);
bool is_pinned(const void *address);

/* What the device answers to an attribute's number, which runtime and driver have in common. */
int device_attribute(int number);

/* Append one line to the file that $NULLGPU_LOG names. */
void note(const char *what, size_t bytes);
