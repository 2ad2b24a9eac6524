// What stands around products and attention: rows of a table, rotary angles, norms.

typedef struct {
    const float *matrix; // [V, D]; with panels [ceil(V / PANEL), D, PANEL]
    const int64_t *ids;  // [T]
    float *out;          // [T, D]
    long tokens, rows, features, stride; // stride: of a plain matrix's rows; 0: the matrix is in panels
} Rows;

static long rows_amount(const void *argument)
{
    const Rows *call = argument;
    return call->tokens * call->features;
}

// Rows `ids` of a matrix. A number that isn't in [0, V) fails the command.
static void rows(const void *argument, const Worker *worker, long number)
{
    const Rows *call = argument;
    for (long t; (t = take(worker)) < call->tokens;) {
        int64_t id = call->ids[t];
        float *to = call->out + t * call->features;
        if (id < 0 || id >= call->rows) {
            __atomic_store_n(&worker->team->failed, number, __ATOMIC_RELAXED);
            memset(to, 0, call->features * sizeof(float)); // the caller raises; others may still read this
        } else if (call->stride) {
            memcpy(to, call->matrix + id * call->stride, call->features * sizeof(float));
        } else {
            const float *from = call->matrix + id / PANEL * call->features * PANEL + id % PANEL;
            for (long d = 0; d < call->features; d++) to[d] = from[d * PANEL];
        }
    }
    meet(worker);
}

typedef struct {
    const int64_t *positions; // [T]
    const float *frequencies; // [D / 2]
    float *cos, *sin;         // [T, D]
    long tokens, half;
    float scale;
} Angles;

static long angles_amount(const void *argument)
{
    const Angles *call = argument;
    return call->tokens * call->half * 64;
}

static void angles(const void *argument, const Worker *worker)
{
    const Angles *call = argument;
    for (long t; (t = take(worker)) < call->tokens;)
        for (long d = 0, half = call->half; d < half; d++) {
            float angle = (float)call->positions[t] * call->frequencies[d];
            float cos = cosf(angle) * call->scale, sin = sinf(angle) * call->scale;
            float *to_cos = call->cos + 2 * t * half + d, *to_sin = call->sin + 2 * t * half + d;
            to_cos[0] = to_cos[half] = cos;
            to_sin[0] = -sin;
            to_sin[half] = sin;
        }
    meet(worker);
}

typedef struct {
    const float *x, *weight; // [T, D], [D]
    float *out;              // [T, D]
    long tokens, features, x_stride;
    float eps;
    int offset; // the weight counts from 1
} Norm;

static long norm_amount(const void *argument)
{
    const Norm *call = argument;
    return call->tokens * call->features * 4;
}

static void norm(const void *argument, const Worker *worker)
{
    const Norm *call = argument;
    for (long t; (t = take(worker)) < call->tokens;)
        rms_norm(call->x + t * call->x_stride, call->weight, call->eps, call->offset, call->features, call->out + t * call->features);
    meet(worker);
}
