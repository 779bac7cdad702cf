/* The loops in which a CPU spends a decode step: linear layers, norms, attention over the paged cache.
 *
 * All give each row the same operations in the same order whatever other rows there are, so a token's
 * result does not depend on the batch it was computed in ("batch invariance").
 *
 * Compiled by cpu_kernels.py with -mavx2 -mfma; OpenMP calls go to the runtime that torch has loaded.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define TILE 16 /* output features of a weight tile: two AVX registers of float32 */
#define ROWS 6  /* input rows of a block: 6 x 2 accumulators and the weights fill the 16 registers */
#define MAX_HEAD_DIM 256
#define KEYS 64 /* keys whose scores are held at once */

/* ---- Linear layers -------------------------------------------------------------------------------------
 *
 * y[m, n] = sum_k x[m, k] * w[n, k] + bias[n], x and y float32.
 *
 * Weights are packed tile by tile: [ceil(n / 16)][k][16]. Of bfloat16 weights, features j and j + 8 share a
 * 32-bit word (low and high half), so that a shift and a mask turn one load into two float32 registers.
 */

static inline void load_bf16(const uint16_t *w, __m256 *low, __m256 *high) {
    __m256i word = _mm256_loadu_si256((const __m256i *)w);
    *low = _mm256_castsi256_ps(_mm256_slli_epi32(word, 16));
    *high = _mm256_castsi256_ps(_mm256_and_si256(word, _mm256_set1_epi32((int)0xffff0000)));
}

static inline void load_f32(const float *w, __m256 *low, __m256 *high) {
    *low = _mm256_loadu_ps(w);
    *high = _mm256_loadu_ps(w + 8);
}

static inline void store_tile(float *y, const __m256 low, const __m256 high, int64_t width) {
    if (width == TILE) {
        _mm256_storeu_ps(y, low);
        _mm256_storeu_ps(y + 8, high);
    } else {
        float rest[TILE];
        _mm256_storeu_ps(rest, low);
        _mm256_storeu_ps(rest + 8, high);
        memcpy(y, rest, (size_t)width * sizeof(float));
    }
}

/* One block of `rows` input rows (a constant once inlined) times one tile of weights. */
#define DEFINE_BLOCK(NAME, TYPE, LOAD)                                                                      \
    static inline __attribute__((always_inline)) void NAME(                                                \
        const int rows, const float *x, int64_t k, const TYPE *w, const float *bias, float *y, int64_t n,  \
        int64_t width) {                                                                                   \
        __m256 low[ROWS], high[ROWS];                                                                      \
        for (int r = 0; r < rows; r++) low[r] = high[r] = _mm256_setzero_ps();                             \
        for (int64_t i = 0; i < k; i++) {                                                                  \
            __m256 w_low, w_high;                                                                          \
            LOAD(w + i * TILE, &w_low, &w_high);                                                           \
            for (int r = 0; r < rows; r++) {                                                               \
                __m256 value = _mm256_broadcast_ss(x + r * k + i);                                         \
                low[r] = _mm256_fmadd_ps(value, w_low, low[r]);                                            \
                high[r] = _mm256_fmadd_ps(value, w_high, high[r]);                                         \
            }                                                                                              \
        }                                                                                                  \
        float b[TILE] = {0};                                                                               \
        if (bias) memcpy(b, bias, (size_t)width * sizeof(float));                                          \
        for (int r = 0; r < rows; r++)                                                                     \
            store_tile(y + r * n, _mm256_add_ps(low[r], _mm256_loadu_ps(b)),                               \
                       _mm256_add_ps(high[r], _mm256_loadu_ps(b + 8)), width);                             \
    }

DEFINE_BLOCK(block_bf16, uint16_t, load_bf16)
DEFINE_BLOCK(block_f32, float, load_f32)

#define DEFINE_LINEAR(NAME, TYPE, BLOCK)                                                                    \
    void NAME(const float *x, int64_t m, int64_t k, const TYPE *packed, const float *bias, float *y,       \
              int64_t n) {                                                                                 \
        const int64_t tiles = (n + TILE - 1) / TILE;                                                       \
        _Pragma("omp parallel for schedule(static)") for (int64_t tile = 0; tile < tiles; tile++) {        \
            const TYPE *w = packed + tile * k * TILE;                                                      \
            const int64_t first = tile * TILE, width = n - first < TILE ? n - first : TILE;                \
            const float *b = bias ? bias + first : 0;                                                      \
            int64_t r = 0;                                                                                 \
            for (; r + ROWS <= m; r += ROWS) BLOCK(ROWS, x + r * k, k, w, b, y + r * n + first, n, width);  \
            const float *rest = x + r * k;                                                                 \
            float *out = y + r * n + first;                                                                \
            switch (m - r) {                                                                               \
                case 5: BLOCK(5, rest, k, w, b, out, n, width); break;                                     \
                case 4: BLOCK(4, rest, k, w, b, out, n, width); break;                                     \
                case 3: BLOCK(3, rest, k, w, b, out, n, width); break;                                     \
                case 2: BLOCK(2, rest, k, w, b, out, n, width); break;                                     \
                case 1: BLOCK(1, rest, k, w, b, out, n, width); break;                                     \
                default: break;                                                                            \
            }                                                                                              \
        }                                                                                                  \
    }

DEFINE_LINEAR(linear_bf16, uint16_t, block_bf16)
DEFINE_LINEAR(linear_f32, float, block_f32)

static inline float dot(const float *a, const float *b, int64_t dim) {
    __m256 sum = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= dim; i += 8) sum = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), sum);
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    half = _mm_add_ss(half, _mm_shuffle_ps(half, half, 1));
    float total = _mm_cvtss_f32(half);
    for (; i < dim; i++) total += a[i] * b[i];
    return total;
}

