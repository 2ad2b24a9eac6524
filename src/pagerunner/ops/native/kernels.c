#include "common.h"
#include "products.h"
#include "attention.h"
#include "small.h"
#include "mixture.h"
#include "latent.h"
#include "recurrent.h"
#include "suffix.h"

// Commands stand one behind another: a header, then the command's structure. Sizes are multiples of 8.
typedef struct {
    long kind, bytes; // of the structure
} Header;

typedef struct {
    long bytes; // of its structure
    void (*work)(const void *argument, const Worker *worker);
    long (*amount)(const void *argument);                // multiplications, about
    long (*scratch)(const void *argument, long threads); // floats; NULL: none
} Kind;

static const Kind kinds[] = { // in the order of the numbers in calls.py
    {sizeof(Product), product, product_amount, product_scratch},
    {sizeof(Attention), prepare, prepare_amount, NULL},
    {sizeof(Attention), attention, attention_amount, attention_scratch},
    {sizeof(Rows), rows, rows_amount, NULL},
    {sizeof(Angles), angles, angles_amount, NULL},
    {sizeof(Norm), norm, norm_amount, NULL},
    {sizeof(Step), step, step_amount, NULL},
    {sizeof(Greedy), greedy, greedy_amount, NULL},
    {sizeof(Rotate), rotate, rotate_amount, NULL},
    {sizeof(Map), map, map_amount, NULL},
    {sizeof(Logits), logits, logits_amount, NULL},
    {sizeof(Route), route, route_amount, route_scratch},
    {sizeof(Experts), experts, experts_amount, experts_scratch},
    {sizeof(HeadProduct), head_product, head_product_amount, NULL},
    {sizeof(LatentHeads), latent_heads, latent_heads_amount, NULL},
    {sizeof(Temper), temper, temper_amount, NULL},
    {sizeof(Convolution), convolution, convolution_amount, NULL},
    {sizeof(Delta), delta, delta_amount, delta_scratch},
    {sizeof(Mamba), mamba, mamba_amount, NULL},
    {sizeof(Gate), gates, gate_amount, NULL},
    {sizeof(Copy), copy, copy_amount, NULL},
};

typedef struct {
    const char *commands;
    long bytes;
    float *scratch;
    Team *team;
} Call;

// Functions of the OpenMP runtime that torch has loaded; NULL: one thread. `pagerunner_init` sets them.
static void (*gomp_parallel)(void (*region)(void *), void *argument, unsigned threads, unsigned flags);
static int (*omp_thread)(void);
static int (*omp_threads)(void);

static void work(const Call *call, int thread, int threads)
{
    Worker worker = {call->team, thread, threads, call->scratch, 0};
    for (const char *at = call->commands; at < call->commands + call->bytes;) {
        const Header *header = (const Header *)at;
        const void *argument = header + 1;
        worker.number++;
        kinds[header->kind].work(argument, &worker);
        at += sizeof *header + header->bytes;
    }
}

static void region(void *call) { work(call, omp_thread(), omp_threads()); }

enum { SHARE = 1 << 16 }; // multiplications of a command, on average, that are worth a thread; about 20 microseconds

// Threads that the commands are worth, at most `most`.
long pagerunner_threads(const char *commands, long bytes, long most)
{
    if (!gomp_parallel || most == 1) return 1;
    long amount = 0, count = 0;
    for (const char *at = commands; at < commands + bytes; count++) {
        const Header *header = (const Header *)at;
        amount += kinds[header->kind].amount(header + 1);
        at += sizeof *header + header->bytes;
    }
    return max(1, min(most, amount / max(count, 1) / SHARE));
}

// Floats of memory that the commands work in, with so many threads.
long pagerunner_scratch(const char *commands, long bytes, long threads)
{
    long most = 0;
    for (const char *at = commands; at < commands + bytes;) {
        const Header *header = (const Header *)at;
        if (kinds[header->kind].scratch) most = max(most, kinds[header->kind].scratch(header + 1, threads));
        at += sizeof *header + header->bytes;
    }
    return most;
}

// Run the commands one after another. Returns the number of one that was given what it can't use, from 1 on; 0: there is none.
long pagerunner_run(const char *commands, long bytes, float *scratch, long threads)
{
    Team team = {0};
    Call call = {commands, bytes, scratch, &team};
    if (threads == 1) work(&call, 0, 1);
    else gomp_parallel(region, &call, threads, 0);
    return team.failed;
}

// Bytes of the structure of a command; 0: there is no such kind.
long pagerunner_bytes(long kind)
{
    return kind < 0 || kind >= (long)(sizeof kinds / sizeof *kinds) ? 0 : kinds[kind].bytes;
}

int pagerunner_init(void *parallel, void *thread, void *threads)
{
    gomp_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    omp_thread = (int (*)(void))thread;
    omp_threads = (int (*)(void))threads;
    return LANES;
}
