// Vectors, memory and threads of the CPU kernels. Plain C with the vector extensions of GCC and Clang; numbers are float32.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

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

// A vector that several operations read is loaded once for all of them. Compilers would rather read it from memory in each.
#if defined(__SSE__)
#define IN_REGISTER(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define IN_REGISTER(x) __asm__("" : "+w"(x))
#else
#define IN_REGISTER(x) (void)0
#endif

typedef float Quarter __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (Places){i, j, k, l})
#endif

INLINE Quarter folded(Vector x)
{
    Quarter parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
#if LANES == 16
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
#elif LANES == 8
    return parts[0] + parts[1];
#else
    return parts[0];
#endif
}

// In a tree: additions one after another would take longer than the products that are summed.
INLINE float sum_of(Vector x)
{
    Quarter sum = folded(x);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// The sums of four vectors.
INLINE Quarter sums_of(const Vector *x)
{
    Quarter a = folded(x[0]), b = folded(x[1]), c = folded(x[2]), d = folded(x[3]);
    Quarter ab = SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7), cd = SHUFFLE(c, d, 0, 4, 2, 6) + SHUFFLE(c, d, 1, 5, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
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

// tanh(x) with a relative error below 3e-7: up to 0.625 a polynomial (Cephes' tanhf), above 1 - 2 / (exp(2 |x|) + 1) with the sign of x.
// NaN for NaN.
INLINE Vector tanh_of(Vector x)
{
    Integers sign = (Integers)x & (Integers)splat(-0.0f);
    Vector size = (Vector)((Integers)x ^ sign), square = x * x;
    Vector p = splat(-5.70498872745e-3f);
    p = p * square + 2.06390887954e-2f;
    p = p * square + -5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square + -3.33332819422e-1f;
    Vector small = p * square * size + size, large = 1.0f - 2.0f / (exp_of(size + size) + 1.0f);
    Integers is_small = size < splat(0.625f);
    return (Vector)((((Integers)small & is_small) | ((Integers)large & ~is_small)) ^ sign);
}

// gate = silu(gate) * up. Both have room for whole vectors.
static void silu_times(float *gate, const float *up, long count)
{
    for (long i = 0; i < count; i += LANES) {
        Vector x = load(gate + i);
        store(gate + i, x / (1.0f + exp_of(-x)) * load(up + i));
    }
}

INLINE float dot(const float *x, const float *y, long count)
{
    Vector sum = splat(0.0f);
    long i = 0;
    for (; i + LANES <= count; i += LANES) sum += load(x + i) * load(y + i);
    float rest = sum_of(sum);
    for (; i < count; i++) rest += x[i] * y[i];
    return rest;
}

INLINE float inverse_rms(const float *x, long count, float eps) { return 1.0f / sqrtf(dot(x, x, count) / count + eps); }

static void rms_norm(const float *x, const float *weight, float eps, int offset, long count, float *out)
{
    float scale = inverse_rms(x, count, eps), shift = offset ? 1.0f : 0.0f;
    for (long i = 0; i < count; i++) out[i] = x[i] * scale * (weight[i] + shift);
}

// Threads that run the same commands side by side. A command is done in phases; a phase is made of pieces, which threads take one
// after another, so that a thread that was held up takes fewer.
typedef struct {
    _Alignas(64) long next;   // piece of this phase that nobody has taken yet
    _Alignas(64) int arrived; // threads that have found no more pieces
    _Alignas(64) int phase;
    int asleep; // threads that don't spin any more
    long failed; // a command that was given what it can't use, counted from 1; 0: none
} Team;

typedef struct {
    Team *team;
    int thread, threads;
    float *scratch; // all threads'
    long number;    // of the command, from 1 on
} Worker;

INLINE long take(const Worker *worker)
{
    return worker->threads == 1 ? worker->team->next++ : __atomic_fetch_add(&worker->team->next, 1, __ATOMIC_RELAXED);
}

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() (void)0
#endif

#ifdef __linux__
static void sleep_while(int *place, int value) { syscall(SYS_futex, place, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0); }
static void wake_all(int *place) { syscall(SYS_futex, place, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }
#else
static void sleep_while(int *place, int value) { (void)place, (void)value, sched_yield(); }
static void wake_all(int *place) { (void)place; }
#endif

enum { SPINS = 1000 }; // about 20 microseconds: more than the pieces of a phase differ by, less than a neighbour's turn

// This command was given what it can't use: the caller raises.
INLINE void fail(const Worker *worker) { __atomic_store_n(&worker->team->failed, worker->number, __ATOMIC_RELAXED); }

// The end of a phase: no thread goes on before all have come.
static void meet(const Worker *worker)
{
    Team *team = worker->team;
    if (worker->threads == 1) {
        team->next = 0;
        return;
    }
    int phase = __atomic_load_n(&team->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == worker->threads) {
        team->arrived = 0;
        team->next = 0;
        __atomic_store_n(&team->phase, phase + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team->asleep, __ATOMIC_SEQ_CST)) wake_all(&team->phase);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&team->phase, __ATOMIC_ACQUIRE) != phase) return;
        PAUSE();
    }
    __atomic_add_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team->phase, __ATOMIC_SEQ_CST) == phase) sleep_while(&team->phase, phase);
    __atomic_sub_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
}
