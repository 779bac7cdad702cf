/* Loops shared out among threads; see cpu_pool.c. */
#ifndef DRAFTLINE_CPU_POOL_H
#define DRAFTLINE_CPU_POOL_H

#include <stdint.h>

/* Does the iterations [begin, end) of a loop. */
typedef void (*pool_task)(void *argument, int64_t begin, int64_t end);

/* Does all iterations [0, count), on this thread and those that are free, in pieces of `piece` iterations;
 * 0 leaves the size to the pool, which is right where all iterations cost the same. */
void pool_run(pool_task task, void *argument, int64_t count, int64_t piece);

/* How many threads share a loop, the calling one among them. */
void pool_set_threads(int threads);

#endif
