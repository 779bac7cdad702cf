/* Threads that share out the loops of a forward.
 *
 * A forward of a small model is some hundred short loops with little between them. OpenMP serves that badly on
 * machines that are shared: threads that sleep between two loops take longer to wake than the loop takes
 * (in a virtual machine: 40 ms for a step instead of 20), and threads that spin keep the one that everybody
 * waits for from its CPU (1 274 ms for a step instead of 72). Here the thread that calls waits for no one to
 * begin: whoever is awake takes the next piece of the loop, so at worst the caller does it alone. Workers spin
 * for a moment after their last piece, then they sleep.
 */
#define _GNU_SOURCE
#include "cpu_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PIECES 4             /* of a loop for each thread: small enough to even out, large enough to stream */
#define SPIN_NANOSECONDS 200000
#define YIELD_NANOSECONDS 20000 /* a caller that waits this long for a piece may be in its owner's way */
#define MAX_THREADS 256

static struct {
    /* The loop. Written by the caller while the pool is closed and nobody is inside. */
    pool_task task;
    void *argument;
    int64_t count, piece;
    /* Where the next piece begins; the workers inside; whether any may come in. */
    _Alignas(64) atomic_llong next;
    _Alignas(64) atomic_int inside;
    atomic_int is_open;
    /* Number of the loop, which sleepers wait to change, and how many they are. */
    _Alignas(64) atomic_uint loop;
    atomic_int sleepers;
} pool;

static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;
static int num_threads = 1, num_workers = 0;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void take_pieces(void) {
    for (;;) {
        const int64_t begin = atomic_fetch_add(&pool.next, pool.piece);
        if (begin >= pool.count) return;
        const int64_t end = begin + pool.piece;
        pool.task(pool.argument, begin, end < pool.count ? end : pool.count);
    }
}

/* Returns the number of a loop that is not `seen`. */
static unsigned await_loop(unsigned seen) {
    const int64_t deadline = now() + SPIN_NANOSECONDS;
    unsigned current;
    do {
        for (int i = 0; i < 32; i++) {
            if ((current = atomic_load(&pool.loop)) != seen) return current;
            _mm_pause();
        }
    } while (now() < deadline);
    atomic_fetch_add(&pool.sleepers, 1);
    while ((current = atomic_load(&pool.loop)) == seen)
        syscall(SYS_futex, &pool.loop, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&pool.sleepers, 1);
    return current;
}

static void *work(void *unused) {
    (void)unused;
    for (unsigned seen = 0;;) {
        seen = await_loop(seen);
        atomic_fetch_add(&pool.inside, 1);
        /* Asked only now: a caller that has closed the pool looks at `inside` after that. */
        if (atomic_load(&pool.is_open)) take_pieces();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

/* The threads of the parent are not there. */
static void forget_workers(void) {
    num_workers = 0;
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.is_open, 0);
    atomic_store(&pool.sleepers, 0);
    pthread_mutex_init(&caller, NULL);
}

/* As many workers as are asked for, or as the system gives. */
static void start_workers(void) {
    static int is_registered;
    if (!is_registered) is_registered = pthread_atfork(NULL, NULL, forget_workers) == 0;
    while (num_workers < num_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL) != 0) return;
        pthread_detach(thread);
        num_workers++;
    }
}

static void await_workers(void) {
    const int64_t patience = now() + YIELD_NANOSECONDS;
    while (atomic_load(&pool.inside) > 0) {
        if (now() < patience)
            _mm_pause();
        else
            sched_yield();
    }
}

void pool_set_threads(int threads) {
    pthread_mutex_lock(&caller);
    num_threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    pthread_mutex_unlock(&caller);
}

void pool_run(pool_task task, void *argument, int64_t count) {
    if (count <= 0) return;
    /* Another thread's loop has the workers, or there is nothing to share. */
    if (count == 1 || num_threads == 1 || pthread_mutex_trylock(&caller) != 0) {
        task(argument, 0, count);
        return;
    }
    start_workers();
    const int64_t pieces = (int64_t)num_threads * PIECES;
    pool.task = task;
    pool.argument = argument;
    pool.count = count;
    pool.piece = (count + pieces - 1) / pieces;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.is_open, 1);
    atomic_fetch_add(&pool.loop, 1);
    if (atomic_load(&pool.sleepers) > 0) syscall(SYS_futex, &pool.loop, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
    take_pieces();
    atomic_store(&pool.is_open, 0);
    await_workers();
    pthread_mutex_unlock(&caller);
}
