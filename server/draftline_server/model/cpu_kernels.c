/* The loops in which a CPU spends a decode step: linear layers, norms, attention over the paged cache.
 *
 * All give each row the same operations in the same order whatever other rows there are, so a token's
 * result does not depend on the batch it was computed in ("batch invariance").
 *
 * Compiled with -mavx2 -mfma.
 */
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu_pool.h"

#define TILE 16 /* output features of a weight tile: two AVX registers of float32 */
#define ROWS 6  /* input rows of a block: 6 x 2 accumulators and the weights fill the 16 registers */
#define MAX_HEAD_DIM 256
#define MAX_GROUP 32 /* query heads that share a key head */
#define KEYS 64 /* keys whose scores are held at once */
#define PARALLEL_FROM 65536 /* values that are worth sharing out */

/* Whether this CPU has what amx_linear.c needs, and the operating system lets this process use it. */
int amx_is_usable(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return 0;
    const int has_tiles = (edx >> 24) & 1, has_bf16 = (edx >> 22) & 1;
    return has_tiles && has_bf16 && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* The same for avx512_linear.c. */
int avx512_bf16_is_usable(void) {
    unsigned eax, ebx, ecx, edx;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return 0;
    /* What asks for bfloat16 by name is newer than many compilers. */
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && ((eax >> 5) & 1);
}

/* Shares out a loop of `count` iterations that touches so many values; a small one is not worth it. */
static void run(pool_task task, void *argument, int64_t count, int64_t values) {
    if (values > PARALLEL_FROM)
        pool_run(task, argument, count, 0);
    else
        task(argument, 0, count);
}

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

struct linear {
    const float *x;
    int64_t m, k;
    const void *packed;
    const float *bias;
    float *y;
    int64_t n;
};

#define DEFINE_LINEAR(NAME, TYPE, BLOCK)                                                                    \
    static void NAME##_tiles(void *argument, int64_t begin, int64_t end) {                                 \
        const struct linear *l = argument;                                                                 \
        const int64_t blocks = (l->m + ROWS - 1) / ROWS, k = l->k, n = l->n;                               \
        for (int64_t tile = begin; tile < end; tile++) {                                                   \
            const TYPE *w = (const TYPE *)l->packed + tile * k * TILE;                                     \
            const int64_t first = tile * TILE, width = n - first < TILE ? n - first : TILE;                \
            const float *b = l->bias ? l->bias + first : 0;                                                \
            /* Blocks of nearly equal height: a short last one would leave the multipliers idle. */        \
            for (int64_t block = 0, r = 0; block < blocks; block++) {                                      \
                const int64_t rows = l->m / blocks + (block < l->m % blocks);                              \
                const float *in = l->x + r * k;                                                            \
                float *out = l->y + r * n + first;                                                         \
                switch (rows) {                                                                            \
                    case 6: BLOCK(6, in, k, w, b, out, n, width); break;                                   \
                    case 5: BLOCK(5, in, k, w, b, out, n, width); break;                                   \
                    case 4: BLOCK(4, in, k, w, b, out, n, width); break;                                   \
                    case 3: BLOCK(3, in, k, w, b, out, n, width); break;                                   \
                    case 2: BLOCK(2, in, k, w, b, out, n, width); break;                                   \
                    default: BLOCK(1, in, k, w, b, out, n, width); break;                                  \
                }                                                                                          \
                r += rows;                                                                                 \
            }                                                                                              \
        }                                                                                                  \
    }                                                                                                      \
    int NAME(const float *x, int64_t m, int64_t k, const TYPE *packed, const float *bias, float *y,        \
             int64_t n) {                                                                                  \
        struct linear l = {x, m, k, packed, bias, y, n};                                                   \
        pool_run(NAME##_tiles, &l, (n + TILE - 1) / TILE, 0);                                                 \
        return 0;                                                                                          \
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

/* ---- Greedy choice -------------------------------------------------------------------------------------- */

struct choice {
    const float *x;
    int64_t *out, dim;
};

static void choose_rows(void *argument, int64_t begin, int64_t end) {
    const struct choice *c = argument;
    for (int64_t r = begin; r < end; r++) {
        const float *x = c->x + r * c->dim;
        /* Eight at a time for the largest, then the first place that holds it. */
        __m256 largest = _mm256_set1_ps(-INFINITY);
        int64_t i = 0;
        for (; i + 8 <= c->dim; i += 8) largest = _mm256_max_ps(_mm256_loadu_ps(x + i), largest);
        float lanes[8], maximum = -INFINITY;
        _mm256_storeu_ps(lanes, largest);
        for (int j = 0; j < 8; j++)
            if (lanes[j] > maximum) maximum = lanes[j];
        for (; i < c->dim; i++)
            if (x[i] > maximum) maximum = x[i];
        int64_t place = 0;
        while (place < c->dim - 1 && !(x[place] == maximum)) place++;
        c->out[r] = place;
    }
}

/* out[r] is the first index of the largest of row r of x [rows, dim]. */
void argmax_f32(const float *x, int64_t *out, int64_t rows, int64_t dim) {
    struct choice c = {x, out, dim};
    run(choose_rows, &c, rows, rows * dim);
}

/* ---- Activations -------------------------------------------------------------------------------------- */

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

struct gated_silu {
    const float *x;
    float *y;
    int64_t n;
};

static void gated_silu_rows(void *argument, int64_t begin, int64_t end) {
    const struct gated_silu *s = argument;
    const int64_t n = s->n;
    for (int64_t r = begin; r < end; r++) {
        const float *gate = s->x + r * 2 * n, *up = gate + n;
        float *y = s->y + r * n;
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) {
            const __m256 a = _mm256_loadu_ps(gate + i), one = _mm256_set1_ps(1.0f);
            /* exp(-|a|) never overflows; the sigmoid of a negative number is e / (1 + e). */
            const __m256 e = exp256(_mm256_or_ps(a, _mm256_set1_ps(-0.0f)));
            const __m256 sigmoid = _mm256_div_ps(_mm256_blendv_ps(one, e, a), _mm256_add_ps(one, e));
            _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(a, sigmoid), _mm256_loadu_ps(up + i)));
        }
        for (; i < n; i++) y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

/* y[m, i] = silu(x[m, i]) * x[m, n + i] for x [rows, 2 n]; silu(a) = a / (1 + exp(-a)). */
void gated_silu_f32(const float *x, float *y, int64_t rows, int64_t n) {
    struct gated_silu s = {x, y, n};
    run(gated_silu_rows, &s, rows, rows * n);
}

/* ---- Rotary positions ----------------------------------------------------------------------------------
 *
 * x[i] * cos[i] + rotate_half(x)[i] * sin[i], after an RMS norm over the head where it has one.
 */
static void rotate_head(const float *x, const float *norm, float epsilon, const float *cos, const float *sin,
                        float *out, int64_t dim) {
    float normed[MAX_HEAD_DIM];
    if (norm) {
        rms_norm_f32(x, norm, normed, 1, dim, epsilon);
        x = normed;
    }
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
    }
}

