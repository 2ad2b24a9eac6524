// Products of tokens with a matrix that is stored in panels.
//
// A panel holds PANEL output features of a matrix [O, I]: for each input feature the PANEL weights that multiply it, one after another.
// So a product reads a panel from beginning to end, once, and PANEL sums stay in registers.
//
// Shape letters: T tokens, I input features, O output features.

#define VECTORS 2 // of a panel's row
#define PANEL (VECTORS * LANES)

// Tokens whose sums are in registers at once: TOKENS * VECTORS sums, the panel's row, and one number of x.
#if LANES == 16
#define TOKENS 12
#else
#define TOKENS 6
#endif

enum { BLOCK = 384, TILES = 192 / TOKENS }; // input features and tiles of x that stay in a cache together

typedef struct {
    const float *x;       // [T, I]
    const float *panels;  // [ceil(O / PANEL), I, PANEL]
    const float *bias;    // [O], or NULL
    float *out;           // [T, O]; [T, O / 2] with a gate
    const float *norm;    // [I]: multiplies x / rms(x); or NULL
    long tokens, inputs, outputs, x_stride, out_stride;
    float eps;
    int offset; // the norm's weight counts from 1
    int add;    // add to out
    int gate;   // silu(first half) * second half
} Product;

// Tokens are taken in tiles of at most TOKENS, which are about equally large: 32 tokens in tiles of 6, 6, 5, 5, 5, 5. A tile of M tokens
// is stored by input feature: M numbers for each.
INLINE long tiles_of(long tokens) { return (tokens + TOKENS - 1) / TOKENS; }
INLINE long tile_begin(long tokens, long tile) { return tile * tokens / tiles_of(tokens); }

static void put_in_tile(const float *x, long count, long place, long size, float *tile)
{
    for (long k = 0; k < count; k++) tile[k * size + place] = x[k];
}

// acc[m][p] = the sum over k of x[k][m] * w[p][k], added to what is there unless `begin`. M tokens, P panels.
#define DEFINE_TILE(M, P)                                                                                                       \
    INLINE void tile_##M##_##P(                                                                                                 \
        const float *x, const float *w, long panel_step, long count, float *acc, long acc_stride, int begin)                    \
    {                                                                                                                           \
        Vector sum[M][P * VECTORS];                                                                                             \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)                                                                    \
            _Pragma("GCC unroll 16") for (int v = 0; v < P * VECTORS; v++)                                                      \
                sum[m][v] = begin ? splat(0.0f) : load(acc + m * acc_stride + v * LANES);                                       \
        for (long k = 0; k < count; k++) {                                                                                      \
            Vector row[P * VECTORS];                                                                                            \
            _Pragma("GCC unroll 16") for (int v = 0; v < P * VECTORS; v++)                                                      \
                row[v] = load(w + (v / VECTORS) * panel_step + (v % VECTORS) * LANES);                                          \
            _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) {                                                              \
                Vector one = splat(x[m]);                                                                                       \
                _Pragma("GCC unroll 16") for (int v = 0; v < P * VECTORS; v++) sum[m][v] += one * row[v];                       \
            }                                                                                                                   \
            x += M;                                                                                                             \
            w += PANEL;                                                                                                         \
        }                                                                                                                       \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)                                                                    \
            _Pragma("GCC unroll 16") for (int v = 0; v < P * VECTORS; v++)                                                      \
                store(acc + m * acc_stride + v * LANES, sum[m][v]);                                                             \
    }

DEFINE_TILE(1, 4)
DEFINE_TILE(1, 1)
DEFINE_TILE(2, 2)
DEFINE_TILE(2, 1)
DEFINE_TILE(3, 2)
DEFINE_TILE(3, 1)
DEFINE_TILE(4, 1)
DEFINE_TILE(5, 1)
DEFINE_TILE(6, 1)
#if TOKENS == 12
DEFINE_TILE(7, 1)
DEFINE_TILE(8, 1)
DEFINE_TILE(9, 1)
DEFINE_TILE(10, 1)
DEFINE_TILE(11, 1)
DEFINE_TILE(12, 1)
#endif

// A tile of `tokens` and one panel.
static void tile(long tokens, const float *x, const float *w, long count, float *acc, long acc_stride, int begin)
{
#define CASE(M)                                              \
    case M:                                                  \
        tile_##M##_1(x, w, 0, count, acc, acc_stride, begin); \
        break
    switch (tokens) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
#if TOKENS == 12
        CASE(7);
        CASE(8);
        CASE(9);
        CASE(10);
        CASE(11);
        CASE(12);
#endif
    }
#undef CASE
}

