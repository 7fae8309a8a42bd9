// The arithmetic of HERALD's scan on the CPU: bfloat16 keys times the queries of their head, read where they lie.
//
// Compiled for the machine it runs on, when the first scan is near (host_scan_native.py). What memory delivers is the
// floor: with all cores reading, the 256 bytes of a key of 128 numbers come to a core every 44 cycles or so. Two things
// keep a compiler's own loops from it. Each dot product ends in a sum over a vector's lanes, which costs as much as its
// multiplications: here as many dot products as there are lanes are summed together, at a third of that. And the
// processor fetches nothing ahead across the end of a page: here it is told to.
//
// Measured and left out, because neither is faster where memory is the bound: tiles (AMX), and instructions that take
// bfloat16 as it is (docs/herald.md).
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

// As wide as the processor's vectors: with wider ones the sums would not stay in registers.
#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float f32s __attribute__((vector_size(LANES * 4)));
typedef uint32_t u32s __attribute__((vector_size(LANES * 4)));
typedef int32_t i32s __attribute__((vector_size(LANES * 4)));
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (i32s){__VA_ARGS__})
#endif

enum {
    LINE = 32,         // numbers in a line of the caches
    STEP = 2 * LANES,  // numbers of a key that are multiplied together: two to a lane
    MAX_DIM = 512,     // host_scan_native.py asks for no more
    TOGETHER = 8,      // queries that are multiplied together, at most
    AHEAD = 4096,      // bytes: with 16 cores at work, less is waited for and more comes too early
};

// Some consecutive keys of one head. host_scan_native.py makes these.
struct task {
    const uint16_t *keys;     // bfloat16 [count, dim]
    const uint16_t *queries;  // bfloat16 [queries, dim]
    uint16_t *scores;         // float16 [queries, >= count], rows `stride` apart
    int64_t count;
    int64_t layer;
};

struct job {
    const struct task *tasks;
    int64_t tasks_count;
    int64_t *next;   // the first task that nobody has taken
    int64_t *left;   // of each layer: tasks that are not done
    int64_t stride;  // scores from one query's to the next one's
    int32_t dim, queries;
    float scale;   // of all products
    int32_t done;  // file descriptor of a pipe: gets the number of each layer that is done, i32
};

