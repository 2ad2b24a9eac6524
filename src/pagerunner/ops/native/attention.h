// Attention over paged keys and values, as ops/paged_attention.py defines it, for float32 pages.
//
// Shape letters: T tokens, R rows, H query heads, K key/value heads, G query heads per key/value head, D head size, V size of a value head.

enum { KEYS = 64, QUERIES = 32 }; // that are looked at together
enum { MANY = 8 }; // queries for which keys are worth putting in panels

typedef struct {
    float *q, *k, *v;          // [T, H, D], [T, K, D], [T, K, V]; tokens `q_stride`, `k_stride`, `v_stride` apart
    float *k_pages, *v_pages;  // slot s of entry e: k_pages + e * k_entry + s * K * D
    float *out;                // [T, H, V]
    const float *q_norm, *k_norm, *cos, *sin, *sinks; // [D], [D], [T, D], [T, D], [H]; NULL: none
    const int64_t *write_entry, *write_offset;        // [T]
    const int64_t *table;                             // [slots, width]
    const int32_t *slots, *query_start, *seq_lens;    // [R], [R + 1], [R]
    long q_stride, k_stride, v_stride, k_entry, v_entry, page_tokens, table_width;
    long tokens, rows, heads, kv_heads, head_dim, value_dim, window, chunk;
    float eps, scale, softcap;
} Attention;

static void prepare_head(float *x, const float *norm, float eps, const float *cos, const float *sin, long size)
{
    if (norm) {
        float scale = inverse_rms(x, size, eps);
        for (long i = 0; i < size; i++) x[i] = x[i] * scale * norm[i];
    }
    if (cos)
        for (long i = 0, half = size / 2; i < half; i++) {
            float a = x[i], b = x[i + half];
            x[i] = a * cos[i] + b * sin[i];
            x[i + half] = b * cos[i + half] + a * sin[i + half];
        }
}

static void prepare_thread(void *argument, int thread, int threads)
{
    const Attention *call = argument;
    long each = (call->tokens + threads - 1) / threads, last = min((thread + 1) * each, call->tokens);
    long size = call->head_dim, k_size = call->kv_heads * size, v_size = call->kv_heads * call->value_dim;
    for (long t = thread * each; t < last; t++) {
        const float *cos = call->cos ? call->cos + t * size : NULL, *sin = call->sin ? call->sin + t * size : NULL;
        float *q = call->q + t * call->q_stride, *k = call->k + t * call->k_stride;
        if (call->q_norm || cos) {
            for (long h = 0; h < call->heads; h++) prepare_head(q + h * size, call->q_norm, call->eps, cos, sin, size);
            for (long h = 0; h < call->kv_heads; h++) prepare_head(k + h * size, call->k_norm, call->eps, cos, sin, size);
        }
        int64_t entry = call->write_entry[t], slot = call->write_offset[t];
        if (entry < 0) continue;
        memcpy(call->k_pages + entry * call->k_entry + slot * k_size, k, k_size * sizeof(float));
        memcpy(call->v_pages + entry * call->v_entry + slot * v_size, call->v + t * call->v_stride, v_size * sizeof(float));
    }
}

// Norm and rotate queries and keys in place, and store keys and values in pages.
void pagerunner_prepare(const Attention *call)
{
    in_threads(prepare_thread, (void *)call, call->tokens * (call->heads + 2 * call->kv_heads) * call->head_dim * 8);
}

