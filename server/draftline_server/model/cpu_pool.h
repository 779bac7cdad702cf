/* Loops shared out among threads; see cpu_pool.c. */
#ifndef DRAFTLINE_CPU_POOL_H
#define DRAFTLINE_CPU_POOL_H

#include <stdint.h>

/* Does the iterations [begin, end) of a loop. */
typedef void (*pool_task)(void *argument, int64_t begin, int64_t end);

/* Does all iterations [0, count), on this thread and those that are free. */
void pool_run(pool_task task, void *argument, int64_t count);

/* How many threads share a loop, the calling one among them. */
void pool_set_threads(int threads);

#endif
