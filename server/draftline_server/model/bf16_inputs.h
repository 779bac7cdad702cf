/* What linear layers share that round their inputs to bfloat16; see amx_linear.c and avx512_linear.c. */
#ifndef DRAFTLINE_BF16_INPUTS_H
#define DRAFTLINE_BF16_INPUTS_H

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#include "cpu_pool.h"

#define TILE 16        /* outputs of a register, rows and columns of an AMX tile of sums */
#define DEPTH 32       /* what the number of inputs is filled up to */
#define SHARED_ROWS 64 /* so many are worth sharing out before they are multiplied */

/* Rounds 16 numbers to nearest even; of those only `left` exist, the others become zero. */
static inline void round_sixteen(const float *x, uint16_t *out, int64_t left) {
    const __mmask16 mask = left >= TILE ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
    _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x)));
}

/* Memory of this thread for so many rounded inputs; 0 where there is none. */
static uint16_t *room_for(int64_t size) {
    static _Thread_local uint16_t *rounded;
    static _Thread_local int64_t capacity;
    if (!rounded || size > capacity) {
        free(rounded);
        capacity = size + DEPTH; /* never nothing: no rows are no want of memory */
        rounded = aligned_alloc(64, (size_t)capacity * sizeof *rounded);
    }
    return rounded;
}

/* The pool of cpu_kernels: two would be in each other's way. */
static void (*run)(pool_task task, void *argument, int64_t count, int64_t piece);

void use_pool(void (*pool)(pool_task task, void *argument, int64_t count, int64_t piece)) { run = pool; }

#endif