// Input features [first, first + count) of tokens [t, t + tokens), which begin and end with tiles: acc [tokens, panels * PANEL].
static void sums(
    const float *x, long all_tokens, long first_tile, long last_tile, const float *w, long inputs, long first, long count, long panels,
    float *acc, long acc_stride)
{
    int begin = first == 0;
    long panel_step = inputs * PANEL, panel = 0, start = tile_begin(all_tokens, first_tile);
    const float *from = w + first * PANEL;
    if (all_tokens <= 3) { // few sums: several panels at once hide the latency of additions, and are several streams from memory
        const float *own = x + first * all_tokens;
        for (long several = all_tokens == 1 ? 4 : 2; panel + several <= panels; panel += several) {
            const float *rows = from + panel * panel_step;
            float *to = acc + panel * PANEL;
            if (all_tokens == 1) tile_1_4(own, rows, panel_step, count, to, acc_stride, begin);
            if (all_tokens == 2) tile_2_2(own, rows, panel_step, count, to, acc_stride, begin);
            if (all_tokens == 3) tile_3_2(own, rows, panel_step, count, to, acc_stride, begin);
        }
    }
    for (; panel < panels; panel++)
        for (long i = first_tile; i < last_tile; i++) {
            long t = tile_begin(all_tokens, i), size = tile_begin(all_tokens, i + 1) - t;
            tile(
                size, x + t * inputs + first * size, from + panel * panel_step, count, acc + (t - start) * acc_stride + panel * PANEL,
                acc_stride, begin);
        }
}

typedef struct {
    const Product *call;
    const float *x; // in tiles, and normed if it is to be normed
    long panels; // those of the gate alone, with a gate
} ProductWork;

enum { PANELS = 8 }; // that a thread computes at once

// Panels [first, last) of all tokens, in pieces whose sums stay in a cache.
static void product_part(const ProductWork *work, long first, long last, float *acc)
{
    const Product *call = work->call;
    long inputs = call->inputs, halves = call->gate ? 2 : 1, half = work->panels * PANEL;
    long tiles = tiles_of(call->tokens);
    for (long i = 0; i < tiles; i += TILES) {
        long last_tile = min(i + TILES, tiles), t = tile_begin(call->tokens, i);
        long tokens = tile_begin(call->tokens, last_tile) - t, block = tokens <= 2 * TOKENS ? inputs : BLOCK;
        for (long p = first; p < last; p += PANELS) {
            long panels = min(PANELS, last - p), stride = halves * panels * PANEL;
            for (long k = 0; k < inputs; k += block)
                for (long h = 0; h < halves; h++)
                    sums(
                        work->x, call->tokens, i, last_tile, call->panels + (p + h * work->panels) * inputs * PANEL, inputs, k,
                        min(block, inputs - k), panels, acc + h * panels * PANEL, stride);
            long width = min(panels * PANEL, call->outputs / halves - p * PANEL);
            for (long j = 0; j < tokens; j++) {
                float *from = acc + j * stride, *to = call->out + (t + j) * call->out_stride + p * PANEL;
                if (call->bias)
                    for (long h = 0; h < halves; h++)
                        for (long c = 0; c < width; c++)
                            from[h * panels * PANEL + c] += call->bias[h * half + p * PANEL + c];
                if (call->gate) silu_times(from, from + panels * PANEL, width);
                if (call->add)
                    for (long c = 0; c < width; c++) to[c] += from[c];
                else
                    memcpy(to, from, width * sizeof(float));
            }
        }
    }
}

static void product_thread(void *argument, int thread, int threads)
{
    const ProductWork *work = argument;
    float *acc = scratch(1, (size_t)2 * PANELS * PANEL * min(TILES * TOKENS, work->call->tokens));
    long each = (work->panels + threads - 1) / threads;
    product_part(work, min(thread * each, work->panels), min((thread + 1) * each, work->panels), acc);
}

typedef struct {
    const Product *call;
    float *tiles;
} TilesWork;

static void tiles_thread(void *argument, int thread, int threads)
{
    const TilesWork *work = argument;
    const Product *call = work->call;
    long inputs = call->inputs, tiles = tiles_of(call->tokens), each = (tiles + threads - 1) / threads;
    float *normed = call->norm ? scratch(1, inputs) : NULL;
    for (long i = thread * each; i < min((thread + 1) * each, tiles); i++) {
        long first = tile_begin(call->tokens, i), size = tile_begin(call->tokens, i + 1) - first;
        for (long j = 0; j < size; j++) {
            const float *x = call->x + (first + j) * call->x_stride;
            if (normed) rms_norm(x, call->norm, call->eps, call->offset, inputs, normed);
            put_in_tile(normed ? normed : x, inputs, j, size, work->tiles + first * inputs);
        }
    }
}

// See Product.
void pagerunner_product(const Product *call)
{
    ProductWork work = {call, call->x, (call->outputs / (call->gate ? 2 : 1) + PANEL - 1) / PANEL};
    if (call->norm || call->tokens > 1) {
        TilesWork tiles = {call, scratch(0, (size_t)call->tokens * call->inputs)};
        in_threads(tiles_thread, &tiles, call->tokens * call->inputs * 8);
        work.x = tiles.tiles;
    }
    in_threads(product_thread, &work, call->tokens * call->inputs * call->outputs);
}
