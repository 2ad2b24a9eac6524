// What stands around products and attention: rows of a table, rotary angles, norms, activations.

typedef struct {
    const float *matrix; // [V, D]; with panels [ceil(V / PANEL), D, PANEL]
    const int64_t *ids;  // [T]
    float *out;          // [T, D]
    long tokens, rows, features, stride; // stride: of a plain matrix's rows
    int in_panels;
} Rows;

static long rows_amount(const void *argument)
{
    const Rows *call = argument;
    return call->tokens * call->features;
}

// Rows `ids` of a matrix. A number that isn't in [0, V) fails the command.
static void rows(const void *argument, const Worker *worker)
{
    const Rows *call = argument;
    for (long t; (t = take(worker)) < call->tokens;) {
        int64_t id = call->ids[t];
        float *to = call->out + t * call->features;
        if (id < 0 || id >= call->rows) {
            fail(worker);
            memset(to, 0, call->features * sizeof(float)); // others may still read this
        } else if (!call->in_panels) {
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
    const float *x, *weight; // [T, H, D], whose heads may be apart; [D]
    float *residual, *out;   // [T, H, D]; residual: x is added there, and the norm is the sum's; or NULL
    long tokens, heads, features, x_stride, head_stride, residual_stride;
    float eps;
    int offset; // the weight counts from 1
} Norm;

static long norm_amount(const void *argument)
{
    const Norm *call = argument;
    return call->tokens * call->heads * call->features * 4;
}

static void norm(const void *argument, const Worker *worker)
{
    const Norm *call = argument;
    for (long t; (t = take(worker)) < call->tokens;)
        for (long h = 0; h < call->heads; h++) {
            const float *x = call->x + t * call->x_stride + h * call->head_stride;
            if (call->residual) {
                float *sum = call->residual + t * call->residual_stride;
                for (long d = 0; d < call->features; d++) sum[d] += x[d];
                x = sum;
            }
            float *out = call->out + (t * call->heads + h) * call->features;
            rms_norm(x, call->weight, call->eps, call->offset, call->features, out);
        }
    meet(worker);
}

typedef struct {
    float *x;               // [T, H, D]
    const float *cos, *sin; // [T, D], as `angles` makes them
    long tokens, heads, features, x_stride, head_stride;
    int adjacent, unused; // pairs are neighbours, not halves
} Rotate;

static long rotate_amount(const void *argument)
{
    const Rotate *call = argument;
    return call->tokens * call->heads * call->features * 4;
}

static void rotate(const void *argument, const Worker *worker)
{
    const Rotate *call = argument;
    for (long t; (t = take(worker)) < call->tokens;)
        for (long h = 0; h < call->heads; h++) {
            float *x = call->x + t * call->x_stride + h * call->head_stride;
            const float *cos = call->cos + t * call->features, *sin = call->sin + t * call->features;
            call->adjacent ? turn(x, cos, sin, call->features, 1) : turn(x, cos, sin, call->features, 0);
        }
    meet(worker);
}

typedef struct {
    float *x;                 // [T, D]
    const int64_t *positions; // [T]
    long tokens, features, x_stride;
    float floor, scale;
} Temper;

static long temper_amount(const void *argument)
{
    const Temper *call = argument;
    return call->tokens * call->features;
}

// x *= log(1 + floor((position + 1) / floor)) * scale + 1
static void temper(const void *argument, const Worker *worker)
{
    const Temper *call = argument;
    for (long t; (t = take(worker)) < call->tokens;) {
        float by = log1pf(floorf(((float)call->positions[t] + 1.0f) / call->floor)) * call->scale + 1.0f;
        for (long d = 0; d < call->features; d++) call->x[t * call->x_stride + d] *= by;
    }
    meet(worker);
}

enum { SILU_TIMES, GELU_TANH_TIMES, SCALE, CAP }; // as in native/small.py

typedef struct {
    const float *x; // [T, D]; with a gate [T, 2 D]: gates, then ups
    float *out;     // [T, D]
    long tokens, features, x_stride;
    float factor;
    int kind;
} Map;

static long map_amount(const void *argument)
{
    const Map *call = argument;
    return call->tokens * call->features * (call->kind == SCALE ? 1 : 16);
}

INLINE int has_gate(const Map *call) { return call->kind == SILU_TIMES || call->kind == GELU_TANH_TIMES; }

INLINE Vector mapped(const Map *call, Vector x, Vector up)
{
    if (call->kind == SCALE) return x * call->factor;
    if (call->kind == CAP) return tanh_of(x / call->factor) * call->factor;
    // gelu's tanh form is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    Vector inner = call->kind == SILU_TIMES ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_of(-inner)) * up;
}

static void map(const void *argument, const Worker *worker)
{
    const Map *call = argument;
    for (long t; (t = take(worker)) < call->tokens;) {
        const float *x = call->x + t * call->x_stride, *up = has_gate(call) ? x + call->features : x;
        float *out = call->out + t * call->features;
        long d = 0;
        for (; d + LANES <= call->features; d += LANES) store(out + d, mapped(call, load(x + d), load(up + d)));
        for (; d < call->features; d++) out[d] = mapped(call, splat(x[d]), splat(up[d]))[0];
    }
    meet(worker);
}

typedef struct {
    const int64_t *packed, *entries, *shapes;            // PackedRows; TableSet's two
    const int64_t *last_tokens, *lengths;                // SlotState: [N], [N]
    const int32_t *taken;                                // [N] accepted drafts
    const int64_t *drafts;                               // [N, num_drafts]
    int64_t *token_ids, *positions;                         // what StepTensors holds, see ops/batch.py
    int32_t *row, *slots;
    int64_t *sample_slots;
    int32_t *query_start, *seq_lens, *accepted;
    int64_t *write_entry, *write_offset;
    long rows, tokens, padded_rows, padded_tokens;       // PackedRows
    long starts_at, query_start_at, token_ids_at, rows_at; // in `packed`; the last is -1 where every row has one token
    long groups, group_stride;                           // tokens between groups in write_entry and write_offset
    long num_slots, num_entries, num_drafts;             // of SlotState, of the tables, and of a slot
} Step;

// The position of row r's first token: where the host doesn't know it, the device does.
static long first_position(const Step *call, long r)
{
    long start = call->packed[call->starts_at + r];
    return start == -1 ? call->lengths[call->packed[r]] : start;
}

static long step_amount(const void *argument)
{
    const Step *call = argument;
    return call->padded_tokens * 16;
}

// Whether the step reads and writes only what its tables and slots hold.
static int step_fits(const Step *call)
{
    const int64_t *slots = call->packed, *begins = slots + call->query_start_at, *ids = slots + call->token_ids_at;
    long last = 0;
    for (long r = 0; r < call->rows; r++) {
        if (slots[r] < 0 || slots[r] >= call->num_slots || first_position(call, r) < 0 || begins[r] < 0) return 0;
        last = max(last, slots[r]);
    }
    for (long g = 0; g < call->groups; g++) {
        const int64_t *shape = call->shapes + 3 * g;
        if (shape[0] < 0 || shape[1] < 1 || shape[2] < 1 || shape[0] + (last + 1) * shape[1] > call->num_entries) return 0;
    }
    for (long t = 0; t < call->tokens; t++) {
        long r = call->rows_at < 0 ? t : slots[call->rows_at + t];
        if (r < 0 || r >= call->rows || begins[r] > t || -1 - ids[t] > call->num_drafts) return 0;
    }
    return 1;
}

// The tensors of a step, as ops/batch.py's build_rows defines them.
static void step(const void *argument, const Worker *worker)
{
    const Step *call = argument;
    const int64_t *slots = call->packed, *begins = slots + call->query_start_at;
    const int64_t *ids = slots + call->token_ids_at, *rows = slots + call->rows_at;
    int mine = take(worker) == 0, fits = mine && step_fits(call);
    if (!fits) {
        if (mine) fail(worker);
        meet(worker);
        return;
    }
    for (long r = 0; r < call->padded_rows; r++) {
        int real = r < call->rows;
        call->slots[r] = real ? slots[r] : 0;
        call->sample_slots[r] = real ? slots[r] : -1;
        call->seq_lens[r] = real ? first_position(call, r) + begins[r + 1] - begins[r] : 0;
        call->accepted[r] = !real ? 0 : slots[call->starts_at + r] < 0 ? call->taken[slots[r]] : -1;
        call->query_start[r] = real ? begins[r] : call->tokens;
    }
    call->query_start[call->padded_rows] = call->tokens;
    for (long t = 0; t < call->padded_tokens; t++) {
        int real = t < call->tokens;
        long r = !real ? -1 : call->rows_at < 0 ? t : rows[t], position = real ? first_position(call, r) + t - begins[r] : 0;
        long id = real ? ids[t] : 0;
        if (id == -1) id = call->last_tokens[slots[r]];
        else if (id < -1) id = max(call->drafts[slots[r] * call->num_drafts - 2 - id], 0L);
        call->row[t] = r;
        call->positions[t] = position;
        call->token_ids[t] = id;
        for (long g = 0; g < call->groups; g++) {
            const int64_t *shape = call->shapes + 3 * g; // where the table begins, its width, the tokens of a page
            long page = position / shape[2], at = g * call->group_stride + t;
            call->write_entry[at] = real ? call->entries[shape[0] + slots[r] * shape[1] + page % shape[1]] : -1;
            call->write_offset[at] = position - page * shape[2];
        }
    }
    meet(worker);
}

typedef struct {
    const float *logits; // [S, V]
    int64_t *tokens;     // [S]
    float *best;         // [S]
    long rows, vocabulary, stride;
} Greedy;

static long greedy_amount(const void *argument)
{
    const Greedy *call = argument;
    return call->rows * call->vocabulary / 4;
}

// The first of the largest logits of each row, or the first NaN.
static void greedy(const void *argument, const Worker *worker)
{
    const Greedy *call = argument;
    for (long r; (r = take(worker)) < call->rows;) {
        const float *x = call->logits + r * call->stride;
        Vector most = splat(-INFINITY);
        Integers odd = {0};
        long i = 0, at = 0;
        for (; i + LANES <= call->vocabulary; i += LANES) {
            Vector own = load(x + i);
            Integers more = own > most;
            most = (Vector)(((Integers)own & more) | ((Integers)most & ~more));
            odd |= own != own;
        }
        float best = -INFINITY;
        int nan = 0;
        for (int j = 0; j < LANES; j++) best = most[j] > best ? most[j] : best, nan |= odd[j];
        for (; i < call->vocabulary; i++) best = x[i] > best ? x[i] : best, nan |= x[i] != x[i];
        while (at < call->vocabulary - 1 && (nan ? x[at] == x[at] : x[at] != best)) at++;
        call->tokens[r] = at;
        call->best[r] = x[at];
    }
    meet(worker);
}