struct rotation {
    const float *qkv, *cos, *sin, *q_norm, *k_norm;
    float epsilon, *q, *key_pool, *value_pool;
    const int64_t *slots;
    int64_t heads, kv_heads, dim;
};

static void rotate_tokens(void *argument, int64_t begin, int64_t end) {
    const struct rotation *r = argument;
    const int64_t dim = r->dim, kv_size = r->kv_heads * dim;
    for (int64_t t = begin; t < end; t++) {
        const float *c = r->cos + t * dim, *s = r->sin + t * dim;
        const float *in = r->qkv + t * (r->heads * dim + 2 * kv_size);
        for (int64_t h = 0; h < r->heads; h++, in += dim)
            rotate_head(in, r->q_norm, r->epsilon, c, s, r->q + (t * r->heads + h) * dim, dim);
        float *key = r->key_pool + r->slots[t] * kv_size;
        for (int64_t h = 0; h < r->kv_heads; h++, in += dim)
            rotate_head(in, r->k_norm, r->epsilon, c, s, key + h * dim, dim);
        memcpy(r->value_pool + r->slots[t] * kv_size, in, (size_t)kv_size * sizeof(float));
    }
}

/* qkv [tokens, heads + 2 kv_heads, dim]: queries go rotated to q [tokens, heads, dim], keys rotated and values
 * as they are to the pools, at slots[token]. */
