/*
 * rope: rotary positions — the angles of each position, the scalings for long contexts, and the
 * order of rows in files that interleave the pairs.
 *
 * Every known scaling keeps a share e of pair i's frequency f and divides the rest by the factor:
 * f' = f (e + (1 - e) / factor). The kinds differ in e, which is clamped to [0, 1]:
 *
 *     linear  e = 0
 *     llama3  e = (N f / 2π - low) / (high - low); N is the original length, N f / 2π the number of
 *             turns within it
 *     yarn    e falls from 1 to 0 between the pairs that make 32 turns and one turn within N;
 *             in addition q·k is multiplied by (0.1 ln factor + 1)²: the table's cosines and sines
 *             are multiplied by 0.1 ln factor + 1
 *
 * Sources: Peng et al. 2023 for yarn, the Llama 3.1 release for llama3. GGUF stores each pair's
 * divisor f / f' instead of llama3's parameters, so rope_scaling_recover finds the parameters.
 */
#include "model/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double PI = 3.14159265358979323846;

static const char *const kind_names[] = {"default", "linear", "llama3", "yarn"};

const char *rope_kind_name(enum rope_kind kind) {
    return kind_names[kind];
}

int rope_kind_find(const char *name) {
    for (int i = 0; i < (int)ARRAY_LEN(kind_names); i++)
        if (strcmp(kind_names[i], name) == 0) return i;
    return -1;
}

static double unit_clamp(double x) {
    return x < 0.0 ? 0.0 : x > 1.0 ? 1.0 : x;
}

/* The pair that makes `turns` turns within the original length, as a real number. */
static double yarn_pair(const struct model_config *c, double turns) {
    double n = c->rope_scaling.original_len;
    return c->head_dim * math_log(n / (turns * 2 * PI)) / (2 * math_log((double)c->rope_theta));
}

static double yarn_kept_share(const struct model_config *c, int32_t i) {
    double low = floor(yarn_pair(c, 32)), high = ceil(yarn_pair(c, 1));
    low = low < 0 ? 0 : low;
    high = high > c->head_dim - 1 ? c->head_dim - 1 : high;
    if (low == high) high += 0.001;
    return 1.0 - unit_clamp((i - low) / (high - low));
}

/* The share of pair i's frequency that is kept. */
static double kept_share(const struct model_config *c, int32_t i, double freq) {
    const struct rope_scaling *s = &c->rope_scaling;
    switch (s->kind) {
    case ROPE_LINEAR:
        return 0.0;
    case ROPE_LLAMA3:
        return unit_clamp((s->original_len * freq / (2 * PI) - (double)s->low_freq_factor) /
                          ((double)s->high_freq_factor - (double)s->low_freq_factor));
    case ROPE_YARN:
        return yarn_kept_share(c, i);
    default:
        return 1.0;
    }
}

static double frequency(float theta, int32_t i, int32_t head_dim) {
    return math_pow((double)theta, -2.0 * i / head_dim);
}

float rope_divisor(const struct model_config *c, int32_t i) {
    if (c->rope_scaling.kind == ROPE_DEFAULT) return 1.0f;
    double e = kept_share(c, i, frequency(c->rope_theta, i, c->head_dim));
    return (float)(1.0 / (e + (1.0 - e) / (double)c->rope_scaling.factor));
}

/* Angles p · freq[i] in double; their cosine and sine times `gain` are rounded once, to f32. */
static void table_fill(const double *freq, int32_t half, double gain, int32_t n_pos, float *cos,
                       float *sin) {
    CHECK(n_pos <= 1000000); /* the range on which math_sin and math_cos are exact enough */
    for (int32_t p = 0; p < n_pos; p++)
        for (int32_t i = 0; i < half; i++) {
            cos[(int64_t)p * half + i] = (float)(gain * math_cos(p * freq[i]));
            sin[(int64_t)p * half + i] = (float)(gain * math_sin(p * freq[i]));
        }
}

void rope_table(const struct model_config *c, int32_t n_pos, float *cos, float *sin) {
    const struct rope_scaling *s = &c->rope_scaling;
    int32_t half = c->head_dim / 2;
    double gain = s->kind == ROPE_YARN ? 0.1 * math_log((double)s->factor) + 1.0 : 1.0;
    double *freq = xmalloc(sizeof(*freq) * (size_t)half);
    for (int32_t i = 0; i < half; i++) {
        freq[i] = frequency(c->rope_theta, i, c->head_dim);
        if (s->kind == ROPE_DEFAULT) continue;
        double e = kept_share(c, i, freq[i]);
        freq[i] *= e + (1.0 - e) / (double)s->factor;
    }
    table_fill(freq, half, gain, n_pos, cos, sin);
    free(freq);
}

void rope_table_local(const struct model_config *c, int32_t n_pos, float *cos, float *sin) {
    int32_t half = c->head_dim / 2;
    double *freq = xmalloc(sizeof(*freq) * (size_t)half);
    for (int32_t i = 0; i < half; i++) freq[i] = frequency(c->rope_local_theta, i, c->head_dim);
    table_fill(freq, half, 1.0, n_pos, cos, sin);
    free(freq);
}

/* Compares with a tolerance, because converters compute the divisors in float32. */
static bool are_divisors_equal(const struct model_config *c, const float *divisors) {
    for (int32_t i = 0; i < c->head_dim / 2; i++)
        if (!(fabsf(rope_divisor(c, i) - divisors[i]) <= 1e-4f * divisors[i])) return false;
    return true;
}

bool rope_scaling_recover(struct model_config *c, const float *divisors) {
    float factor = 1.0f;
    for (int32_t i = 0; i < c->head_dim / 2; i++)
        factor = divisors[i] > factor ? divisors[i] : factor;
    c->rope_scaling = (struct rope_scaling){.kind = ROPE_DEFAULT};
    if (are_divisors_equal(c, divisors)) return true;
    for (int32_t len = 16; len <= 1 << 20; len *= 2) {
        c->rope_scaling = (struct rope_scaling){.kind = ROPE_LLAMA3,
                                                .factor = factor,
                                                .low_freq_factor = 1.0f,
                                                .high_freq_factor = 4.0f,
                                                .original_len = len};
        if (are_divisors_equal(c, divisors)) return true;
    }
    return false;
}

int64_t rope_row_from_interleaved(int64_t row, int32_t head_dim) {
    const int64_t i = row % head_dim, half = head_dim / 2;
    return row - i + (i < half ? 2 * i : 2 * (i - half) + 1);
}

int32_t *rope_rows_from_interleaved(int32_t heads, int32_t head_dim) {
    int32_t n = heads * head_dim, *order = xmalloc(sizeof(*order) * (size_t)n);
    for (int32_t i = 0; i < n; i++) order[i] = (int32_t)rope_row_from_interleaved(i, head_dim);
    return order;
}

int32_t *rope_rows_to_interleaved(int32_t heads, int32_t head_dim) {
    int32_t half = head_dim / 2,
            *order = xmalloc(sizeof(*order) * (size_t)heads * (size_t)head_dim);
    for (int32_t h = 0; h < heads; h++)
        for (int32_t j = 0; j < half; j++) {
            order[h * head_dim + 2 * j] = h * head_dim + j;
            order[h * head_dim + 2 * j + 1] = h * head_dim + half + j;
        }
    return order;
}
