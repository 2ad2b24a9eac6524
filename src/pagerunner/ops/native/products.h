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

enum { BLOCK = 256, TILES = 192 / TOKENS }; // input features and tiles of x that stay in a cache together
enum { PANELS = 8 };                        // that a thread computes at once, at most

typedef struct {
    const float *x;       // [T, I]
    const float *panels;  // of each section: [ceil(O / sections / PANEL), I, PANEL]
    const float *bias;    // [O], or NULL
    float *out;           // [T, O]; [T, O / 2] with a gate
    const float *norm;    // [I]: multiplies x / rms(x); or NULL
    long tokens, inputs, outputs, x_stride, out_stride;
    float eps;
    int offset;   // the norm's weight counts from 1
    int add;      // add to out
    int gate;     // silu(first section) * second section
    int sections; // 1 or 2 equal parts of O, each of which begins with a panel
} Product;

// Tokens are taken in tiles of at most TOKENS, which are about equally large: 32 tokens in tiles of 6, 6, 5, 5, 5, 5. A tile of M tokens
// is stored by input feature: M numbers for each.
INLINE long tiles_of(long tokens) { return (tokens + TOKENS - 1) / TOKENS; }
INLINE long tile_begin(long tokens, long tile) { return tile * tokens / tiles_of(tokens); }

static void put_in_tile(const float *x, long count, long place, long size, float *tile)
{
    for (long k = 0; k < count; k++) tile[k * size + place] = x[k];
}

// What a tile's loop fetches into a cache for the tiles behind it: rows of panels, `step` bytes at each of its rows. Beyond what is there it
// fetches nothing.
typedef struct {
    const char *rows;
    long step;
} Ahead;

enum { ROWS_AHEAD = 64 }; // of a panel, where it is read once: 4 KiB with AVX2

// acc[m][p] = the sum over k of x[k][m] * w[p][k], added to what is there unless `begin`. M tokens, P panels.
#define DEFINE_TILE(M, P)                                                                                                    \
    INLINE void tile_##M##_##P(                                                                                              \
        const float *x, const float *w, long panel_step, long count, float *acc, long acc_stride, int begin, Ahead ahead)    \
    {                                                                                                                        \
        Vector sum[M][P * VECTORS];                                                                                          \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)                                                                 \
            _Pragma("GCC unroll 16") for (int v = 0; v < P * VECTORS; v++)                                                   \
                sum[m][v] = begin ? splat(0.0f) : load(acc + m * acc_stride + v * LANES);                                    \
        for (long k = 0; k < count; k++) {                                                                                   \
            Vector row[P * VECTORS];                                                                                         \
            if (P == 1) {                                                                                                    \
                __builtin_prefetch(ahead.rows, 0, 2);                                                                        \
                ahead.rows += ahead.step;                                                                                    \
            }                                                                                                                \
            _Pragma("GCC unroll 16") for (int v = 0; v < P * VECTORS; v++) {                                                 \
                row[v] = load(w + (v / VECTORS) * panel_step + (v % VECTORS) * LANES);                                       \
                IN_REGISTER(row[v]);                                                                                         \
            }                                                                                                                \
            _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) {                                                           \
                Vector one = splat(x[m]);                                                                                    \
                _Pragma("GCC unroll 16") for (int v = 0; v < P * VECTORS; v++) sum[m][v] += one * row[v];                    \
            }                                                                                                                \
            x += M;                                                                                                          \
            w += PANEL;                                                                                                      \
        }                                                                                                                    \
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++)                                                                 \
            _Pragma("GCC unroll 16") for (int v = 0; v < P * VECTORS; v++)                                                   \
                store(acc + m * acc_stride + v * LANES, sum[m][v]);                                                          \
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
static void tile(long tokens, const float *x, const float *w, long count, float *acc, long acc_stride, int begin, Ahead ahead)
{
#define CASE(M)                                                     \
    case M:                                                         \
        tile_##M##_1(x, w, 0, count, acc, acc_stride, begin, ahead); \
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
    Ahead none = {0};
    int begin = first == 0;
    long panel_step = inputs * PANEL, panel = 0, start = tile_begin(all_tokens, first_tile);
    const float *from = w + first * PANEL;
    if (all_tokens <= 3) { // few sums: several panels at once hide the latency of additions, and are several streams from memory
        const float *own = x + first * all_tokens;
        for (long several = all_tokens == 1 ? 4 : 2; panel + several <= panels; panel += several) {
            const float *rows = from + panel * panel_step;
            float *to = acc + panel * PANEL;
            if (all_tokens == 1) tile_1_4(own, rows, panel_step, count, to, acc_stride, begin, none);
            if (all_tokens == 2) tile_2_2(own, rows, panel_step, count, to, acc_stride, begin, none);
            if (all_tokens == 3) tile_3_2(own, rows, panel_step, count, to, acc_stride, begin, none);
        }
    }
    long tiles = last_tile - first_tile;
    for (; panel < panels; panel++)
        for (long i = first_tile; i < last_tile; i++) {
            long t = tile_begin(all_tokens, i), size = tile_begin(all_tokens, i + 1) - t;
            const float *own = x + t * inputs + first * size, *rows = from + panel * panel_step;
            long step = PANEL * sizeof(float) / tiles;
            Ahead ahead = {(const char *)(tiles == 1 ? rows + ROWS_AHEAD * PANEL : rows + panel_step) + (i - first_tile) * count * step, step};
            tile(size, own, rows, count, acc + (t - start) * acc_stride + panel * PANEL, acc_stride, begin, ahead);
        }
}

