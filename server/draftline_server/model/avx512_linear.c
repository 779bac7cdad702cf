/* Linear layers on CPUs that multiply bfloat16 in AVX-512 registers, but have no AMX.
 *
 * y[m, n] = sum_k bf16(x[m, k]) * w[n, k] + bias[n]; x and y float32, w bfloat16, sums in float32.
 *
 * Every row meets the same products in the same order, whatever other rows there are ("batch invariance").
 * One instruction does four times the work of one on eight float32, so the few rows of a verification cost
 * hardly more than reading the weights for one.
 *
 * Weights are packed as for AMX, see amx_linear.c: two inputs of 16 outputs are one register.
 *
 * Has a library of its own, for its instructions are not to be used anywhere else.
 */

#include "bf16_inputs.h"

#define ROWS 12        /* input rows of a block: 12 x 2 sums, two of weights and an input fit the 32 registers */

/* Rounds a row to nearest even, filled up with zeros. */
static void round_row(const float *x, uint16_t *out, int64_t k, int64_t depth) {
    for (int64_t i = 0; i < depth; i += TILE) round_sixteen(x + i, out + i, k - i);
}

static inline void store_sums(const __m512 sums, const float *bias, float *y, int64_t width) {
    const __mmask16 mask = width >= TILE ? 0xffff : (__mmask16)((1u << width) - 1);
    const __m512 b = bias ? _mm512_maskz_loadu_ps(mask, bias) : _mm512_setzero_ps();
    _mm512_mask_storeu_ps(y, mask, _mm512_add_ps(sums, b));
}

/* `rows` input rows (a constant once inlined) by 32 outputs, of which `width` exist. */
static inline __attribute__((always_inline)) void block(const int rows, const uint16_t *x, int64_t depth,
                                                        const uint16_t *low, const uint16_t *high,
                                                        const float *bias, float *y, int64_t n, int64_t width) {
    const int64_t pairs = depth / 2;
    const int32_t *in = (const int32_t *)x;
    __m512 first[ROWS], second[ROWS];
    for (int r = 0; r < rows; r++) first[r] = second[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++, low += 2 * TILE, high += 2 * TILE) {
        const __m512bh w_low = (__m512bh)_mm512_loadu_si512(low), w_high = (__m512bh)_mm512_loadu_si512(high);
        for (int r = 0; r < rows; r++) {
            const __m512bh value = (__m512bh)_mm512_set1_epi32(in[r * pairs + i]);
            first[r] = _mm512_dpbf16_ps(first[r], value, w_low);
            second[r] = _mm512_dpbf16_ps(second[r], value, w_high);
        }
    }
    for (int r = 0; r < rows; r++) {
        store_sums(first[r], bias, y + r * n, width);
        if (width > TILE) store_sums(second[r], bias ? bias + TILE : 0, y + r * n + TILE, width - TILE);
    }
}

struct linear {
    const float *x;
    int64_t m, k, depth;
    uint16_t *rounded;
    const uint16_t *packed;
    const float *bias;
    float *y;
    int64_t n;
};

static void round_rows(void *argument, int64_t begin, int64_t end) {
    const struct linear *l = argument;
    for (int64_t r = begin; r < end; r++) round_row(l->x + r * l->k, l->rounded + r * l->depth, l->k, l->depth);
}

static void multiply_pairs(void *argument, int64_t begin, int64_t end) {
    const struct linear *l = argument;
    const int64_t blocks = (l->m + ROWS - 1) / ROWS, depth = l->depth, n = l->n;
    for (int64_t first = begin * 2 * TILE; first < end * 2 * TILE && first < n; first += 2 * TILE) {
        const int64_t width = n - first < 2 * TILE ? n - first : 2 * TILE;
        const uint16_t *low = l->packed + first * depth;
        /* Where there is no second tile, the first is computed twice. */
        const uint16_t *high = width > TILE ? low + TILE * depth : low;
        const float *bias = l->bias ? l->bias + first : 0;
        /* Blocks of nearly equal height: a short last one would leave the multipliers idle. */
        for (int64_t number = 0, r = 0; number < blocks; number++) {
            const int64_t rows = l->m / blocks + (number < l->m % blocks);
            const uint16_t *in = l->rounded + r * depth;
            float *out = l->y + r * n + first;
#define CASE(ROWS) case ROWS: block(ROWS, in, depth, low, high, bias, out, n, width); break
            switch (rows) {
                CASE(12); CASE(11); CASE(10); CASE(9); CASE(8); CASE(7);
                CASE(6); CASE(5); CASE(4); CASE(3); CASE(2); CASE(1);
            }
#undef CASE
            r += rows;
        }
    }
}

/* Returns 0, or -1 where memory for the rounded inputs is missing. */
int linear_bf16_inputs(const float *x, int64_t m, int64_t k, const uint16_t *packed, const float *bias, float *y,
                       int64_t n) {
    const int64_t depth = (k + DEPTH - 1) / DEPTH * DEPTH;
    uint16_t *rounded = room_for(m * depth);
    if (!rounded) return -1;
    struct linear l = {x, m, k, depth, rounded, packed, bias, y, n};
    if (m >= SHARED_ROWS)
        run(round_rows, &l, m, 0);
    else
        round_rows(&l, 0, m);
    run(multiply_pairs, &l, (n + 2 * TILE - 1) / (2 * TILE), 0);
    return 0;
}
