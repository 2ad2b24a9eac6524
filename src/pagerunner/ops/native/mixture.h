// Mixtures of experts for few tokens: the router's logits, the choice of experts, and the experts themselves, as ops/routing.py and
// ops/moe.py define them.
//
// Shape letters: T tokens, D features, E experts, A active experts of a token, I an expert's inner features, P the T * A pairs of a token
// and an expert.

enum { ROUTED = 16 }; // experts whose logits a thread computes at once

typedef struct {
    const float *x, *weight, *bias; // [T, D], [E, D], [E] or NULL
    float *logits;                  // [T, E]
    long tokens, features, experts, x_stride, weight_stride;
} Logits;

static long logits_amount(const void *argument)
{
    const Logits *call = argument;
    return call->tokens * call->features * call->experts;
}

static void logits(const void *argument, const Worker *worker)
{
    const Logits *call = argument;
    long cuts = (call->experts + ROUTED - 1) / ROUTED, last = call->experts - 1;
    for (long i; (i = take(worker)) < call->tokens * cuts;) {
        long t = i / cuts, first = i % cuts * ROUTED;
        for (long e = first; e < min(first + ROUTED, call->experts); e += 4) {
            const float *rows[4];
            float found[4];
            for (long j = 0; j < 4; j++) rows[j] = call->weight + min(e + j, last) * call->weight_stride;
            dots_1(call->x + t * call->x_stride, rows, 0, call->features, found);
            for (long j = 0; j < 4 && e + j <= last; j++)
                call->logits[t * call->experts + e + j] = found[j] + (call->bias ? call->bias[e + j] : 0.0f);
        }
    }
    meet(worker);
}

enum { SOFTMAX, SIGMOID, SQRTSOFTPLUS }; // scores, as in native/mixture.py

typedef struct {
    const float *logits, *bias; // [T, E]; [E], which counts for the choice alone, or NULL
    float *weights;             // [T, A]
    int64_t *chosen;            // [T, A]
    int64_t *touched;           // [2]: experts that any token chose, and calls, are added there; or NULL
    long tokens, experts, active, groups, kept_groups;
    float factor;
    int scores, normalise;
} Route;

static long route_amount(const void *argument)
{
    const Route *call = argument;
    return call->tokens * call->experts * (call->active + 32);
}

INLINE long route_floats(const Route *call) { return (3 * call->experts + 2 * call->groups + 15) & ~15; }

static long route_scratch(const void *argument, long threads) { return threads * route_floats(argument); }

static void scores_of(const Route *call, const float *logits, float *scores)
{
    long count = call->experts;
    if (call->scores == SOFTMAX) {
        float most = -INFINITY, sum = 0.0f;
        for (long e = 0; e < count; e++) most = logits[e] > most ? logits[e] : most;
        for (long e = 0; e < count; e++) sum += scores[e] = expf(logits[e] - most);
        for (long e = 0; e < count; e++) scores[e] /= sum;
    } else if (call->scores == SIGMOID) {
        for (long e = 0; e < count; e++) scores[e] = 1.0f / (1.0f + expf(-logits[e]));
    } else {
        for (long e = 0; e < count; e++) scores[e] = sqrtf(logits[e] > 20.0f ? logits[e] : log1pf(expf(logits[e])));
    }
}

// The place of the largest of those of `count` numbers that aren't `taken`, the first of equal ones, or -1; a NaN counts as larger than any
// number, as it does in torch. -INFINITY is a number like others: taken ones are told by their flag.
static long largest(const float *x, const float *taken, long count)
{
    long best = -1;
    for (long i = 0; i < count; i++)
        if (taken[i] == 0.0f && (best < 0 || x[i] > x[best] || (x[i] != x[i] && x[best] == x[best]))) best = i;
    return best;
}