// scores[m][j] = q[m] . keys[j] for M queries and two keys.
#define DEFINE_DOTS(M)                                                                                             \
    INLINE void dots_##M(const float *q, const float *a, const float *b, long size, float *to_a, float *to_b)      \
    {                                                                                                              \
        Vector sum_a[M], sum_b[M];                                                                                 \
        _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) sum_a[m] = sum_b[m] = splat(0.0f);                     \
        long d = 0;                                                                                                \
        for (; d + LANES <= size; d += LANES) {                                                                    \
            Vector one = load(a + d), two = load(b + d);                                                           \
            _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) {                                                  \
                sum_a[m] += load(q + m * size + d) * one;                                                          \
                sum_b[m] += load(q + m * size + d) * two;                                                          \
            }                                                                                                      \
        }                                                                                                          \
        _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) {                                                      \
            float one = sum_of(sum_a[m]), two = sum_of(sum_b[m]);                                                  \
            for (long i = d; i < size; i++) one += q[m * size + i] * a[i], two += q[m * size + i] * b[i];          \
            to_a[m * KEYS] = one;                                                                                  \
            to_b[m * KEYS] = two;                                                                                  \
        }                                                                                                          \
    }

DEFINE_DOTS(1)
DEFINE_DOTS(2)
DEFINE_DOTS(4)

static void few_scores(const float *q, long queries, const float **keys, long count, long size, float *scores)
{
    for (long j = 0; j < count; j += 2) {
        const float *a = keys[j], *b = keys[min(j + 1, count - 1)];
        for (long m = 0; m < queries;) {
            float *to_a = scores + m * KEYS + j, *to_b = scores + m * KEYS + min(j + 1, count - 1);
            const float *own = q + m * size;
            if (queries - m >= 4) dots_4(own, a, b, size, to_a, to_b), m += 4;
            else if (queries - m >= 2) dots_2(own, a, b, size, to_a, to_b), m += 2;
            else dots_1(own, a, b, size, to_a, to_b), m += 1;
        }
    }
}

// As few_scores, with queries in tiles and keys in panels: `space` has room for PANEL * size floats.
static void many_scores(const float *q, long queries, const float **keys, long count, long size, float *scores, float *space)
{
    for (long first = 0; first < count; first += PANEL) {
        long own = min(PANEL, count - first);
        for (long j = 0; j < PANEL; j++)
            for (long d = 0; d < size; d++) space[d * PANEL + j] = j < own ? keys[first + j][d] : 0.0f;
        for (long i = 0; i < tiles_of(queries); i++) {
            long m = tile_begin(queries, i), tokens = tile_begin(queries, i + 1) - m;
            tile(tokens, q + m * size, space, size, scores + m * KEYS + first, KEYS, 1);
        }
    }
}

// out[m] += the sum over j of weights[m][j] * values[j], for M rows and VECTORS vectors of each value.
#define DEFINE_WEIGHTED(M, N)                                                                                               \
    INLINE void weighted_##M##_##N(const float *weights, const float **values, long from, long count, float *out, long size) \
    {                                                                                                                       \
        Vector sum[M][N];                                                                                                   \
        _Pragma("GCC unroll 8") for (int m = 0; m < M; m++)                                                                 \
            _Pragma("GCC unroll 8") for (int n = 0; n < N; n++) sum[m][n] = load(out + m * size + n * LANES);               \
        for (long j = 0; j < count; j++) {                                                                                  \
            Vector row[N];                                                                                                  \
            _Pragma("GCC unroll 8") for (int n = 0; n < N; n++) row[n] = load(values[j] + from + n * LANES);                \
            _Pragma("GCC unroll 8") for (int m = 0; m < M; m++)                                                             \
                _Pragma("GCC unroll 8") for (int n = 0; n < N; n++) sum[m][n] += weights[m * KEYS + j] * row[n];            \
        }                                                                                                                   \
        _Pragma("GCC unroll 8") for (int m = 0; m < M; m++)                                                                 \
            _Pragma("GCC unroll 8") for (int n = 0; n < N; n++) store(out + m * size + n * LANES, sum[m][n]);               \
    }

DEFINE_WEIGHTED(1, 1)
DEFINE_WEIGHTED(1, 4)
DEFINE_WEIGHTED(2, 4)
DEFINE_WEIGHTED(3, 2)
DEFINE_WEIGHTED(4, 2)