void rotate_and_store_f32(const float *qkv, const float *cos, const float *sin, const float *q_norm,
                          const float *k_norm, float epsilon, float *q, float *key_pool, float *value_pool,
                          const int64_t *slots, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim) {
    struct rotation r = {qkv,        cos,   sin,   q_norm,   k_norm, epsilon, q, key_pool,
                         value_pool, slots, heads, kv_heads, dim};
    run(rotate_tokens, &r, tokens, tokens * (heads + 2 * kv_heads) * dim);
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
 * A query sees keys from first_keys[s] up to its own position, and only the last `window` of them where
 * window > 0.
 * softcap > 0 squashes scores to softcap * tanh(score / softcap).
 */

/* The sums of 8 registers as one. */
static inline __m256 sum8(const __m256 *v) {
    const __m256 ab = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 cd = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(ab, cd, 0x20), _mm256_permute2f128_ps(ab, cd, 0x31));
}

/* scores[j] = q . keys[j] * scale for `count` keys, eight at a time; dim is a multiple of 8. */
static void score_keys(const float *q, const float *const *keys, int64_t count, int64_t dim, float scale,
                       float *scores) {
    for (int64_t j = 0; j < count; j += 8) {
        __m256 sums[8];
        for (int i = 0; i < 8; i++) sums[i] = _mm256_setzero_ps();
        for (int64_t d = 0; d < dim; d += 8) {
            const __m256 part = _mm256_loadu_ps(q + d);
            for (int i = 0; i < 8; i++) sums[i] = _mm256_fmadd_ps(part, _mm256_loadu_ps(keys[j + i] + d), sums[i]);
        }
        _mm256_storeu_ps(scores + j, _mm256_mul_ps(sum8(sums), _mm256_set1_ps(scale)));
    }
}

/* acc = acc * rescale + sum over j of weights[j] * values[j]; dim is a multiple of 8. */
static void add_values(float *acc, float rescale, const float *weights, const float *const *values, int64_t count,
                       int64_t dim) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
        __m256 sums[4];
        for (int i = 0; i < 4; i++)
            sums[i] = _mm256_mul_ps(_mm256_set1_ps(rescale), _mm256_loadu_ps(acc + d + 8 * i));
        for (int64_t j = 0; j < count; j++) {
            const __m256 weight = _mm256_broadcast_ss(weights + j);
            for (int i = 0; i < 4; i++)
                sums[i] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(values[j] + d + 8 * i), sums[i]);
        }
        for (int i = 0; i < 4; i++) _mm256_storeu_ps(acc + d + 8 * i, sums[i]);
    }
    for (; d < dim; d += 8) {
        __m256 sum = _mm256_mul_ps(_mm256_set1_ps(rescale), _mm256_loadu_ps(acc + d));
        for (int64_t j = 0; j < count; j++)
            sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + j), _mm256_loadu_ps(values[j] + d), sum);
        _mm256_storeu_ps(acc + d, sum);
    }
}

/* Running softmax of one query of one head. */
struct softmax {
    float maximum, total, acc[MAX_HEAD_DIM];
};

/* Takes in the next `count` keys, whose scores become weights. */
static void take_in(struct softmax *s, float *scores, const float *const *values, int64_t count, int64_t dim) {
    float local = -INFINITY;
    for (int64_t j = 0; j < count; j++)
        if (scores[j] > local) local = scores[j];
    const float maximum = local > s->maximum ? local : s->maximum;
    const float rescale = s->maximum == -INFINITY ? 0.0f : expf(s->maximum - maximum);
    for (int64_t j = 0; j < count; j += 8)
        _mm256_storeu_ps(scores + j, exp256(_mm256_sub_ps(_mm256_loadu_ps(scores + j), _mm256_set1_ps(maximum))));
    float total = s->total * rescale;
    for (int64_t j = 0; j < count; j++) total += scores[j];
    add_values(s->acc, rescale, scores, values, count, dim);
    s->maximum = maximum;
    s->total = total;
}