// Leave the experts of the best groups: the others' are `taken`. A group counts with its best expert, or with a bias with the sum of its
// two best ones. `groups` has room for two numbers a group.
static void keep_groups(const Route *call, const float *choice, float *taken, float *groups)
{
    long size = call->experts / call->groups;
    float *kept = groups + call->groups;
    for (long g = 0; g < call->groups; g++) {
        const float *own = choice + g * size;
        long best = largest(own, taken + g * size, size), next;
        groups[g] = own[best], kept[g] = 0.0f;
        taken[g * size + best] = 1.0f;
        if (call->bias && (next = largest(own, taken + g * size, size)) >= 0) groups[g] += own[next];
    }
    for (long i = 0; i < call->kept_groups; i++) kept[largest(groups, kept, call->groups)] = 1.0f;
    for (long e = 0; e < call->experts; e++) taken[e] = kept[e / size] == 0.0f;
}

// Add what a call touched. `seen` has room for E numbers.
static void count_touched(const Route *call, float *seen)
{
    memset(seen, 0, call->experts * sizeof(float));
    for (long p = 0; p < call->tokens * call->active; p++) {
        call->touched[0] += seen[call->chosen[p]] == 0.0f;
        seen[call->chosen[p]] = 1.0f;
    }
    call->touched[1]++;
}

static void route(const void *argument, const Worker *worker)
{
    const Route *call = argument;
    float *scores = worker->scratch + worker->thread * route_floats(call), *choice = scores + call->experts;
    float *taken = choice + call->experts;
    for (long t; (t = take(worker)) < call->tokens;) {
        const float *own = call->logits + t * call->experts;
        float *weights = call->weights + t * call->active, sum = 1e-20f;
        scores_of(call, own, scores);
        for (long e = 0; e < call->experts; e++) choice[e] = call->bias ? scores[e] + call->bias[e] : own[e];
        memset(taken, 0, call->experts * sizeof(float));
        if (call->kept_groups < call->groups) keep_groups(call, choice, taken, taken + call->experts);
        for (long a = 0; a < call->active; a++) {
            long best = largest(choice, taken, call->experts);
            call->chosen[t * call->active + a] = best;
            sum += weights[a] = scores[best];
            taken[best] = 1.0f;
        }
        for (long a = 0; a < call->active; a++) weights[a] = (call->normalise ? weights[a] / sum : weights[a]) * call->factor;
    }
    meet(worker);
    if (!call->touched) return;
    if (worker->thread == 0) count_touched(call, scores);
    meet(worker);
}

enum { SILU, CLAMPED_SWIGLU, LIMITED_SILU }; // activations

typedef struct {
    const float *x, *weights;                  // [T, D], [T, A]
    const int64_t *chosen;                     // [T, A]
    const float *gate_up, *down;               // panels of [E, 2 I, D], in two sections, and of [E, D, I]
    const float *gate_up_bias, *down_bias;     // [E, 2 I], [E, D]; NULL: none
    float *out;                                // [T, D]
    long tokens, active, experts, features, inner, x_stride, out_stride;
    float limit;
    int activation, add, weigh_inputs;
} Experts;

// What the threads share: of each expert where its pairs begin among those in the order of their experts; which pair stands where, and where
// each pair stands.
typedef struct {
    int32_t *starts, *order, *places;    // [E + 1], [P], [P]
    float *tiles, *inner, *down, *outs;  // [P, D], [P, 2 I], [P, I] in tiles, [P, D]
} Pairs;

INLINE long whole_lines(long count) { return (count + 15) & ~15; }
INLINE long pairs_of(const Experts *call) { return call->tokens * call->active; }
INLINE long pair_numbers(const Experts *call) { return whole_lines(call->experts + 1) + 2 * whole_lines(pairs_of(call)); }

static Pairs pairs_in(const Experts *call, float *memory)
{
    long pairs = pairs_of(call);
    int32_t *numbers = (int32_t *)memory, *order = numbers + whole_lines(call->experts + 1);
    float *tiles = memory + pair_numbers(call), *inner = tiles + whole_lines(pairs * call->features);
    float *down = inner + whole_lines(2 * pairs * call->inner), *outs = down + whole_lines(pairs * call->inner);
    return (Pairs){numbers, order, order + whole_lines(pairs), tiles, inner, down, outs};
}

