// Attention over paged keys and values, as ops/paged_attention.py defines it, for float32 pages.
//
// Shape letters: T tokens, R rows, H query heads, K key/value heads, G query heads per key/value head, D head size, V size of a value head.

enum { KEYS = 64, QUERIES = 64 }; // that are looked at together
enum { PIECE = 8 };               // tokens that a thread prepares at once
enum { MANY = 8 }; // queries for which keys are worth putting in panels

typedef struct {
    float *q, *k, *v;          // [T, H, D], [T, K, D], [T, K, V]; tokens `q_stride`, `k_stride`, `v_stride` apart
    float *k_pages, *v_pages;  // slot s of entry e: k_pages + e * k_entry + s * k_slot
    float *out;                // [T, H, V]
    const float *q_norm, *k_norm, *cos, *sin, *sinks; // [D], [D], [T, D], [T, D], [H]; NULL: none
    const int64_t *write_entry, *write_offset;        // [T]
    const int64_t *table;                             // [slots, width]
    const int32_t *slots, *query_start, *seq_lens;    // [R], [R + 1], [R]
    long q_stride, k_stride, v_stride, k_entry, v_entry, k_slot, v_slot, page_tokens, table_stride, table_width;
    long tokens, rows, row_tokens, heads, kv_heads, head_dim, value_dim, window, chunk; // row_tokens: a row has at most so many
    float eps, norm_from, scale, softcap; // the norms' weights count from `norm_from`, 0 or 1
    int fixed; // sums are made in the same order whatever else a step computes
} Attention;

// Turn pairs by their angles: halves of x, or with `adjacent` neighbours.
INLINE void turn(float *x, const float *cos, const float *sin, long size, int adjacent)
{
    long half = size / 2, first = adjacent ? 2 : 1, second = adjacent ? 1 : half;
    for (long i = 0; i < half; i++) {
        float *a = x + i * first, *b = a + second, even = *a, odd = *b;
        *a = even * cos[i] + odd * sin[i];
        *b = odd * cos[i + half] + even * sin[i + half];
    }
}

static void prepare_head(float *x, const float *norm, const Attention *call, const float *cos, const float *sin)
{
    long size = call->head_dim;
    if (norm) {
        float scale = inverse_rms(x, size, call->eps);
        for (long i = 0; i < size; i++) x[i] = x[i] * scale * (norm[i] + call->norm_from);
    }
    if (cos) turn(x, cos, sin, size, 0);
}

static void prepare_token(const Attention *call, long t)
{
    long size = call->head_dim, k_size = call->kv_heads * size, v_size = call->kv_heads * call->value_dim;
    const float *cos = call->cos ? call->cos + t * size : NULL, *sin = call->sin ? call->sin + t * size : NULL;
    float *q = call->q + t * call->q_stride, *k = call->k + t * call->k_stride;
    if (call->q_norm || cos) {
        for (long h = 0; h < call->heads; h++) prepare_head(q + h * size, call->q_norm, call, cos, sin);
        for (long h = 0; h < call->kv_heads; h++) prepare_head(k + h * size, call->k_norm, call, cos, sin);
    }
    int64_t entry = call->write_entry[t], slot = call->write_offset[t];
    if (entry < 0) return;
    memcpy(call->k_pages + entry * call->k_entry + slot * call->k_slot, k, k_size * sizeof(float));
    memcpy(call->v_pages + entry * call->v_entry + slot * call->v_slot, call->v + t * call->v_stride, v_size * sizeof(float));
}

static long prepare_amount(const void *argument)
{
    const Attention *call = argument;
    return call->tokens * (call->heads + 2 * call->kv_heads) * call->head_dim * 8;
}

// Norm and rotate queries and keys in place, and store keys and values in pages.
static void prepare(const void *argument, const Worker *worker)
{
    const Attention *call = argument;
    for (long i; (i = take(worker)) < (call->tokens + PIECE - 1) / PIECE;)
        for (long t = i * PIECE; t < min((i + 1) * PIECE, call->tokens); t++) prepare_token(call, t);
    meet(worker);
}

