// What stands around attention over latents (MLA), as ops/latent_heads.py defines it. Queries that are carried into the latent space have one
// shared key and value head there: the vectors in the pages. So attention itself is that of attention.h.
//
// Shape letters: T tokens, H heads, N elements of a query without rotary position, P rotary ones, C elements of a latent, L of a vector
// (C + P), I inputs and O outputs of a head.

typedef struct {
    const float *x, *weight; // [T, H, I]; of each head [O, I], or [I, O] if `by_inputs`
    float *out;              // [T, H, O]
    long tokens, heads, inputs, outputs, x_stride, x_head, out_stride, out_head, weight_head;
    int by_inputs, unused;
} HeadProduct;

static long head_product_amount(const void *argument)
{
    const HeadProduct *call = argument;
    return call->tokens * call->heads * call->inputs * call->outputs;
}

// out = the sum over rows of x[row] * weight[row]. Four rows at a time: memory is read from beginning to end, once for all tokens.
static void sum_of_rows(const HeadProduct *call, long head)
{
    const float *x = call->x + head * call->x_head, *weight = call->weight + head * call->weight_head;
    float *out = call->out + head * call->out_head;
    long size = call->outputs, row = 0;
    for (long t = 0; t < call->tokens; t++) memset(out + t * call->out_stride, 0, size * sizeof(float));
    for (; row + 4 <= call->inputs; row += 4) {
        const float *a = weight + row * size, *b = a + size, *c = b + size, *d = c + size;
        for (long t = 0; t < call->tokens; t++) {
            const float *by = x + t * call->x_stride + row;
            float *to = out + t * call->out_stride;
            for (long o = 0; o < size; o++) to[o] += (by[0] * a[o] + by[1] * b[o]) + (by[2] * c[o] + by[3] * d[o]);
        }
    }
    for (; row < call->inputs; row++)
        for (long t = 0; t < call->tokens; t++) {
            float by = x[t * call->x_stride + row], *to = out + t * call->out_stride;
            for (long o = 0; o < size; o++) to[o] += by * weight[row * size + o];
        }
}

// out[row] = x . weight[row], four rows at a time.
static void dots_of_rows(const HeadProduct *call, long head)
{
    const float *weight = call->weight + head * call->weight_head;
    long size = call->inputs, last = call->outputs - 1;
    for (long row = 0; row <= last; row += 4) {
        const float *rows[4];
        float found[4];
        for (long j = 0; j < 4; j++) rows[j] = weight + min(row + j, last) * size;
        for (long t = 0; t < call->tokens; t++) {
            dots_1(call->x + t * call->x_stride + head * call->x_head, rows, 0, size, found);
            memcpy(call->out + t * call->out_stride + head * call->out_head + row, found, min(4, last + 1 - row) * sizeof(float));
        }
    }
}

// Every head's product with its own matrix.
static void head_product(const void *argument, const Worker *worker)
{
    const HeadProduct *call = argument;
    for (long head; (head = take(worker)) < call->heads;) call->by_inputs ? sum_of_rows(call, head) : dots_of_rows(call, head);
    meet(worker);
}

typedef struct {
    const float *q;    // [T, H, N + P], heads one behind another
    float *vectors;    // [T, L]
    float *pages;      // slot s of entry e: pages + e * entry_stride + s * L
    float *out;        // [T, H, L]: its last P elements are filled
    const float *norm; // [C]; NULL: queries and vectors are ready
    const float *cos, *sin;                    // [T, P], with a norm
    const int64_t *write_entry, *write_offset; // [T]
    long tokens, heads, key_dim, rope_dim, latent_dim, q_stride, vector_stride, entry_stride;
    float eps;
    int adjacent; // pairs of rotary elements are neighbours
} LatentHeads;

static long latent_heads_amount(const void *argument)
{
    const LatentHeads *call = argument;
    return call->tokens * (call->heads * call->rope_dim + call->latent_dim) * 8;
}

static void latent_token(const LatentHeads *call, long t)
{
    long latent = call->latent_dim, rope = call->rope_dim, size = latent + rope, head = call->key_dim + rope;
    const float *cos = call->cos + t * rope, *sin = call->sin + t * rope;
    float *vector = call->vectors + t * call->vector_stride;
    if (call->norm) {
        rms_norm(vector, call->norm, call->eps, 0, latent, vector);
        turn(vector + latent, cos, sin, rope, call->adjacent);
    }
    for (long h = 0; h < call->heads; h++) {
        float *to = call->out + (t * call->heads + h) * size + latent;
        memcpy(to, call->q + t * call->q_stride + h * head + call->key_dim, rope * sizeof(float));
        if (call->norm) turn(to, cos, sin, rope, call->adjacent);
    }
    int64_t entry = call->write_entry[t];
    if (entry >= 0) memcpy(call->pages + entry * call->entry_stride + call->write_offset[t] * size, vector, size * sizeof(float));
}

// Norm and rotate vectors in place and store them in pages; rotate queries into `out`.
static void latent_heads(const void *argument, const Worker *worker)
{
    const LatentHeads *call = argument;
    for (long t; (t = take(worker)) < call->tokens;) latent_token(call, t);
    meet(worker);
}
