/* Linear layers on CPUs with AMX, which multiplies tiles of bfloat16.
 *
 * y[m, n] = sum_k bf16(x[m, k]) * w[n, k] + bias[n]; x and y float32, w bfloat16, sums in float32.
 *
 * Every row meets the same products in the same order, whatever other rows there are ("batch invariance"):
 * the tile unit treats its rows alike, and a block of rows that is not full is padded with zeros.
 *
 * Weights are packed [ceil(n / 16)][ceil(k / 32)][16][16][2]: the tile of 32 inputs and 16 outputs holds
 * the inputs two by two, as the instruction reads them.
 *
 * Has a library of its own, for its instructions are not to be used anywhere else.
 */
#include <string.h>

#include "bf16_inputs.h"

#define TILE_WORDS (DEPTH * TILE)
#define ROWS (2 * TILE)       /* input rows of a block: two tiles by two are all eight registers */
#define AHEAD (8 * TILE_WORDS) /* how far ahead weights are fetched */

/* Palette 1, all eight registers 16 rows of 64 bytes. Belongs to a thread. */
static void configure_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = TILE;
    }
    _tile_loadconfig(&config);
}

/* Rounds a row to nearest even and lays it out as tiles of [16 rows][32 inputs], filled up with zeros. */
static void round_row(const float *x, uint16_t *tiles, int64_t row, int64_t k, int64_t steps) {
    uint16_t *out = tiles + row / TILE * steps * TILE_WORDS + row % TILE * DEPTH;
    for (int64_t i = 0; i < steps * DEPTH; i += TILE)
        round_sixteen(x + i, out + i / DEPTH * TILE_WORDS + i % DEPTH, k - i);
}

/* Writes `rows` x `width` sums, which lie [16][16], to y. */
static void store_sums(const float *sums, const float *bias, float *y, int64_t n, int64_t rows, int64_t width) {
    const __mmask16 mask = (__mmask16)((1u << width) - 1);
    const __m512 b = bias ? _mm512_maskz_loadu_ps(mask, bias) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(y + r * n, mask, _mm512_add_ps(_mm512_loadu_ps(sums + r * TILE), b));
}

/* Two tiles of weights that will be read soon. */
static inline void fetch(const uint16_t *low, const uint16_t *high) {
    for (int64_t i = AHEAD; i < AHEAD + TILE_WORDS; i += DEPTH) {
        _mm_prefetch((const char *)(low + i), _MM_HINT_T0);
        _mm_prefetch((const char *)(high + i), _MM_HINT_T0);
    }
}

/* 32 rows by 32 outputs; `low` and `high` are the weights of 16 outputs each. */
static void multiply_four(const uint16_t *x, const uint16_t *low, const uint16_t *high, int64_t steps, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, low += TILE_WORDS, high += TILE_WORDS, x += TILE_WORDS) {
        fetch(low, high);
        _tile_loadd(4, x, 64);
        _tile_loadd(6, low, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, high, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + steps * TILE_WORDS, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

/* 16 rows by 32 outputs: what a decode step needs, so it is bound by reading weights. */
static void multiply_two(const uint16_t *x, const uint16_t *low, const uint16_t *high, int64_t steps, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < steps; step++, low += TILE_WORDS, high += TILE_WORDS, x += TILE_WORDS) {
        fetch(low, high);
        _tile_loadd(4, x, 64);
        _tile_loadd(6, low, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, high, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
}

static void multiply_pair(const uint16_t *x, int64_t m, int64_t steps, const uint16_t *packed, const float *bias,
                          float *y, int64_t n, int64_t first) {
    const int64_t width = n - first < 2 * TILE ? n - first : 2 * TILE;
    const int64_t widths[2] = {width < TILE ? width : TILE, width - TILE};
    const uint16_t *low = packed + first / TILE * steps * TILE_WORDS;
    /* Where there is no second tile, the first is computed twice. */
    const uint16_t *high = widths[1] > 0 ? low + steps * TILE_WORDS : low;
    float sums[4 * TILE * TILE] __attribute__((aligned(64)));
    for (int64_t row = 0; row < m; row += ROWS) {
        if (m - row > TILE)
            multiply_four(x + row / TILE * steps * TILE_WORDS, low, high, steps, sums);
        else
            multiply_two(x + row / TILE * steps * TILE_WORDS, low, high, steps, sums);
        for (int64_t part = 0; part < 4; part++) {
            const int64_t begin = row + part / 2 * TILE, column = first + part % 2 * TILE;
            const int64_t rows = m - begin < TILE ? m - begin : TILE;
            if (rows > 0 && widths[part % 2] > 0)
                store_sums(sums + part * 256, bias ? bias + column : 0, y + begin * n + column, n, rows,
                           widths[part % 2]);
        }
    }
}

struct linear {
    const float *x;
    int64_t m, k, steps;
    uint16_t *rounded;
    const uint16_t *packed;
    const float *bias;
    float *y;
    int64_t n;
};

static void round_rows(void *argument, int64_t begin, int64_t end) {
    const struct linear *l = argument;
    for (int64_t r = begin; r < end; r++) round_row(l->x + r * l->k, l->rounded, r, l->k, l->steps);
}

static void multiply_pairs(void *argument, int64_t begin, int64_t end) {
    const struct linear *l = argument;
    configure_tiles();
    for (int64_t pair = begin; pair < end; pair++)
        multiply_pair(l->rounded, l->m, l->steps, l->packed, l->bias, l->y, l->n, pair * 2 * TILE);
    _tile_release();
}

/* Returns 0, or -1 where memory for the rounded inputs is missing. */
int linear_bf16_inputs(const float *x, int64_t m, int64_t k, const uint16_t *packed, const float *bias, float *y,
                       int64_t n) {
    const int64_t steps = (k + DEPTH - 1) / DEPTH, pairs = (n + 2 * TILE - 1) / (2 * TILE);
    const int64_t size = (m + TILE - 1) / TILE * steps * TILE_WORDS;
    uint16_t *rounded = room_for(size);
    if (!rounded) return -1;
    if (m % TILE != 0)
        memset(rounded + m / TILE * steps * TILE_WORDS, 0, (size_t)(steps * TILE_WORDS) * sizeof *rounded);
    struct linear l = {x, m, k, steps, rounded, packed, bias, y, n};
    if (m >= SHARED_ROWS)
        run(round_rows, &l, m, 0);
    else
        round_rows(&l, 0, m);
    run(multiply_pairs, &l, pairs, 0);
    return 0;
}