static void add_values(const float *weights, long queries, const float **values, long count, float *out, long size)
{
    for (long m = 0; m < queries;) {
        const float *own = weights + m * KEYS;
        float *to = out + m * size;
        long left = queries - m, rows = left >= 4 ? 4 : left, d = 0;
        if (rows <= 2)
            for (; d + 4 * LANES <= size; d += 4 * LANES)
                rows == 2 ? weighted_2_4(own, values, d, count, to + d, size) : weighted_1_4(own, values, d, count, to + d, size);
        else
            for (; d + 2 * LANES <= size; d += 2 * LANES)
                rows == 4 ? weighted_4_2(own, values, d, count, to + d, size) : weighted_3_2(own, values, d, count, to + d, size);
        for (long i = 0; i < rows; i++) {
            long e = d;
            for (; e + LANES <= size; e += LANES) weighted_1_1(own + i * KEYS, values, e, count, to + i * size + e, size);
            for (; e < size; e++)
                for (long j = 0; j < count; j++) to[i * size + e] += own[i * KEYS + j] * values[j][e];
        }
        m += rows;
    }
}

typedef struct {
    float most, total; // of the scores so far: their maximum, and the sum of exp(score - maximum)
} Softmax;

// Turn scores [first, last) of KEYS into weights, the others into zeros, and scale what `out` has so far.
static void weigh(const Attention *call, float *scores, long first, long last, Softmax *softmax, float *out)
{
    if (call->softcap != 0.0f)
        for (long j = first; j < last; j++) scores[j] = tanhf(scores[j] / call->softcap) * call->softcap;
    for (long j = 0; j < first; j++) scores[j] = -INFINITY;
    for (long j = last; j < KEYS; j++) scores[j] = -INFINITY;
    Vector best = load(scores);
    for (long j = LANES; j < KEYS; j += LANES) {
        Vector own = load(scores + j);
        Integers more = own > best;
        best = (Vector)(((Integers)own & more) | ((Integers)best & ~more));
    }
    float most = softmax->most;
    for (int i = 0; i < LANES; i++) most = best[i] > most ? best[i] : most;
    Vector sum = splat(0.0f);
    for (long j = 0; j < KEYS; j += LANES) {
        Vector weight = exp_of(load(scores + j) - most);
        store(scores + j, weight);
        sum += weight;
    }
    if (most > softmax->most) {
        float scale = expf(softmax->most - most);
        softmax->total *= scale;
        for (long d = 0; d < call->value_dim; d++) out[d] *= scale;
        softmax->most = most;
    }
    softmax->total += sum_of(sum);
}

INLINE long oldest(const Attention *call, long position)
{
    if (call->chunk) return position / call->chunk * call->chunk;
    return call->window ? max(position - call->window + 1, 0) : 0;
}