/* One query, all `group` heads that share these keys; q and out are [group, dim]. */
static void attend_query(const float *q, float *out, int64_t group, const float *key_pool, const float *value_pool,
                         const int32_t *table, int64_t block_size, int64_t token_stride, int64_t dim,
                         int64_t first, int64_t last, float scale, float softcap) {
    struct softmax heads[MAX_GROUP];
    for (int64_t g = 0; g < group; g++) {
        heads[g].maximum = -INFINITY;
        heads[g].total = 0.0f;
        memset(heads[g].acc, 0, (size_t)dim * sizeof(float));
    }
    for (int64_t begin = first; begin <= last; begin += KEYS) {
        const int64_t count = last - begin + 1 < KEYS ? last - begin + 1 : KEYS;
        const float *keys[KEYS], *values[KEYS];
        for (int64_t j = 0; j < KEYS; j++) {
            const int64_t p = begin + (j < count ? j : 0); /* padding reads a key that is there */
            const int64_t slot = (int64_t)table[p / block_size] * block_size + p % block_size;
            keys[j] = key_pool + slot * token_stride;
            values[j] = value_pool + slot * token_stride;
        }
        for (int64_t g = 0; g < group; g++) {
            float scores[KEYS];
            score_keys(q + g * dim, keys, count, dim, scale, scores);
            if (softcap > 0.0f)
                for (int64_t j = 0; j < count; j++) scores[j] = softcap * tanhf(scores[j] / softcap);
            take_in(&heads[g], scores, values, count, dim);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < dim; i++) out[g * dim + i] = heads[g].acc[i] / heads[g].total;
}

struct attention {
    const float *q;
    float *out;
    const float *keys, *values;
    const int32_t *starts, *query_lens, *kv_lens, *first_keys, *tables;
    int64_t table_width, heads, kv_heads, dim, block_size, window;
    float scale, softcap;
};

/* Sequences times key heads. */
static void attend_heads(void *argument, int64_t begin, int64_t end) {
    const struct attention *a = argument;
    const int64_t group = a->heads / a->kv_heads, dim = a->dim;
    for (int64_t item = begin; item < end; item++) {
        const int64_t s = item / a->kv_heads, kv_head = item % a->kv_heads;
        const int32_t *table = a->tables + s * a->table_width;
        for (int64_t i = 0; i < a->query_lens[s]; i++) {
            const int64_t last = a->kv_lens[s] - a->query_lens[s] + i;
            const int64_t oldest = a->window > 0 ? last - a->window + 1 : 0;
            const int64_t first = oldest > a->first_keys[s] ? oldest : a->first_keys[s];
            const int64_t row = ((a->starts[s] + i) * a->heads + kv_head * group) * dim;
            attend_query(a->q + row, a->out + row, group, a->keys + kv_head * dim, a->values + kv_head * dim, table,
                         a->block_size, a->kv_heads * dim, dim, first, last, a->scale, a->softcap);
        }
    }
}

void paged_attention_f32(const float *q, float *out, const float *keys, const float *values, int64_t sequences,
                         const int32_t *starts, const int32_t *query_lens, const int32_t *kv_lens,
                         const int32_t *first_keys, const int32_t *tables, int64_t table_width, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t block_size, int64_t window, float scale, float softcap) {
    struct attention a = {q,      out,         keys,  values,   starts, query_lens, kv_lens, first_keys,
                          tables, table_width, heads, kv_heads, dim,    block_size, window,  scale,
                          softcap};
    pool_run(attend_heads, &a, sequences * kv_heads, 1); /* sequences differ in length */
}