INLINE Product product_of(const Experts *call, int down)
{
    int gate = call->activation == SILU;
    Product gate_up = {.inputs = call->features, .outputs = 2 * call->inner, .gate = gate, .sections = 2, .tokens = pairs_of(call)};
    Product behind = {.inputs = call->inner, .outputs = call->features, .sections = 1, .tokens = pairs_of(call)};
    gate_up.out_stride = gate ? call->inner : 2 * call->inner, behind.out_stride = call->features;
    return down ? behind : gate_up;
}

// Of a thread: room for a row, and sums.
INLINE long expert_floats(const Experts *call)
{
    Product most = product_of(call, 0);
    return acc_floats(&most) + whole_lines(max(call->features, call->inner));
}

static long experts_scratch(const void *argument, long threads)
{
    const Experts *call = argument;
    long pairs = pairs_of(call);
    long shared = whole_lines(2 * pairs * call->inner) + whole_lines(pairs * call->inner) + 2 * whole_lines(pairs * call->features);
    return threads * expert_floats(call) + pair_numbers(call) + shared;
}

static long experts_amount(const void *argument)
{
    const Experts *call = argument;
    return pairs_of(call) * call->inner * call->features * 3;
}

// Sort the pairs by their experts; equal ones stay in their order. Number -1 is padding: such a pair has no place. 0: a number names no expert.
static int sort_pairs(const Experts *call, const Pairs *pairs)
{
    long count = pairs_of(call), experts = call->experts;
    memset(pairs->starts, 0, (experts + 1) * sizeof(int32_t));
    for (long p = 0; p < count; p++)
        if (call->chosen[p] < -1 || call->chosen[p] >= experts) {
            memset(pairs->starts, 0, (experts + 1) * sizeof(int32_t));
            return 0;
        } else if (call->chosen[p] >= 0) {
            pairs->starts[call->chosen[p]]++;
        }
    for (long e = 0, before = 0; e <= experts; e++) {
        long own = pairs->starts[e];
        pairs->starts[e] = before, before += own;
    }
    for (long p = 0; p < count; p++) {
        pairs->places[p] = call->chosen[p] < 0 ? -1 : pairs->starts[call->chosen[p]]++;
        if (pairs->places[p] >= 0) pairs->order[pairs->places[p]] = p;
    }
    for (long e = experts; e > 0; e--) pairs->starts[e] = pairs->starts[e - 1];
    pairs->starts[0] = 0;
    return 1;
}

// A thread's way through pieces that belong to experts, in ascending order.
typedef struct {
    long expert, before; // and the pieces of all experts before
} Way;

// Whether there is a piece of this number. `first` and `count` are its expert's pairs; an expert has `each` pieces, or as many as tiles if
// that is 0. `number` is counted within the expert afterwards.
static int find_piece(const Experts *call, const Pairs *pairs, Way *way, long each, long *number, long *first, long *count)
{
    for (; way->expert < call->experts; way->expert++) {
        *first = pairs->starts[way->expert], *count = pairs->starts[way->expert + 1] - *first;
        long own = !*count ? 0 : each ? each : tiles_of(*count);
        if (*number < way->before + own) {
            *number -= way->before;
            return 1;
        }
        way->before += own;
    }
    return 0;
}

static void put_inputs(const Experts *call, const Pairs *pairs, float *room, const Worker *worker)
{
    Way way = {0, 0};
    for (long i, first, count; i = take(worker), find_piece(call, pairs, &way, 0, &i, &first, &count);) {
        long begin = tile_begin(count, i), size = tile_begin(count, i + 1) - begin;
        float *tile = pairs->tiles + (first + begin) * call->features;
        for (long j = 0; j < size; j++) {
            long pair = pairs->order[first + begin + j];
            const float *x = call->x + pair / call->active * call->x_stride;
            for (long d = 0; call->weigh_inputs && d < call->features; d++) room[d] = x[d] * call->weights[pair];
            put_in_tile(call->weigh_inputs ? room : x, call->features, j, size, tile);
        }
    }
    meet(worker);
}

