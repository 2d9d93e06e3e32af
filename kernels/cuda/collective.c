/*
 * Exchange between ranks: the parts of a gather by copies (kernels/group.c), and gathers by NCCL.
 *
 * Copies: an offer is an event, and a rank that follows it waits on its device, so no thread waits for a
 * device. A rank reads the columns of another rank in place if both are on the same device or are peers
 * (NVLink, or PCIe). Else it copies them, through the host if necessary.
 *
 * NCCL (libnccl.so.2, loaded when the first group is opened, so nothing depends on it) serves ranks that have
 * a device each: it refuses two ranks on one device. Parts arrive one after another, and one operation each
 * puts them into their columns; a single row needs none.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "kernels/cuda/state.h"

#undef NDEBUG
#include <assert.h>

/* --------------------------------------------------------------------- copies */

void cuda_collective_open(struct cuda *c)
{
    for (uint32_t i = 0; i < 2; i++)
        CUDA_MUST(cudaEventCreateWithFlags(&c->offers[i], cudaEventDisableTiming));
}

void cuda_collective_close(struct cuda *c)
{
    for (uint32_t i = 0; i < 2; i++)
        if (c->offers[i])
            CUDA_MUST(cudaEventDestroy(c->offers[i]));
}

void cuda_offer(struct kernels *k, uint32_t turn)
{
    struct cuda *c = cuda_enter(k);
    CUDA_MUST(cudaEventRecord(c->offers[turn], c->stream));
}

void cuda_follow(struct kernels *k, struct kernels *peer, uint32_t turn)
{
    CUDA_MUST(cudaStreamWaitEvent(cuda_enter(k)->stream, ((struct cuda *)peer)->offers[turn], 0));
}

const float *cuda_reach(struct kernels *k, struct kernels *peer, const float *from, size_t len_bytes)
{
    struct cuda *c = cuda_enter(k);
    int there = ((struct cuda *)peer)->ordinal;
    if (there == c->ordinal || (there < CUDA_MAX_DEVICES && c->sees[there]))
        return from;
    void *here = cuda_scratch(c, len_bytes);
    CUDA_MUST(cudaMemcpyPeerAsync(here, c->ordinal, from, there, len_bytes, c->stream));
    return here;
}

static void look_at(struct kernels *k, int there)
{
    struct cuda *c = cuda_enter(k);
    int can = 0;
    if (there == c->ordinal || there >= CUDA_MAX_DEVICES || c->sees[there])
        return;
    CUDA_MUST(cudaDeviceCanAccessPeer(&can, c->ordinal, there));
    cudaError_t e = can ? cudaDeviceEnablePeerAccess(there, 0) : cudaErrorInvalidDevice;
    cudaGetLastError(); /* clears the error, so that the next operation does not see it */
    c->sees[there] = e == cudaSuccess || e == cudaErrorPeerAccessAlreadyEnabled;
}

/* ----------------------------------------------------------------------- NCCL */

/* The part of nccl.h (version 2) that is needed. Results and types are enums; 0 is success. */
typedef struct ncclComm *nccl_comm;
/* NCCL_OLDEST: the first version with ncclSend. From 2.9 on version numbers have five digits. */
enum { NCCL_FLOAT32 = 7, NCCL_OLDEST = 2703, NCCL_END = 30000 };

static struct nccl {
    void *library;
    int (*get_version)(int *version);
    int (*init_all)(nccl_comm *comms, int n, const int *devices);
    int (*destroy)(nccl_comm comm);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *from, size_t count, int type, int peer, nccl_comm comm, cudaStream_t stream);
    int (*recv)(void *to, size_t count, int type, int peer, nccl_comm comm, cudaStream_t stream);
    const char *(*error_string)(int result);
} nccl; /* written by the first cuda_links_open(), before ranks have threads; stays loaded */

struct k_links {
    uint32_t n;
    struct cuda *ranks[K_MAX_RANKS];
    nccl_comm comms[K_MAX_RANKS];
};

