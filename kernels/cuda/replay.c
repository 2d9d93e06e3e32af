/*
 * Replay: the operations of a step as one CUDA graph. The first step of a shape runs as usual, which brings
 * scratch to its size and modules to the device. The second one is captured. From the third one on, a step is
 * one launch.
 *
 * A graph contains the arguments of its launches. So it serves a step only if the step's puts have the same
 * addresses and its attention launches as many blocks of threads, and only while nothing that it uses is
 * freed.
 */
#include <string.h>

#include "base/mem.h"
#include "kernels/cuda/state.h"

#undef NDEBUG
#include <assert.h>

enum {
    MAX_GRAPHS = 256, /* beyond that the one that was not used for longest is dropped */
    MAX_ROWS = 256,   /* with more rows, launches no longer limit a step */
    NONE = UINT32_MAX,
};

/* Steps with equal members can share a graph. */
struct cuda_steps {
    uint64_t shape;
    uint32_t n_rows, n_seqs, single_runs, used;
    const uint8_t *arena;
};

struct cuda_graph {
    struct cuda_steps of;
    cudaGraphExec_t exec; /* NULL: such a step ran once, and was not captured yet */
    uint64_t used;        /* c->n_replays when it last was */
};

uint32_t cuda_replay_rows(struct kernels *k, uint32_t n_rows)
{
    (void)k;
    if (n_rows > MAX_ROWS)
        return 0;
    uint32_t n = 1;
    while (n < 16 && n < n_rows)
        n *= 2;
    return n < 16 ? n : (n_rows + 15) / 16 * 16;
}

static void drop_graph(struct cuda_graph *g)
{
    if (g->exec)
        CUDA_MUST(cudaGraphExecDestroy(g->exec));
    memset(g, 0, sizeof(*g));
}

void cuda_replay_forget(struct cuda *c)
{
    for (uint32_t i = 0; i < c->n_graphs; i++)
        drop_graph(&c->graphs[i]);
    c->n_graphs = 0;
}

static uint32_t find_graph(const struct cuda *c, const struct cuda_steps *of)
{
    for (uint32_t i = 0; i < c->n_graphs; i++)
        if (!memcmp(&c->graphs[i].of, of, sizeof(*of)))
            return i;
    return NONE;
}

static void remember(struct cuda *c, const struct cuda_steps *of)
{
    if (!c->graphs)
        c->graphs = mem_array(MAX_GRAPHS, sizeof(*c->graphs));
    struct cuda_graph *g = &c->graphs[0];
    if (c->n_graphs < MAX_GRAPHS)
        g = &c->graphs[c->n_graphs++];
    else
        for (uint32_t i = 1; i < MAX_GRAPHS; i++)
            if (c->graphs[i].used < g->used)
                g = &c->graphs[i];
    drop_graph(g);
    g->of = *of;
    g->used = c->n_replays;
}

bool cuda_replay(struct kernels *k, uint64_t shape)
{
    struct cuda *c = cuda_enter(k);
    const struct cuda_arena *a = &c->arenas[c->arena];
    struct cuda_steps of;
    memset(&of, 0, sizeof(of)); /* compared as bytes, padding included */
    of.shape = shape;
    of.n_rows = c->batch.n_rows;
    of.n_seqs = c->batch.n_seqs;
    of.single_runs = c->batch.single_runs;
    of.used = (uint32_t)((const uint8_t *)c->batch.seqs - a->device);
    of.arena = a->device;
    assert(of.single_runs);
    uint32_t i = find_graph(c, &of);
    c->n_replays++;
    c->capturing = NONE;
    if (i == NONE) {
        remember(c, &of);
        return false;
    }
    c->graphs[i].used = c->n_replays;
    if (c->graphs[i].exec) {
        CUDA_MUST(cudaGraphLaunch(c->graphs[i].exec, c->stream));
        return true;
    }
    c->capturing = i;
    CUDA_MUST(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
    return false;
}

void cuda_replay_end(struct kernels *k)
{
    struct cuda *c = cuda_enter(k);
    if (c->capturing == NONE)
        return;
    assert(c->capturing < c->n_graphs); /* scratch did not grow while capturing: it had its size */
    struct cuda_graph *g = &c->graphs[c->capturing];
    cudaGraph_t graph = NULL;
    CUDA_MUST(cudaStreamEndCapture(c->stream, &graph));
    CUDA_MUST(cudaGraphInstantiate(&g->exec, graph, 0));
    CUDA_MUST(cudaGraphDestroy(graph));
    CUDA_MUST(cudaGraphLaunch(g->exec, c->stream));
}