// gate_up [2 I] to its first I numbers.
static void activate(const Experts *call, float *gate_up)
{
    float limit = call->limit;
    for (long i = 0; i < call->inner; i++) {
        int together = call->activation == CLAMPED_SWIGLU;
        float gate = gate_up[together ? 2 * i : i], up = gate_up[together ? 2 * i + 1 : i + call->inner];
        gate = gate > limit ? limit : gate, up = up > limit ? limit : up < -limit ? -limit : up;
        gate_up[i] = gate / (1.0f + expf(together ? -1.702f * gate : -gate)) * (together ? up + 1.0f : up);
    }
}

static void put_inner(const Experts *call, const Pairs *pairs, const Worker *worker)
{
    Way way = {0, 0};
    long stride = product_of(call, 0).out_stride;
    for (long i, first, count; i = take(worker), find_piece(call, pairs, &way, 0, &i, &first, &count);) {
        long begin = tile_begin(count, i), size = tile_begin(count, i + 1) - begin;
        for (long j = 0; j < size; j++) {
            float *row = pairs->inner + (first + begin + j) * stride;
            if (call->activation != SILU) activate(call, row);
            put_in_tile(row, call->inner, j, size, pairs->down + (first + begin) * call->inner);
        }
    }
    meet(worker);
}

static void expert_products(const Experts *call, const Pairs *pairs, int down, float *acc, const Worker *worker)
{
    Product own = product_of(call, down);
    const float *matrices = down ? call->down : call->gate_up, *bias = down ? call->down_bias : call->gate_up_bias;
    const float *x = down ? pairs->down : pairs->tiles;
    float *out = down ? pairs->outs : pairs->inner;
    long panels = section_panels(&own), few = (pairs_of(call) + call->experts - 1) / call->experts;
    Pieces pieces = pieces_of(panels, worker->threads, few);
    Way way = {0, 0};
    for (long i, first, count; i = take(worker), find_piece(call, pairs, &way, pieces.count, &i, &first, &count);) {
        own.panels = matrices + way.expert * own.sections * panels * own.inputs * PANEL;
        own.bias = bias ? bias + way.expert * own.outputs : NULL;
        own.tokens = count, own.out = out + first * own.out_stride;
        product_part(&own, x + first * own.inputs, piece_begin(&pieces, i), piece_begin(&pieces, i + 1), acc);
    }
    meet(worker);
}

// A token's experts are added up in the order of their numbers. Padding has none.
static void sum_pairs(const Experts *call, const Pairs *pairs, float *sum, const Worker *worker)
{
    long used = pairs->starts[call->experts];
    for (long t; (t = take(worker)) < call->tokens;) {
        memset(sum, 0, call->features * sizeof(float));
        long last = -1;
        for (long a = 0; used && a < call->active; a++) {
            long next = used, pair = 0;
            for (long p = t * call->active; p < (t + 1) * call->active; p++)
                if (pairs->places[p] > last && pairs->places[p] < next) next = pairs->places[p], pair = p;
            if (next == used) break;
            const float *own = pairs->outs + next * call->features;
            float weight = call->weigh_inputs ? 1.0f : call->weights[pair];
            for (long d = 0; d < call->features; d++) sum[d] += own[d] * weight;
            last = next;
        }
        float *to = call->out + t * call->out_stride;
        for (long d = 0; d < call->features; d++) to[d] = call->add ? to[d] + sum[d] : sum[d];
    }
    meet(worker);
}

static void experts(const void *argument, const Worker *worker)
{
    const Experts *call = argument;
    float *room = worker->scratch + worker->thread * expert_floats(call), *acc = room + whole_lines(max(call->features, call->inner));
    Pairs pairs = pairs_in(call, worker->scratch + worker->threads * expert_floats(call));
    if (take(worker) == 0 && !sort_pairs(call, &pairs)) fail(worker);
    meet(worker);
    put_inputs(call, &pairs, room, worker);
    expert_products(call, &pairs, 0, acc, worker);
    put_inner(call, &pairs, worker);
    expert_products(call, &pairs, 1, acc, worker);
    sum_pairs(call, &pairs, room, worker);
}