/* ---- RMS norm ------------------------------------------------------------------------------------------
 *
 * y = x / sqrt(mean(x^2) + epsilon) * weight, row by row. Too short for threads.
 */
void rms_norm_f32(const float *x, const float *weight, float *y, int64_t rows, int64_t dim, float epsilon) {
    for (int64_t r = 0; r < rows; r++, x += dim, y += dim) {
        const float scale = 1.0f / sqrtf(dot(x, x, dim) / (float)dim + epsilon);
        for (int64_t i = 0; i < dim; i++) y[i] = x[i] * scale * weight[i];
    }
}

/* ---- Attention -----------------------------------------------------------------------------------------
 *
 * new_keys, new_values: [kv_heads, tokens, dim] rows of the tokens fed now, written to pool slot slots[token].
 */
void write_kv_f32(const float *new_rows, float *pool, const int64_t *slots, int64_t tokens, int64_t kv_heads,
                  int64_t dim, int64_t head_stride, int64_t token_stride) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < kv_heads; h++)
            memcpy(pool + (slots[t] * kv_heads + h) * dim, new_rows + h * head_stride + t * token_stride,
                   (size_t)dim * sizeof(float));
}

/*
 * q, out: [tokens, heads, dim]; keys, values: one layer's pool [blocks, block_size, kv_heads, dim].
 * Sequence s feeds tokens [starts[s], starts[s] + query_lens[s]), its newest; it has kv_lens[s] keys.
 * A query sees keys up to its own position, and only the last `window` of them where window > 0.
 * softcap > 0 squashes scores to softcap * tanh(score / softcap).
 */

/* acc = acc * scale + weight * v */
static inline void accumulate(float *acc, float scale, float weight, const float *v, int64_t dim) {
    const __m256 s = _mm256_set1_ps(scale), w = _mm256_set1_ps(weight);
    int64_t i = 0;
    for (; i + 8 <= dim; i += 8)
        _mm256_storeu_ps(acc + i, _mm256_fmadd_ps(w, _mm256_loadu_ps(v + i), _mm256_mul_ps(s, _mm256_loadu_ps(acc + i))));
    for (; i < dim; i++) acc[i] = acc[i] * scale + weight * v[i];
}

/* exp of 8 floats <= 0: 2^n * exp(r) with |r| <= ln(2)/2 and the series of exp, to about 1e-7. */
static inline __m256 exp256(__m256 x) {
    x = _mm256_max_ps(x, _mm256_set1_ps(-87.0f));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    /* ln(2) in two parts, so that n * ln(2) loses nothing. */
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 sum = _mm256_set1_ps(1.0f / 5040);
    const float factorials[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 7; i++) sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(factorials[i]));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), power));
}

/* One query of one head over all the keys it sees: softmax by running maximum, KEYS keys at a time. */
static void attend_query(const float *q, float *out, const float *keys, const float *values,
                         const int32_t *table, int64_t block_size, int64_t token_stride, int64_t dim,
                         int64_t first, int64_t last, float scale, float softcap) {
    float acc[MAX_HEAD_DIM] = {0}, scores[KEYS];
    float maximum = -INFINITY, total = 0.0f;
    for (int64_t begin = first; begin <= last; begin += KEYS) {
        const int64_t count = last - begin + 1 < KEYS ? last - begin + 1 : KEYS;
        float local = -INFINITY;
        for (int64_t j = 0; j < count; j++) {
            const int64_t p = begin + j;
            const float *key = keys + ((int64_t)table[p / block_size] * block_size + p % block_size) * token_stride;
            float score = dot(q, key, dim) * scale;
            if (softcap > 0.0f) score = softcap * tanhf(score / softcap);
            scores[j] = score;
            if (score > local) local = score;
        }
        float rescale = 1.0f;
        if (local > maximum) {
            rescale = maximum == -INFINITY ? 0.0f : expf(maximum - local);
            maximum = local;
        }
        for (int64_t j = count; j < KEYS; j++) scores[j] = -INFINITY;
        const __m256 shift = _mm256_set1_ps(maximum);
        for (int64_t j = 0; j < count; j += 8)
            _mm256_storeu_ps(scores + j, exp256(_mm256_sub_ps(_mm256_loadu_ps(scores + j), shift)));
        total *= rescale;
        for (int64_t j = 0; j < count; j++) {
            const int64_t p = begin + j;
            const float *value = values + ((int64_t)table[p / block_size] * block_size + p % block_size) * token_stride;
            accumulate(acc, j == 0 ? rescale : 1.0f, scores[j], value, dim);
            total += scores[j];
        }
    }
    for (int64_t i = 0; i < dim; i++) out[i] = acc[i] / total;
}

void paged_attention_f32(const float *q, float *out, const float *keys, const float *values, int64_t sequences,
                         const int32_t *starts, const int32_t *query_lens, const int32_t *kv_lens,
                         const int32_t *tables, int64_t table_width, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t block_size, int64_t window, float scale, float softcap) {
    const int64_t group = heads / kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t s = 0; s < sequences; s++) {
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            const int32_t *table = tables + s * table_width;
            for (int64_t i = 0; i < query_lens[s]; i++) {
                const int64_t last = kv_lens[s] - query_lens[s] + i;
                const int64_t first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
                for (int64_t g = 0; g < group; g++) {
                    const int64_t row = ((starts[s] + i) * heads + kv_head * group + g) * dim;
                    attend_query(q + row, out + row, keys + kv_head * dim, values + kv_head * dim, table,
                                 block_size, kv_heads * dim, dim, first, last, scale, softcap);
                }
            }
        }
    }
}