// to[m][j] = q[m] . keys[j] for M queries and four keys.
#define DEFINE_DOTS(M)                                                                                              \
    INLINE void dots_##M(const float *q, const float **keys, long from, long size, float *to)                       \
    {                                                                                                               \
        Vector sum[M][4];                                                                                           \
        _Pragma("GCC unroll 3") for (int m = 0; m < M; m++)                                                         \
            _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) sum[m][j] = splat(0.0f);                            \
        long d = 0;                                                                                                 \
        for (; d + LANES <= size; d += LANES)                                                                       \
            _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {                                                   \
                Vector key = load(keys[j] + from + d);                                                              \
                _Pragma("GCC unroll 3") for (int m = 0; m < M; m++) sum[m][j] += load(q + m * size + d) * key;      \
            }                                                                                                       \
        _Pragma("GCC unroll 3") for (int m = 0; m < M; m++) {                                                       \
            Quarter found = sums_of(sum[m]);                                                                        \
            for (long i = d; i < size; i++)                                                                         \
                _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) found[j] += q[m * size + i] * keys[j][from + i]; \
            memcpy(to + m * KEYS, &found, sizeof found);                                                            \
        }                                                                                                           \
    }

DEFINE_DOTS(1)
DEFINE_DOTS(2)
DEFINE_DOTS(3)

// Into the second cache: a block's keys and values are more than the first one holds.
INLINE void prefetch(const float *from, long count)
{
    for (long i = 0; i < count; i += 64 / sizeof *from) __builtin_prefetch(from + i, 0, 2);
}

// Four keys at a time for all heads, so that memory is read from beginning to end. `keys` and `scores` have room for whole groups of four.
// Values are fetched meanwhile; so are keys, of a piece's `first` block. Keys of later blocks were fetched while values were added.
static void few_scores(
    const float *q, long queries, long heads, const float **keys, const float **values, long count, long size, long value_size, int first,
    float *scores)
{
    for (long j = count; j & 3; j++) keys[j] = keys[count - 1], values[j] = values[count - 1];
    for (long j = 0; j < count; j += 4) {
        for (long h = 0; h < heads; h++) {
            for (long i = j; i < j + 4; i++) {
                if (first) prefetch(keys[min(i + 8, count - 1)] + h * size, size);
                prefetch(values[i] + h * value_size, value_size);
            }
            const float *own = q + h * queries * size;
            float *to = scores + h * queries * KEYS + j;
            long m = 0;
            for (; m + 2 <= queries && m + 3 != queries; m += 2) dots_2(own + m * size, keys + j, h * size, size, to + m * KEYS);
            if (m + 3 == queries) dots_3(own + m * size, keys + j, h * size, size, to + m * KEYS);
            if (m + 1 == queries) dots_1(own + m * size, keys + j, h * size, size, to + m * KEYS);
        }
    }
}

// Numbers [0, size) of PANEL keys, those of one place of all keys one after another. Keys beyond `count` are zeros.
static void put_in_panel(const float **keys, long count, long size, float *panel)
{
    for (long j = 0; j < PANEL; j += 4) {
        long d = 0;
        if (j + 4 <= count)
            for (; d + 4 <= size; d += 4) {
                Quarter x[4];
                for (int i = 0; i < 4; i++) memcpy(x + i, keys[j + i] + d, sizeof x[i]);
                Quarter ab = SHUFFLE(x[0], x[1], 0, 4, 1, 5), cd = SHUFFLE(x[2], x[3], 0, 4, 1, 5);
                Quarter ef = SHUFFLE(x[0], x[1], 2, 6, 3, 7), gh = SHUFFLE(x[2], x[3], 2, 6, 3, 7);
                Quarter rows[4] = {
                    SHUFFLE(ab, cd, 0, 1, 4, 5), SHUFFLE(ab, cd, 2, 3, 6, 7), SHUFFLE(ef, gh, 0, 1, 4, 5), SHUFFLE(ef, gh, 2, 3, 6, 7)};
                for (int i = 0; i < 4; i++) memcpy(panel + (d + i) * PANEL + j, rows + i, sizeof rows[i]);
            }
        for (; d < size; d++)
            for (long i = j; i < j + 4; i++) panel[d * PANEL + i] = i < count ? keys[i][d] : 0.0f;
    }
}

