// Vectors, memory and threads of the CPU kernels. Plain C with the vector extensions of GCC and Clang; numbers are float32.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef Vector Unaligned __attribute__((aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE long min(long a, long b) { return a < b ? a : b; }
INLINE long max(long a, long b) { return a > b ? a : b; }
INLINE Vector load(const float *from) { return *(const Unaligned *)from; }
INLINE void store(float *to, Vector x) { *(Unaligned *)to = x; }
INLINE Vector splat(float x) { return x - (Vector){0}; } // not +: that changes -0

typedef float Quarter __attribute__((vector_size(16)));

// In a tree: additions one after another would take longer than the products that are summed.
INLINE float sum_of(Vector x)
{
    Quarter parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
#if LANES == 16
    Quarter sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
#elif LANES == 8
    Quarter sum = parts[0] + parts[1];
#else
    Quarter sum = parts[0];
#endif
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// exp(x) with a relative error below 2e-7: x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial in r (Cephes' expf). 0 below -87,
// infinity above 88.38, where n is 128: there 2^n is infinity. NaN for NaN.
INLINE Vector exp_of(Vector x)
{
    Vector low = splat(-87.0f), high = splat(89.0f);
    Integers under = x < low, over = x > high;
    Vector y = (Vector)(((Integers)x & ~under) | ((Integers)low & under));
    y = (Vector)(((Integers)y & ~over) | ((Integers)high & over));
    Vector shift = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer
    Vector n = (y * 1.44269504088896341f + shift) - shift;
    Vector r = y - n * 0.693359375f + n * 2.12194440e-4f;
    Vector p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
    return (Vector)((Integers)(p * (Vector)power) & ~under);
}

// gate = silu(gate) * up. Both have room for whole vectors.
static void silu_times(float *gate, const float *up, long count)
{
    for (long i = 0; i < count; i += LANES) {
        Vector x = load(gate + i);
        store(gate + i, x / (1.0f + exp_of(-x)) * load(up + i));
    }
}

INLINE float inverse_rms(const float *x, long count, float eps)
{
    Vector sum = splat(0.0f);
    long i = 0;
    for (; i + LANES <= count; i += LANES) sum += load(x + i) * load(x + i);
    float rest = sum_of(sum);
    for (; i < count; i++) rest += x[i] * x[i];
    return 1.0f / sqrtf(rest / count + eps);
}

static void rms_norm(const float *x, const float *weight, float eps, int offset, long count, float *out)
{
    float scale = inverse_rms(x, count, eps), shift = offset ? 1.0f : 0.0f;
    for (long i = 0; i < count; i++) out[i] = x[i] * scale * (weight[i] + shift);
}

// Memory of the calling thread that lasts until its next call for the same place: `count` floats.
static float *scratch(int place, size_t count)
{
    static __thread float *held[3];
    static __thread size_t sizes[3];
    if (sizes[place] < count) {
        size_t bytes = (count * sizeof(float) + 4095) & ~(size_t)4095;
        free(held[place]);
        held[place] = aligned_alloc(4096, bytes);
        if (!held[place]) abort();
        sizes[place] = bytes / sizeof(float);
    }
    return held[place];
}

typedef void (*Work)(void *argument, int thread, int threads);
typedef void (*Region)(void *argument);

// Functions of the OpenMP runtime that torch has loaded; NULL: one thread. `pagerunner_init` sets them.
static void (*gomp_parallel)(Region region, void *argument, unsigned threads, unsigned flags);
static int (*omp_max_threads)(void);
static int (*omp_thread)(void);
static int (*omp_threads)(void);

typedef struct {
    Work work;
    void *argument;
} Share;

static void run_share(void *argument)
{
    Share *share = argument;
    share->work(share->argument, omp_thread(), omp_threads());
}

enum { WORTH_A_THREAD = 1 << 16 }; // multiplications, below which a second thread has hardly begun when all is done

// Run `work` in as many threads as the caller's OpenMP operators take; in one if `amount` is small.
static void in_threads(Work work, void *argument, long amount)
{
    if (!gomp_parallel || amount < WORTH_A_THREAD || omp_max_threads() == 1) {
        work(argument, 0, 1);
        return;
    }
    Share share = {work, argument};
    gomp_parallel(run_share, &share, 0, 0);
}

int pagerunner_init(void *parallel, void *most, void *thread, void *threads)
{
    gomp_parallel = (void (*)(Region, void *, unsigned, unsigned))parallel;
    omp_max_threads = (int (*)(void))most;
    omp_thread = (int (*)(void))thread;
    omp_threads = (int (*)(void))threads;
    return LANES;
}
