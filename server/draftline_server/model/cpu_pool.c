/* Threads that share out the loops of a forward.
 *
 * A forward of a small model is some hundred short loops with little between them. OpenMP serves that badly on
 * machines that are shared: threads that sleep between two loops take longer to wake than the loop takes
 * (in a virtual machine: 40 ms for a step instead of 20), and threads that spin keep the one that everybody
 * waits for from its CPU (1 274 ms for a step instead of 72). Here the thread that calls waits for no one to
 * begin: whoever is awake takes the next piece of the loop, so at worst the caller does it alone. Workers spin
 * for a moment after their last piece, then they sleep.
 *
 * A task must not fork: its child would lack the pieces of the other threads.
 */
#define _GNU_SOURCE
#include "cpu_pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PIECES 4                 /* of a loop for each thread: small enough to even out, large enough to stream */
#define SPIN_NANOSECONDS 200000  /* of a worker that nobody needs */
#define YIELD_NANOSECONDS 20000  /* a caller that waits this long for a piece may be in its owner's way */
#define SLEEP_NANOSECONDS 1000000 /* and this long: its owner has no CPU */
#define MAX_THREADS 256
#define WAIT_PRIVATE 128 /* FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE: not every C library has their header */
#define WAKE_PRIVATE 129

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
    /* Threads that may share a loop, the caller among them. */
    atomic_int num_threads;
} pool = {.num_threads = 1};

/* Held while a loop is shared out. What follows belongs to whoever holds it. */
static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;
static int num_workers = 0;
static int is_exhausted = 0; /* the system gives no more threads */

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
        syscall(SYS_futex, &pool.loop, WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&pool.sleepers, 1);
    return current;
}

/* A worker; `index` is its number, from 0. */
static void *work(void *index) {
    for (unsigned seen = 0;;) {
        seen = await_loop(seen);
        /* Too late, or one too many since the number of threads was lowered. */
        if (!atomic_load(&pool.is_open) || (intptr_t)index >= atomic_load(&pool.num_threads) - 1) continue;
        atomic_fetch_add(&pool.inside, 1);
        /* Asked once more: a caller that has closed the pool looks at `inside` after that. */
        if (atomic_load(&pool.is_open)) take_pieces();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

/* In a child process, where the threads of its parent are not. */
static void forget_workers(void) {
    num_workers = is_exhausted = 0;
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.is_open, 0);
    atomic_store(&pool.sleepers, 0);
    pthread_mutex_init(&caller, NULL);
}

__attribute__((constructor)) static void prepare(void) { is_exhausted = pthread_atfork(NULL, NULL, forget_workers) != 0; }

/* As many workers as are asked for, or as the system gives. Signals are for other threads. */
static void start_workers(int wanted) {
    if (num_workers >= wanted || is_exhausted) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (num_workers < wanted && !is_exhausted) {
        pthread_t thread;
        is_exhausted = pthread_create(&thread, NULL, work, (void *)(intptr_t)num_workers) != 0;
        if (!is_exhausted) {
            pthread_detach(thread);
            num_workers++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void await_workers(void) {
    const int64_t began = now();
    while (atomic_load(&pool.inside) > 0) {
        const int64_t waited = now() - began;
        if (waited < YIELD_NANOSECONDS)
            _mm_pause();
        else if (waited < SLEEP_NANOSECONDS)
            sched_yield();
        else
            nanosleep(&(struct timespec){0, YIELD_NANOSECONDS}, NULL);
    }
}

void pool_set_threads(int threads) {
    atomic_store(&pool.num_threads, threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads);
}

void pool_run(pool_task task, void *argument, int64_t count, int64_t piece) {
    if (count <= 0) return;
    const int threads = atomic_load(&pool.num_threads);
    /* There is nothing to share, or another thread's loop has the workers. */
    if (count == 1 || threads == 1 || pthread_mutex_trylock(&caller) != 0) {
        task(argument, 0, count);
        return;
    }
    start_workers(threads - 1);
    if (piece <= 0) piece = (count + (int64_t)threads * PIECES - 1) / ((int64_t)threads * PIECES);
    const int64_t helpers = (count - 1) / piece; /* more could find nothing to do */
    pool.task = task;
    pool.argument = argument;
    pool.count = count;
    pool.piece = piece;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.is_open, 1);
    atomic_fetch_add(&pool.loop, 1);
    if (helpers > 0 && atomic_load(&pool.sleepers) > 0)
        syscall(SYS_futex, &pool.loop, WAKE_PRIVATE, helpers < MAX_THREADS ? (int)helpers : MAX_THREADS, NULL, NULL, 0);
    take_pieces();
    atomic_store(&pool.is_open, 0);
    await_workers();
    pthread_mutex_unlock(&caller);
}