INLINE long section_panels(const Product *call) { return (call->outputs / call->sections + PANEL - 1) / PANEL; }

// Panels [first, last) of each section, for all tokens, in pieces whose sums stay in a cache. `x` is in tiles, and normed.
static void product_part(const Product *call, const float *x, long first, long last, float *acc)
{
    long inputs = call->inputs, sections = call->sections, section = call->outputs / sections, all = section_panels(call);
    long tiles = tiles_of(call->tokens), panels = last - first, stride = sections * panels * PANEL;
    long width = min(panels * PANEL, section - first * PANEL);
    for (long i = 0; i < tiles; i += TILES) {
        long last_tile = min(i + TILES, tiles), t = tile_begin(call->tokens, i);
        long tokens = tile_begin(call->tokens, last_tile) - t, block = tokens <= 2 * TOKENS ? inputs : BLOCK;
        for (long k = 0; k < inputs; k += block)
            for (long s = 0; s < sections; s++)
                sums(
                    x, call->tokens, i, last_tile, call->panels + (first + s * all) * inputs * PANEL, inputs, k,
                    min(block, inputs - k), panels, acc + s * panels * PANEL, stride);
        for (long j = 0; j < tokens; j++) {
            float *from = acc + j * stride, *to = call->out + (t + j) * call->out_stride + first * PANEL;
            for (long s = 0; call->bias && s < sections; s++)
                for (long c = 0; c < width; c++)
                    from[s * panels * PANEL + c] += call->bias[s * section + first * PANEL + c];
            if (call->gate) silu_times(from, from + panels * PANEL, width);
            for (long s = 0; s < (call->gate ? 1 : sections); s++) {
                const float *own = from + s * panels * PANEL;
                if (call->add)
                    for (long c = 0; c < width; c++) to[s * section + c] += own[c];
                else
                    memcpy(to + s * section, own, width * sizeof(float));
            }
        }
    }
}

// Tokens of one tile, normed if they are to be. `normed` has room for a token.
static void fill_tile(const Product *call, long first, long size, float *tile, float *normed)
{
    for (long j = 0; j < size; j++) {
        const float *x = call->x + (first + j) * call->x_stride;
        float *out = size == 1 ? tile : normed;
        if (call->norm) rms_norm(x, call->norm, call->eps, call->offset, call->inputs, out);
        if (size > 1) put_in_tile(call->norm ? normed : x, call->inputs, j, size, tile);
        else if (!call->norm) memcpy(tile, x, call->inputs * sizeof(float));
    }
}

// How threads share the panels of a section: first `large` pieces, and at the end small ones, so that no thread waits long for the last.
typedef struct {
    long panels, size, large, small, count; // panels of a large piece, large pieces, panels of a small piece, all pieces
} Pieces;

// A large piece has few panels where each thread gets several pieces then, but what one thread computes at once for one token.
INLINE Pieces pieces_of(long panels, long threads, long tokens)
{
    long size = min(PANELS, max(4, panels / (threads * 4) / 4 * 4)), small = threads == 1 ? size : tokens <= 3 ? 4 : 2;
    long large = max(0, panels - threads * size) / size;
    return (Pieces){panels, size, large, small, large + (panels - large * size + small - 1) / small};
}

INLINE long piece_begin(const Pieces *pieces, long number)
{
    long large = min(number, pieces->large);
    return min(large * pieces->size + (number - large) * pieces->small, pieces->panels);
}

INLINE long acc_floats(const Product *call) { return 2 * PANELS * PANEL * min(TILES * TOKENS, call->tokens); }
INLINE long own_floats(const Product *call) { return (acc_floats(call) + (min(call->tokens, TOKENS) + 1) * call->inputs + 15) & ~15; }
INLINE int is_one_tile(const Product *call) { return call->tokens <= TOKENS; }

static long product_scratch(const void *argument, long threads)
{
    const Product *call = argument;
    return threads * own_floats(call) + (is_one_tile(call) ? 0 : call->tokens * call->inputs);
}

static long product_amount(const void *argument)
{
    const Product *call = argument;
    return call->tokens * call->inputs * call->outputs;
}

// Each thread makes a single tile for itself; many tiles are made by all threads, for all.
static void product(const void *argument, const Worker *worker)
{
    const Product *call = argument;
    Pieces pieces = pieces_of(section_panels(call), worker->threads, call->tokens);
    float *acc = worker->scratch + worker->thread * own_floats(call), *own = acc + acc_floats(call);
    float *normed = own + min(call->tokens, TOKENS) * call->inputs;
    const float *x = call->x;
    if (is_one_tile(call)) {
        if (call->tokens > 1 || call->norm) x = own, fill_tile(call, 0, call->tokens, own, normed);
    } else {
        float *tiles = worker->scratch + worker->threads * own_floats(call);
        for (long i; (i = take(worker)) < tiles_of(call->tokens);) {
            long first = tile_begin(call->tokens, i), size = tile_begin(call->tokens, i + 1) - first;
            fill_tile(call, first, size, tiles + first * call->inputs, normed);
        }
        x = tiles;
        meet(worker);
    }
    for (long i; call->tokens && (i = take(worker)) < pieces.count;)
        product_part(call, x, piece_begin(&pieces, i), piece_begin(&pieces, i + 1), acc);
    meet(worker);
}