// As few_scores, with queries in tiles and keys in panels: `space` has room for PANEL * size floats.
static void many_scores(const float *q, long queries, const float **keys, long count, long size, float *scores, float *space)
{
    for (long first = 0; first < count; first += PANEL) {
        long own = min(PANEL, count - first);
        put_in_panel(keys + first, own, size, space);
        for (long i = 0; i < tiles_of(queries); i++) {
            long m = tile_begin(queries, i), tokens = tile_begin(queries, i + 1) - m;
            Ahead none = {(const char *)space, 0};
            tile(tokens, q + m * size, space, size, scores + m * KEYS + first, KEYS, 1, none);
        }
    }
}

// out[m] += the sum over j of weights[m][j] * values[j], for M rows and N vectors of each value.
#define DEFINE_WEIGHTED(M, N)                                                                                               \
    INLINE void weighted_##M##_##N(                                                                                         \
        const float *weights, const float **values, long from, long count, float *out, long size, const float **ahead)      \
    {                                                                                                                       \
        Vector sum[M][N];                                                                                                   \
        _Pragma("GCC unroll 8") for (int m = 0; m < M; m++)                                                                 \
            _Pragma("GCC unroll 8") for (int n = 0; n < N; n++) sum[m][n] = load(out + m * size + n * LANES);               \
        for (long j = 0; j < count; j++) {                                                                                  \
            if (ahead)                                                                                                      \
                _Pragma("GCC unroll 8") for (int n = 0; n < N; n += 64 / sizeof(Vector))                                    \
                    __builtin_prefetch(ahead[j] + from + n * LANES, 0, 2);                                                  \
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
DEFINE_WEIGHTED(1, 8)
DEFINE_WEIGHTED(2, 4)
DEFINE_WEIGHTED(3, 2)
DEFINE_WEIGHTED(3, 4)
DEFINE_WEIGHTED(4, 2)
DEFINE_WEIGHTED(6, 2)

// `ahead`: the next block's keys are fetched meanwhile; NULL: there is none.
static void add_values(
    const float *weights, long queries, const float **values, long from, long count, float *out, long size, const float **ahead)
{
    for (long m = 0; m < queries;) {
        const float *own = weights + m * KEYS;
        float *to = out + m * size;
        const float **fetched = m ? NULL : ahead; // once is enough
        long left = queries - m, rows = left >= 6 && left != 8 ? 6 : min(left, 4), d = 0;
        if (rows == 1)
            for (; d + 8 * LANES <= size; d += 8 * LANES) weighted_1_8(own, values, from + d, count, to + d, size, fetched);
        if (rows == 3)
            for (; d + 4 * LANES <= size; d += 4 * LANES) weighted_3_4(own, values, from + d, count, to + d, size, fetched);
        if (rows <= 2)
            for (; d + 4 * LANES <= size; d += 4 * LANES)
                rows == 2 ? weighted_2_4(own, values, from + d, count, to + d, size, fetched)
                          : weighted_1_4(own, values, from + d, count, to + d, size, fetched);
        else
            for (; d + 2 * LANES <= size; d += 2 * LANES)
                switch (rows) {
                case 3: weighted_3_2(own, values, from + d, count, to + d, size, fetched); break;
                case 4: weighted_4_2(own, values, from + d, count, to + d, size, fetched); break;
                case 6: weighted_6_2(own, values, from + d, count, to + d, size, fetched); break;
                }
        for (long i = 0; i < rows; i++) {
            long e = d;
            for (; e + LANES <= size; e += LANES) weighted_1_1(own + i * KEYS, values, from + e, count, to + i * size + e, size, NULL);
            for (; e < size; e++)
                for (long j = 0; j < count; j++) to[i * size + e] += own[i * KEYS + j] * values[j][from + e];
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

// What a thread does at once: tokens [first, last) of a row, numbered in T, with key/value heads [head, head + heads).
typedef struct {
    const Attention *call;
    long row, head, heads, first, last;
} Piece;

INLINE long group_of(const Attention *call) { return call->heads / call->kv_heads; }
INLINE long most_tokens(const Attention *call) { return max(1, min(QUERIES, call->row_tokens)); } // of a piece

// Floats that `attend` takes: many queries of one head, or few of all heads.
INLINE long attend_floats(const Attention *call)
{
    long queries = max(group_of(call) * most_tokens(call), (MANY - 1) * call->kv_heads);
    long floats = queries * (call->head_dim + KEYS + call->value_dim + 2) + PANEL * call->head_dim;
    return (floats + 15) & ~15;
}

// Queries of each head, scaled: many of them in tiles.
static void copy_queries(const Piece *piece, long queries, int many, float *q)
{
    const Attention *call = piece->call;
    long size = call->head_dim, group = group_of(call);
    for (long h = 0; h < piece->heads; h++)
        for (long i = 0; i < (many ? tiles_of(queries) : queries); i++) {
            long m = many ? tile_begin(queries, i) : i, end = many ? tile_begin(queries, i + 1) : i + 1;
            for (long j = m; j < end; j++) {
                long head = (piece->head + h) * group + j % group;
                const float *from = call->q + (piece->first + j / group) * call->q_stride + head * size;
                for (long d = 0; d < size; d++) q[(h * queries + m) * size + d * (end - m) + j - m] = from[d] * call->scale;
            }
        }
}

// Where keys and values of positions [block, block + count) of a row begin, at the piece's first head.
static void find_slots(const Piece *piece, long start, long block, long count, const float **keys, const float **values)
{
    const Attention *call = piece->call;
    long row_first = call->query_start[piece->row], size = call->head_dim, value_size = call->value_dim;
    const int64_t *table = call->table + (long)call->slots[piece->row] * call->table_stride;
    for (long j = 0; j < count;) { // a page at a time: divisions cost as much as a key's products
        long at = block + j, own = count - j, k_step = call->k_stride, v_step = call->v_stride;
        const float *k = call->k + (row_first + at - start) * k_step + piece->head * size;
        const float *v = call->v + (row_first + at - start) * v_step + piece->head * value_size;
        if (at < start) {
            long page = at / call->page_tokens, slot = at - page * call->page_tokens, entry = table[page % call->table_width];
            own = min(min(own, start - at), call->page_tokens - slot);
            k = call->k_pages + entry * call->k_entry + slot * call->k_slot + piece->head * size;
            v = call->v_pages + entry * call->v_entry + slot * call->v_slot + piece->head * value_size;
            k_step = call->k_slot;
            v_step = call->v_slot;
        }
        for (long i = 0; i < own; i++, j++) keys[j] = k + i * k_step, values[j] = v + i * v_step;
    }
}

static void put_out(const Piece *piece, long queries, const Softmax *softmax, const float *out)
{
    const Attention *call = piece->call;
    long value_size = call->value_dim, group = group_of(call);
    for (long i = 0; i < piece->heads * queries; i++) {
        long m = i % queries, h = (piece->head + i / queries) * group + m % group;
        float most = softmax[i].most, total = softmax[i].total, scale = 1.0f;
        if (call->sinks && call->sinks[h] > most) scale = expf(most - call->sinks[h]), total = total * scale + 1.0f;
        else if (call->sinks) total += expf(call->sinks[h] - most);
        float *to = call->out + ((piece->first + m / group) * call->heads + h) * value_size;
        for (long d = 0; d < value_size; d++) to[d] = out[i * value_size + d] * scale / total;
    }
}

static void attend(const Piece *piece, float *scratch)
{
    const Attention *call = piece->call;
    long size = call->head_dim, value_size = call->value_dim, group = group_of(call), row_first = call->query_start[piece->row];
    long start = call->seq_lens[piece->row] - (call->query_start[piece->row + 1] - row_first); // the row's first token of this step
    long position = start + piece->first - row_first, end = position + piece->last - piece->first;
    long queries = (piece->last - piece->first) * group, all = piece->heads * queries;
    float *q = scratch, *scores = q + all * size, *out = scores + all * KEYS, *space = out + all * value_size;
    Softmax *softmax = (Softmax *)(space + PANEL * size);
    const float *all_keys[2][KEYS], *all_values[2][KEYS];
    int many = queries >= MANY || call->fixed;
    copy_queries(piece, queries, many, q);
    for (long i = 0; i < all; i++) softmax[i] = (Softmax){-INFINITY, 0.0f};
    memset(out, 0, all * value_size * sizeof(float));
    long lowest = oldest(call, position), block = call->fixed ? lowest / KEYS * KEYS : lowest, unseen = lowest - block, first = 1, turn = 0;
    find_slots(piece, start, lowest, min(KEYS, end - block) - unseen, all_keys[0] + unseen, all_values[0] + unseen);
    for (long j = 0; j < unseen; j++) all_keys[0][j] = all_keys[0][unseen], all_values[0][j] = all_values[0][unseen]; // pages may be gone
    for (; block < end; block += KEYS, first = 0, turn ^= 1) {
        long count = min(KEYS, end - block), behind = min(KEYS, end - block - KEYS);
        const float **keys = all_keys[turn], **values = all_values[turn], **ahead = behind > 0 ? all_keys[turn ^ 1] : NULL;
        if (ahead) {
            find_slots(piece, start, block + KEYS, behind, ahead, all_values[turn ^ 1]);
            for (long j = behind; j < KEYS; j++) ahead[j] = ahead[behind - 1];
        }
        if (many) many_scores(q, queries, keys, count, size, scores, space);
        else few_scores(q, queries, piece->heads, keys, values, count, size, value_size, first, scores);
        for (long i = 0; i < all; i++) {
            long own = position + i % queries / group;
            long from = min(max(oldest(call, own) - block, 0), count), to = max(min(own + 1 - block, count), from);
            if (from < to) weigh(call, scores + i * KEYS, from, to, softmax + i, out + i * value_size);
            else memset(scores + i * KEYS, 0, KEYS * sizeof(float));
        }
        for (long h = 0; h < piece->heads; h++)
            add_values(scores + h * queries * KEYS, queries, values, h * value_size, count, out + h * queries * value_size, value_size, ahead);
    }
    put_out(piece, queries, softmax, out);
}

static long attention_scratch(const void *argument, long threads) { return threads * attend_floats(argument); }

static long attention_amount(const void *argument)
{
    const Attention *call = argument;
    long amount = 0;
    for (long row = 0; row < call->rows; row++)
        amount += (long)(call->query_start[row + 1] - call->query_start[row]) * call->seq_lens[row];
    return amount * call->heads * (call->head_dim + call->value_dim);
}

// The attention of every token, after `prepare`. Rows with many queries are cut into tokens and heads. Rows with few are cut into heads
// only as far as threads need it: heads that are read together are read from memory in one stream.
static void attention(const void *argument, const Worker *worker)
{
    const Attention *call = argument;
    float *scratch = worker->scratch + worker->thread * attend_floats(call);
    long together = worker->threads == 1 ? call->kv_heads : min(max(call->kv_heads * call->rows / (2 * worker->threads), 1), call->kv_heads);
    long row = 0, row_piece = 0, most = most_tokens(call); // a thread's pieces come in ascending order
    for (long number; row < call->rows && (number = take(worker), 1);) {
        long heads = 1, cuts = 1;
        for (; row < call->rows; row++) {
            long queries = call->query_start[row + 1] - call->query_start[row];
            heads = queries * group_of(call) < MANY && !call->fixed ? together : 1;
            cuts = (call->kv_heads + heads - 1) / heads;
            long pieces = (queries + most - 1) / most * cuts;
            if (number < row_piece + pieces) break;
            row_piece += pieces;
        }
        if (row == call->rows) break;
        long first = call->query_start[row] + (number - row_piece) / cuts * most, head = (number - row_piece) % cuts * heads;
        Piece piece = {call, row, head, min(heads, call->kv_heads - head), first, min(first + most, call->query_start[row + 1])};
        attend(&piece, scratch);
    }
    if (worker->thread == 0) {
        long covered = call->query_start[call->rows], token = call->heads * call->value_dim;
        memset(call->out + covered * token, 0, (call->tokens - covered) * token * sizeof(float));
    }
    meet(worker);
}