static bool nccl_find(void)
{
    const struct {
        const char *name;
        void *at;
    } symbols[] = {{"ncclGetVersion", &nccl.get_version},
                   {"ncclCommInitAll", &nccl.init_all},
                   {"ncclCommDestroy", &nccl.destroy},
                   {"ncclGroupStart", &nccl.group_start},
                   {"ncclGroupEnd", &nccl.group_end},
                   {"ncclSend", &nccl.send},
                   {"ncclRecv", &nccl.recv},
                   {"ncclGetErrorString", &nccl.error_string}};
    int version = 0;
    if (!nccl.library)
        nccl.library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; nccl.library && i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        *(void **)symbols[i].at = dlsym(nccl.library, symbols[i].name);
        if (!*(void **)symbols[i].at)
            return false;
    }
    return nccl.library && !nccl.get_version(&version) && version >= NCCL_OLDEST && version < NCCL_END;
}

/* A connection that failed once stays broken: the process leaves, and its requests go to other workers. */
static void nccl_must(const struct k_links *l, uint32_t rank, int result)
{
    char operation[64];
    if (!result)
        return;
    snprintf(operation, sizeof(operation), "nccl rank=%u of=%u device=cuda:%d", rank, l->n, l->ranks[rank]->ordinal);
    cuda_die(operation, nccl.error_string(result));
}

struct k_links *cuda_links_open(struct kernels *const *ranks, uint32_t n)
{
    struct k_links *l = mem_zalloc(sizeof(*l));
    int devices[K_MAX_RANKS], before = 0;
    bool distinct = true;
    l->n = n;
    for (uint32_t i = 0; i < n; i++) {
        l->ranks[i] = (struct cuda *)ranks[i];
        devices[i] = l->ranks[i]->ordinal;
        for (uint32_t j = 0; j < i; j++) {
            look_at(ranks[i], devices[j]);
            look_at(ranks[j], devices[i]);
            distinct &= devices[i] != devices[j];
        }
    }
    CUDA_MUST(cudaGetDevice(&before));
    bool opened = distinct && nccl_find() && !nccl.init_all(l->comms, (int)n, devices);
    CUDA_MUST(cudaSetDevice(before)); /* NCCL may have changed it, which cuda_enter() does not notice */
    if (opened)
        return l;
    free(l);
    return NULL;
}

void cuda_links_close(struct k_links *l)
{
    for (uint32_t i = 0; i < l->n; i++) {
        cuda_enter(&l->ranks[i]->base);
        nccl_must(l, i, nccl.destroy(l->comms[i]));
    }
    free(l);
}

void cuda_links_gather(struct k_links *l, uint32_t rank, const uint32_t *first, uint32_t to, uint32_t n_rows,
                       const float *mine, float *all)
{
    struct cuda *c = cuda_enter(&l->ranks[rank]->base);
    bool takes = to == K_EVERY_RANK || to == rank;
    uint32_t n_all = first[l->n], n_mine = first[rank + 1] - first[rank];
    float *parts = n_rows == 1 || !takes ? all : cuda_scratch(c, (size_t)n_rows * n_all * sizeof(*parts));
    nccl_must(l, rank, nccl.group_start());
    for (uint32_t i = 0; i < l->n; i++) {
        size_t n = first[i + 1] - first[i];
        if (i == rank)
            continue;
        if (n_mine && (to == K_EVERY_RANK || to == i))
            nccl_must(l, rank,
                      nccl.send(mine, (size_t)n_rows * n_mine, NCCL_FLOAT32, (int)i, l->comms[rank], c->stream));
        if (n && takes)
            nccl_must(l, rank,
                      nccl.recv(parts + (size_t)n_rows * first[i], n_rows * n, NCCL_FLOAT32, (int)i, l->comms[rank],
                                c->stream));
    }
    nccl_must(l, rank, nccl.group_end());
    for (uint32_t i = 0; i < l->n && takes; i++) {
        uint32_t n = first[i + 1] - first[i];
        const float *from = i == rank ? mine : parts + (size_t)n_rows * first[i];
        const struct k_each e = {.x = from, .y = all + first[i], .x_stride = n, .y_stride = n_all};
        if (n && from != e.y)
            cuda_copy_heads(c->stream, &e, 1, n, n_rows);
    }
    CUDA_MUST(cudaGetLastError());
}
