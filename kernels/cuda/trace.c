/*
 * What ran on the device and when, by CUPTI (libcupti.so, the toolkit's profiling interface), which is looked
 * for when a trace begins. CUPTI hands over full buffers on a thread of its own.
 */
#include <cupti.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cuda/state.h"

enum { BUFFER_BYTES = 1 << 20, BUFFER_ALIGN = 8 };

#if CUPTI_API_VERSION >= 130000
typedef CUpti_ActivityKernel10 kernel_record;
#else
typedef CUpti_ActivityKernel9 kernel_record;
#endif

static struct {
    void *library;
    CUptiResult (*register_callbacks)(CUpti_BuffersCallbackRequestFunc, CUpti_BuffersCallbackCompleteFunc);
    CUptiResult (*enable)(CUpti_ActivityKind);
    CUptiResult (*disable)(CUpti_ActivityKind);
    CUptiResult (*flush)(uint32_t flag);
    CUptiResult (*next)(uint8_t *buffer, size_t valid_bytes, CUpti_Activity **record);
    CUptiResult (*dropped)(CUcontext context, uint32_t stream, size_t *n_out); /* since the last call */
} cupti;

static const CUpti_ActivityKind KINDS[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                           CUPTI_ACTIVITY_KIND_MEMSET};
enum { N_KINDS = sizeof(KINDS) / sizeof(KINDS[0]) };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static struct k_trace_event *events;
static uint32_t n_events;
static size_t n_dropped;

char *__cxa_demangle(const char *mangled, char *out, size_t *len, int *status); /* of the C++ runtime */

/* Length of a function's name up to its parameters; template arguments and namespaces may hold
 * parentheses. */
static size_t length_of_name(const char *text)
{
    static const char UNNAMED[] = "(anonymous namespace)";
    size_t n = 0, depth = 0;
    for (; text[n] && (depth || text[n] != '('); n++) {
        depth += text[n] == '<';
        depth -= text[n] == '>' && depth;
        if (!depth && !strncmp(text + n + 1, UNNAMED, sizeof(UNNAMED) - 1))
            n += sizeof(UNNAMED) - 1;
    }
    return n;
}

static void add_event(const char *name, bool is_kernel, uint64_t begin, uint64_t end)
{
    struct k_trace_event *e;
    int status = 0;
    char *plain = is_kernel && name ? __cxa_demangle(name, NULL, NULL, &status) : NULL;
    const char *from = plain ? plain : name ? name : "unknown";
    if (!strncmp(from, "void ", 5))
        from += 5;
    if (n_events % 1024 == 0)
        events = mem_resize(events, n_events + 1024, sizeof(*events));
    e = &events[n_events++];
    *e = (struct k_trace_event){.begin_ns = begin, .end_ns = end};
    size_t n = length_of_name(from);
    n = n < sizeof(e->name) ? n : sizeof(e->name) - 1;
    memcpy(e->name, from, n);
    free(plain);
}

static void add_record(const CUpti_Activity *r)
{
    if (r->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        const kernel_record *k = (const void *)r;
        add_event(k->name, true, k->start, k->end);
    } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy6 *m = (const void *)r;
        bool up = m->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD, down = m->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH;
        add_event(up     ? "copy to the device"
                  : down ? "copy to the host"
                         : "copy on the device",
                  false, m->start, m->end);
    } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *m = (const void *)r;
        add_event("clear", false, m->start, m->end);
    }
}

static void CUPTIAPI take_buffer(uint8_t **buffer, size_t *size, size_t *max_records)
{
    *buffer = aligned_alloc(BUFFER_ALIGN, BUFFER_BYTES);
    *size = *buffer ? BUFFER_BYTES : 0;
    *max_records = 0;
}

static void CUPTIAPI return_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    CUpti_Activity *r = NULL;
    size_t dropped = 0;
    (void)size;
    pthread_mutex_lock(&lock);
    if (cupti.dropped(context, stream, &dropped) == CUPTI_SUCCESS)
        n_dropped += dropped;
    while (valid && cupti.next(buffer, valid, &r) == CUPTI_SUCCESS)
        add_record(r);
    pthread_mutex_unlock(&lock);
    free(buffer);
}

static bool find_cupti(void)
{
    const struct {
        const char *name;
        void *at;
    } symbols[] = {{"cuptiActivityRegisterCallbacks", &cupti.register_callbacks},
                   {"cuptiActivityEnable", &cupti.enable},
                   {"cuptiActivityDisable", &cupti.disable},
                   {"cuptiActivityFlushAll", &cupti.flush},
                   {"cuptiActivityGetNextRecord", &cupti.next},
                   {"cuptiActivityGetNumDroppedRecords", &cupti.dropped}};
    char versioned[32];
    snprintf(versioned, sizeof(versioned), "libcupti.so.%d", CUDART_VERSION / 1000);
    const char *const names[] = {versioned, "libcupti.so", CUPTI_PATH};
    for (size_t i = 0; !cupti.library && i < sizeof(names) / sizeof(names[0]); i++)
        cupti.library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; cupti.library && i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        *(void **)symbols[i].at = dlsym(cupti.library, symbols[i].name);
        if (!*(void **)symbols[i].at)
            return false;
    }
    return cupti.library != NULL;
}

enum td_status cuda_trace_begin(struct kernels *k, struct td_error *error_out)
{
    cuda_finish(&cuda_select(k)->base);
    if (!find_cupti())
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "device cuda: a trace needs libcupti.so of the CUDA Toolkit");
    CUptiResult r = cupti.register_callbacks(take_buffer, return_buffer);
    for (int i = 0; i < N_KINDS && r == CUPTI_SUCCESS; i++)
        r = cupti.enable(KINDS[i]);
    if (r == CUPTI_SUCCESS)
        return TD_OK;
    for (int i = 0; i < N_KINDS; i++)
        cupti.disable(KINDS[i]);
    return td_fail(error_out, TD_ERR_DEVICE, "device cuda: CUPTI: error %d", (int)r);
}

static int by_begin(const void *a, const void *b)
{
    const struct k_trace_event *x = a, *y = b;
    return (x->begin_ns > y->begin_ns) - (x->begin_ns < y->begin_ns);
}

struct k_trace_event *cuda_trace_end(struct kernels *k, uint32_t *n_out)
{
    cuda_finish(&cuda_select(k)->base);
    for (int i = 0; i < N_KINDS; i++)
        cupti.disable(KINDS[i]);
    cupti.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    pthread_mutex_lock(&lock);
    struct k_trace_event *all = events;
    *n_out = n_events;
    if (n_dropped)
        fprintf(stderr, "device cuda: CUPTI dropped %zu records: the trace has gaps\n", n_dropped);
    events = NULL;
    n_events = 0;
    n_dropped = 0;
    pthread_mutex_unlock(&lock);
    if (*n_out)
        qsort(all, *n_out, sizeof(*all), by_begin);
    return all;
}