// Queries [first, last) of a row, numbered by their tokens in T, with the heads that share key/value head `head`.
static void attend(const Attention *call, long row, long head, long first, long last)
{
    long size = call->head_dim, value_size = call->value_dim, group = call->heads / call->kv_heads;
    long row_first = call->query_start[row], length = call->seq_lens[row];
    long start = length - (call->query_start[row + 1] - row_first); // position of the row's first token of this step
    long position = start + first - row_first, queries = (last - first) * group;
    const int64_t *table = call->table + (long)call->slots[row] * call->table_width;
    float *q = scratch(1, queries * (size + KEYS + value_size) + PANEL * size);
    float *scores = q + queries * size, *out = scores + queries * KEYS, *space = out + queries * value_size;
    Softmax softmax[queries];
    const float *keys[KEYS], *values[KEYS];
    int many = queries >= MANY;
    for (long i = 0; i < (many ? tiles_of(queries) : queries); i++) {
        long m = many ? tile_begin(queries, i) : i, end = many ? tile_begin(queries, i + 1) : i + 1;
        for (long j = m; j < end; j++) {
            const float *from = call->q + (first + j / group) * call->q_stride + (head * group + j % group) * size;
            for (long d = 0; d < size; d++) q[m * size + d * (end - m) + j - m] = from[d] * call->scale;
            softmax[j] = (Softmax){-INFINITY, 0.0f};
        }
    }
    memset(out, 0, queries * value_size * sizeof(float));
    long end = position + last - first;
    for (long block = oldest(call, position); block < end; block += KEYS) {
        long count = min(KEYS, end - block);
        for (long j = 0; j < count;) { // a page at a time: divisions cost as much as a key's products
            long at = block + j, own = count - j, k_step = call->k_stride, v_step = call->v_stride;
            const float *k = call->k + (row_first + at - start) * k_step + head * size;
            const float *v = call->v + (row_first + at - start) * v_step + head * value_size;
            if (at < start) {
                long page = at / call->page_tokens, slot = at - page * call->page_tokens, entry = table[page % call->table_width];
                own = min(min(own, start - at), call->page_tokens - slot);
                k = call->k_pages + entry * call->k_entry + (slot * call->kv_heads + head) * size;
                v = call->v_pages + entry * call->v_entry + (slot * call->kv_heads + head) * value_size;
                k_step = call->kv_heads * size;
                v_step = call->kv_heads * value_size;
            }
            for (long i = 0; i < own; i++, j++) keys[j] = k + i * k_step, values[j] = v + i * v_step;
        }
        if (many) many_scores(q, queries, keys, count, size, scores, space);
        else few_scores(q, queries, keys, count, size, scores);
        for (long m = 0; m < queries; m++) {
            long own = position + m / group;
            long from = min(max(oldest(call, own) - block, 0), count), to = max(min(own + 1 - block, count), from);
            if (from < to) weigh(call, scores + m * KEYS, from, to, softmax + m, out + m * value_size);
            else memset(scores + m * KEYS, 0, KEYS * sizeof(float));
        }
        add_values(scores, queries, values, count, out, value_size);
    }
    for (long m = 0; m < queries; m++) {
        long h = head * group + m % group;
        float most = softmax[m].most, total = softmax[m].total, scale = 1.0f;
        if (call->sinks && call->sinks[h] > most) scale = expf(most - call->sinks[h]), total = total * scale + 1.0f;
        else if (call->sinks) total += expf(call->sinks[h] - most);
        float *to = call->out + ((first + m / group) * call->heads + h) * value_size;
        for (long d = 0; d < value_size; d++) to[d] = out[m * value_size + d] * scale / total;
    }
}

typedef struct {
    int row, head, first, last;
} Item;

typedef struct {
    const Attention *call;
    const Item *items;
    long count, next;
} AttentionWork;

static void attention_thread(void *argument, int thread, int threads)
{
    AttentionWork *work = argument;
    (void)thread, (void)threads;
    for (;;) {
        long i = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (i >= work->count) return;
        const Item *item = work->items + i;
        attend(work->call, item->row, item->head, item->first, item->last);
    }
}

// The attention of every token, after pagerunner_prepare.
void pagerunner_attention(const Attention *call)
{
    long count = 0, amount = 0, covered = call->query_start[call->rows];
    for (long row = 0; row < call->rows; row++) {
        long queries = call->query_start[row + 1] - call->query_start[row];
        count += (queries + QUERIES - 1) / QUERIES * call->kv_heads;
        amount += queries * call->seq_lens[row];
    }
    Item *items = (Item *)scratch(0, count * sizeof(Item) / sizeof(float));
    long at = 0;
    for (long row = 0; row < call->rows; row++) {
        int last = call->query_start[row + 1];
        for (int first = call->query_start[row]; first < last; first += QUERIES)
            for (int head = 0; head < call->kv_heads; head++)
                items[at++] = (Item){row, head, first, first + QUERIES < last ? first + QUERIES : last};
    }
    AttentionWork work = {call, items, count, 0};
    in_threads(attention_thread, &work, amount * call->heads * (call->head_dim + call->value_dim));
    memset(call->out + covered * call->heads * call->value_dim, 0, (call->tokens - covered) * call->heads * call->value_dim * sizeof(float));
}
