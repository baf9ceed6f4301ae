/* torch's NCCL group keeps the tensors of a collective that nobody waits for (DDP's buckets) until its
 * watchdog thread, which looks every 100 ms, has seen it done. A GPU's step is long beside that; here
 * whole steps would be over before the first look. So a host that waits for the device also waits
 * until each watchdog has looked.
 */
#pragma once

/* A collective has been called. */
void watchdogs_owe(void);

/* The host waits for the device: every collective before now has been seen. */
void watchdogs_look(void);