// A vector of float32 as float16. Beyond its range they stay at its end; NaN stays NaN.
static inline void store_f16(uint16_t *out, f32s x) {
    const f32s end = (f32s){0} + 65504.0f;
    const i32s above = x > end, below = x < -end;
    x = (f32s)(((i32s)x & ~above) | ((i32s)end & above));
    x = (f32s)(((i32s)x & ~below) | ((i32s)(-end) & below));
#ifdef __F16C__
    __m256 some[LANES / 8];
    memcpy(some, &x, sizeof some);
    for (int i = 0; i < LANES / 8; i++) {
        const __m128i packed = _mm256_cvtps_ph(some[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        memcpy(out + 8 * i, &packed, sizeof packed);
    }
#else
    _Float16 packed[LANES];
    for (int i = 0; i < LANES; i++) packed[i] = (_Float16)x[i];
    memcpy(out, packed, sizeof packed);
#endif
}

// The sums of so many vectors' lanes, the i-th in lane i. Each step adds the halves of two vectors into one.
static inline f32s sums(f32s v[LANES]) {
#ifdef __AVX512F__
    for (int i = 0; i < 8; i++)
        v[i] = PICK(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               PICK(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        v[i] = PICK(v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               PICK(v[i], v[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        v[i] = PICK(v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               PICK(v[i], v[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return PICK(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           PICK(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#else
    for (int i = 0; i < 4; i++)
        v[i] = PICK(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        v[i] = PICK(v[i], v[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + PICK(v[i], v[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(v[0], v[1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(v[0], v[1], 1, 9, 3, 11, 5, 13, 7, 15);
#endif
}

// Scores of LANES / `room` keys by some queries: query t's of key i in [t * LANES / room + i].
static inline __attribute__((always_inline)) void dots(const uint16_t *keys, int dim, const float *factors, float scale,
                                                       int queries, int room, uint16_t scores[LANES]) {
    const int some = LANES / room;
    f32s sum[LANES];
    for (int i = 0; i < LANES; i++) sum[i] = (f32s){0};
    for (int from = 0; from < dim; from += STEP) {
        f32s even[LANES], odd[LANES];
        for (int i = 0; i < some; i++) {
            const uint16_t *at = keys + i * dim + from;
            u32s pairs;
            memcpy(&pairs, at, sizeof pairs);
            if (from % LINE == 0) __builtin_prefetch((const char *)at + AHEAD);
            even[i] = (f32s)(pairs << 16);  // a bfloat16 is the upper half of a float32
            odd[i] = (f32s)(pairs & 0xffff0000u);
        }
        for (int t = 0; t < queries; t++) {
            f32s by_even, by_odd;
            memcpy(&by_even, factors + (from * queries + t * STEP), sizeof by_even);
            memcpy(&by_odd, factors + (from * queries + t * STEP + LANES), sizeof by_odd);
            for (int i = 0; i < some; i++) {
                sum[t * some + i] += even[i] * by_even;
                sum[t * some + i] += odd[i] * by_odd;
            }
        }
    }
    store_f16(scores, sums(sum) * scale);
}

static float to_f32(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// A task's scores by its queries from `first` on. `room` is what they fill of 1, 2, 4 or 8. Both are constants where
// this is called, or the sums would not stay in registers.
static inline __attribute__((always_inline)) void by_some(const struct task *task, const struct job *job, int first,
                                                          int queries, int room) {
    const int dim = job->dim, some = LANES / room;
    float factors[TOGETHER * MAX_DIM];  // of each STEP and query: those of the even numbers, then of the odd ones
    for (int t = 0; t < queries; t++)
        for (int d = 0; d < dim; d++)
            factors[(d / STEP * queries + t) * STEP + d % 2 * LANES + d % STEP / 2] =
                to_f32(task->queries[(first + t) * dim + d]);
    uint16_t *scores = task->scores + first * job->stride, found[LANES];
    int64_t key = 0;
    for (; key + some <= task->count; key += some) {
        dots(task->keys + key * dim, dim, factors, job->scale, queries, room, found);
        for (int t = 0; t < queries; t++)
            memcpy(scores + t * job->stride + key, found + t * some, some * sizeof *found);
    }
    if (key < task->count) {  // with zeros for what is missing
        uint16_t last[LANES * MAX_DIM] = {0};
        memcpy(last, task->keys + key * dim, (task->count - key) * dim * sizeof *last);
        dots(last, dim, factors, job->scale, queries, room, found);
        for (int t = 0; t < queries; t++)
            memcpy(scores + t * job->stride + key, found + t * some, (task->count - key) * sizeof *found);
    }
}

static void run(const struct task *task, const struct job *job) {
    for (int first = 0; first < job->queries; first += TOGETHER) switch (job->queries - first) {
            case 1: by_some(task, job, first, 1, 1); break;
            case 2: by_some(task, job, first, 2, 2); break;
            case 3: by_some(task, job, first, 3, 4); break;
            case 4: by_some(task, job, first, 4, 4); break;
            case 5: by_some(task, job, first, 5, 8); break;
            case 6: by_some(task, job, first, 6, 8); break;
            case 7: by_some(task, job, first, 7, 8); break;
            default: by_some(task, job, first, 8, 8);
        }
}

// Take one task after the other until there is none; any number of threads may, at once. Returns 0, or 1 if the pipe is
// broken.
int herald_scan(const struct job *job) {
    for (;;) {
        const int64_t at = __atomic_fetch_add(job->next, 1, __ATOMIC_RELAXED);
        if (at >= job->tasks_count) return 0;
        const struct task *task = job->tasks + at;
        run(task, job);
        if (__atomic_sub_fetch(job->left + task->layer, 1, __ATOMIC_ACQ_REL) == 0) {
            const int32_t layer = (int32_t)task->layer;
            if (write(job->done, &layer, sizeof layer) != sizeof layer) return 1;
        }
    }
}
