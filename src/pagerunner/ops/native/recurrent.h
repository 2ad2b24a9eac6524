// One token of every row of a recurrence, from and into the row's state in its page: as attention/recurrent.py defines it; and the gates
// around it.
//
// Shape letters: T tokens and rows, C channels, W taps, H heads, G groups of heads that share keys, K elements of a key, V of a value, P of
// a head, N of a state.

// Where a row's state is: page `table[slot, 0]` of pages `entry_stride` apart.
typedef struct {
    float *pages;
    const int64_t *table;
    const int32_t *slots, *seq_lens; // [T]; a length of 0 is padding
    long entry_stride, table_stride;
} States;

INLINE float *state_of(const States *states, long t)
{
    return states->seq_lens[t] ? states->pages + states->table[states->slots[t] * states->table_stride] * states->entry_stride : NULL;
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

typedef struct {
    States states;                // of [W - 1, C]
    const float *x, *weight, *bias; // [T, C], [C, W], [C] or NULL
    float *out;                   // [T, C]
    long tokens, channels, taps, x_stride;
} Convolution;

enum { CHANNELS = 512 }; // of a piece

static long convolution_amount(const void *argument)
{
    const Convolution *call = argument;
    return call->tokens * call->channels * (call->taps + 16);
}

// A token's convolution with those before it, and silu. The state is what the next token sees.
static void convolution(const void *argument, const Worker *worker)
{
    const Convolution *call = argument;
    long cuts = (call->channels + CHANNELS - 1) / CHANNELS, taps = call->taps, all = call->channels;
    for (long i; (i = take(worker)) < call->tokens * cuts;) {
        long t = i / cuts, first = i % cuts * CHANNELS, count = min(CHANNELS, all - first);
        const float *x = call->x + t * call->x_stride + first, *weight = call->weight + first * taps;
        float *out = call->out + t * all + first, *state = state_of(&call->states, t), total[CHANNELS + LANES];
        memset(total, 0, sizeof total);
        for (long w = 0; state && w < taps - 1; w++) { // the oldest first, as in a prompt
            float *seen = state + w * all + first;
            for (long c = 0; c < count; c++) total[c] += seen[c] * weight[c * taps + w];
            memcpy(seen, w < taps - 2 ? seen + all : x, count * sizeof(float));
        }
        for (long c = 0; c < count; c++) total[c] += x[c] * weight[c * taps + taps - 1];
        for (long c = 0; call->bias && c < count; c++) total[c] += call->bias[first + c];
        for (long c = 0; c < count; c += LANES) {
            Vector y = load(total + c);
            store(total + c, y / (1.0f + exp_of(-y)));
        }
        memcpy(out, total, count * sizeof(float));
    }
    meet(worker);
}

typedef struct {
    States states;                       // of [H, K, V]
    const float *mixed, *rates, *decays; // [T, 2 G K + H V]: queries, keys, values; [T, H], [T, H]
    const float *decay_log, *decay_bias; // [H]
    float *out;                          // [T, H, V]
    long tokens, heads, key_heads, key_dim, value_dim, rate_stride, decay_stride;
} Delta;

static long delta_amount(const void *argument)
{
    const Delta *call = argument;
    return call->tokens * call->heads * call->key_dim * call->value_dim * 4;
}

INLINE long delta_floats(const Delta *call) { return (2 * call->key_dim + call->value_dim + 15) & ~15; }
static long delta_scratch(const void *argument, long threads) { return threads * delta_floats(argument); }

INLINE void unit_length(const float *x, long size, float scale, float *out)
{
    float by = scale / sqrtf(dot(x, x, size) + 1e-6f);
    for (long i = 0; i < size; i++) out[i] = x[i] * by;
}

// The gated delta rule: state <- fade state; d = rate (v - k state); state <- state + k d; out = q state.
static void delta_head(const Delta *call, long t, long h, float *room)
{
    long keys = call->key_dim, values = call->value_dim, group = h / (call->heads / call->key_heads), all = call->key_heads * keys;
    const float *mixed = call->mixed + t * (2 * all + call->heads * values), *v = mixed + 2 * all + h * values;
    float *q = room, *k = q + keys, *change = k + keys, *out = call->out + (t * call->heads + h) * values;
    float *state = state_of(&call->states, t);
    memset(out, 0, values * sizeof(float));
    if (!state) return;
    state += h * keys * values;
    unit_length(mixed + group * keys, keys, 1.0f / sqrtf(keys), q);
    unit_length(mixed + all + group * keys, keys, 1.0f, k);
    float rate = sigmoid(call->rates[t * call->rate_stride + h]);
    float fade = expf(-expf(call->decay_log[h]) * softplus(call->decays[t * call->decay_stride + h] + call->decay_bias[h]));
    memset(change, 0, values * sizeof(float));
    for (long i = 0; i < keys; i++)
        for (long j = 0; j < values; j++) change[j] += k[i] * state[i * values + j];
    for (long j = 0; j < values; j++) change[j] = rate * (v[j] - fade * change[j]);
    for (long i = 0; i < keys; i++) {
        float *row = state + i * values;
        for (long j = 0; j < values; j++) {
            row[j] = row[j] * fade + k[i] * change[j];
            out[j] += q[i] * row[j];
        }
    }
}

static void delta(const void *argument, const Worker *worker)
{
    const Delta *call = argument;
    float *room = worker->scratch + worker->thread * delta_floats(call);
    for (long i; (i = take(worker)) < call->tokens * call->heads;) delta_head(call, i / call->heads, i % call->heads, room);
    meet(worker);
}

typedef struct {
    States states;                                // of [H, P, N]
    const float *mixed, *steps;                   // [T, H P + 2 G N]: x, B, C; [T, H]
    const float *decay_log, *step_bias, *skip;    // [H]
    float *out;                                   // [T, H, P]
    long tokens, heads, groups, head_dim, state_size, step_stride;
} Mamba;

static long mamba_amount(const void *argument)
{
    const Mamba *call = argument;
    return call->tokens * call->heads * call->head_dim * call->state_size * 3;
}

// Mamba-2: state <- fade state + step x B; out = state C + skip x.
static void mamba_head(const Mamba *call, long t, long h)
{
    long size = call->head_dim, count = call->state_size, group = h / (call->heads / call->groups), all = call->heads * size;
    const float *mixed = call->mixed + t * (all + 2 * call->groups * count), *x = mixed + h * size;
    const float *b = mixed + all + group * count, *c = b + call->groups * count;
    float *out = call->out + (t * call->heads + h) * size, *state = state_of(&call->states, t);
    memset(out, 0, size * sizeof(float));
    if (!state) return;
    float step = softplus(call->steps[t * call->step_stride + h] + call->step_bias[h]), fade = expf(-expf(call->decay_log[h]) * step);
    state += h * size * count;
    for (long p = 0; p < size; p++, state += count) {
        float by = x[p] * step;
        for (long n = 0; n < count; n++) state[n] = state[n] * fade + by * b[n];
        out[p] = dot(state, c, count) + x[p] * call->skip[h];
    }
}

static void mamba(const void *argument, const Worker *worker)
{
    const Mamba *call = argument;
    for (long i; (i = take(worker)) < call->tokens * call->heads;) mamba_head(call, i / call->heads, i % call->heads);
    meet(worker);
}

enum { NORM_THEN_SILU, SILU_THEN_NORM, SIGMOID_TIMES, ADD_SIGMOID_TIMES }; // as in native/recurrent.py

typedef struct {
    const float *x, *gate, *weight; // [T, H, D], [T, H, D] or [T, H, 1] for a sum, [D] or NULL
    float *out;                     // [T, H, D], heads one behind another
    long tokens, heads, features, x_stride, x_head, gate_stride, gate_head, out_stride;
    float eps;
    int kind;
} Gate;

static long gate_amount(const void *argument)
{
    const Gate *call = argument;
    return call->tokens * call->heads * call->features * 16;
}

INLINE Vector sigmoids(Vector x) { return 1.0f / (1.0f + exp_of(-x)); }

static void gate_head(const Gate *call, const float *x, const float *gate, float *out)
{
    long size = call->features, d = 0;
    int norm_last = call->kind == SILU_THEN_NORM, silu = call->kind != SIGMOID_TIMES;
    if (call->kind == ADD_SIGMOID_TIMES) {
        float by = sigmoid(gate[0]);
        for (; d < size; d++) out[d] += x[d] * by;
        return;
    }
    if (call->kind == NORM_THEN_SILU) rms_norm(x, call->weight, call->eps, 0, size, out), x = out;
    for (; d + LANES <= size; d += LANES) {
        Vector by = sigmoids(load(gate + d));
        store(out + d, load(x + d) * (silu ? load(gate + d) * by : by));
    }
    for (; d < size; d++) {
        float by = sigmoids(splat(gate[d]))[0];
        out[d] = x[d] * (silu ? gate[d] * by : by);
    }
    if (norm_last) rms_norm(out, call->weight, call->eps, 0, size, out);
}

static void gates(const void *argument, const Worker *worker)
{
    const Gate *call = argument;
    for (long i; (i = take(worker)) < call->tokens * call->heads;) {
        long t = i / call->heads, h = i % call->heads;
        const float *x = call->x + t * call->x_stride + h * call->x_head, *gate = call->gate + t * call->gate_stride + h * call->gate_head;
        gate_head(call, x, gate, call->out + t * call->out_stride + h * call->features);
    }
    meet(worker);
}

typedef struct {
    const float *from; // [T, H, D], all apart
    float *to;         // [T, H * D]
    long tokens, heads, features, from_stride, from_head, to_stride;
} Copy;

static long copy_amount(const void *argument)
{
    const Copy *call = argument;
    return call->tokens * call->heads * call->features;
}

static void copy(const void *argument, const Worker *worker)
{
    const Copy *call = argument;
    for (long t; (t = take(worker)) < call->tokens;)
        for (long h = 0; h < call->heads; h++)
            memcpy(
                call->to + t * call->to_stride + h * call->features, call->from + t * call->from_stride + h * call->from_head,
                call->features * sizeof(float));
    meet(worker);
}
