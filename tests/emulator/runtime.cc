/*
 * The runtime of the emulated device (include/cuda_runtime_api.h): memory, streams, events and graphs.
 *
 * A stream is a list of what was queued. It runs when somebody waits for it, and no earlier: what relies
 * on an operation without waiting for it finds that it has not happened. Memory of the device is the
 * host's, and begins and ends as bytes that are a NaN. Only pinned memory is copied late, as the toolkit
 * has it; other memory is copied when the copy is queued.
 */
#include <stdlib.h>

#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "cuda_runtime_api.h"
#include "cudaTypedefs.h"
#include "tests/emulator/queue.h"

using operation = std::function<void()>;

struct emulated_graph {
    std::vector<operation> operations;
};

struct emulated_stream {
    std::deque<operation> queued;
    uint64_t n_queued, n_done;
    struct emulated_graph *capture; /* what is recorded; NULL: operations run */
};

struct emulated_event {
    struct emulated_stream *stream; /* NULL: it was not recorded */
    uint64_t at;                    /* operations of the stream before it */
};

namespace
{
enum { POISON = 0xff, MULTIPROCESSORS = 16, TOTAL_BYTES = 1 << 30 };

std::recursive_mutex lock; /* of all below, and of the emulator: one kernel runs at a time */
using guard = std::lock_guard<std::recursive_mutex>;
std::map<const void *, size_t> device_memory, pinned; /* begin, bytes */
std::vector<emulated_stream *> streams;

void run_until(emulated_stream *s, uint64_t at)
{
    while (s->n_done < at) {
        operation next = std::move(s->queued.front());
        s->queued.pop_front();
        next();
        s->n_done++;
    }
}

void run_all(void)
{
    for (emulated_stream *s : streams)
        run_until(s, s->n_queued);
}

void queue(emulated_stream *s, operation what)
{
    if (s->capture) {
        s->capture->operations.push_back(std::move(what));
        return;
    }
    s->queued.push_back(std::move(what));
    s->n_queued++;
}

bool is_in(const std::map<const void *, size_t> &all, const void *p)
{
    auto next = all.upper_bound(p);
    if (next == all.begin())
        return false;
    --next;
    return (const uint8_t *)p < (const uint8_t *)next->first + next->second;
}

cudaError_t allocate(std::map<const void *, size_t> *all, void **out, size_t len_bytes)
{
    guard g(lock);
    void *p = aligned_alloc(256, (len_bytes + 255) / 256 * 256);
    if (!p)
        return cudaErrorMemoryAllocation;
    memset(p, POISON, len_bytes);
    (*all)[p] = len_bytes;
    *out = p;
    return cudaSuccess;
}

cudaError_t release(std::map<const void *, size_t> *all, void *p)
{
    guard g(lock);
    if (!p)
        return cudaSuccess;
    run_all();
    auto at = all->find(p);
    if (at == all->end())
        return cudaErrorInvalidValue;
    memset(p, POISON, at->second);
    all->erase(at);
    free(p);
    return cudaSuccess;
}
} // namespace

void emulator::launch(emulated_stream *stream, dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> thread)
{
    guard g(lock);
    queue(stream, [=] { emulator::run_kernel(grid, block, shared_bytes, thread); });
}

/* ------------------------------------------------------------------ device */

/* TANDEM_EMULATED=hopper: the device has Hopper's instructions. */
static bool is_hopper(void)
{
    const char *what = getenv("TANDEM_EMULATED");
    return what && !strcmp(what, "hopper");
}

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaSuccess ? "no error" : e == cudaErrorMemoryAllocation ? "out of memory" : "emulated error";
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *out)
{
    *out = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *out)
{
    *out = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return device ? cudaErrorInvalidDevice : cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr what, int device)
{
    *out = what == cudaDevAttrMultiProcessorCount            ? MULTIPROCESSORS
           : what == cudaDevAttrMaxSharedMemoryPerBlockOptin ? (is_hopper() ? 227 : 163) << 10
           : what == cudaDevAttrComputeCapabilityMajor       ? (is_hopper() ? 9 : 8)
                                                             : 0;
    return cudaSetDevice(device);
}

cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer)
{
    *out = device == peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned)
{
    return cudaErrorInvalidDevice;
}

cudaError_t cudaDriverGetVersion(int *out)
{
    *out = 12040;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **out, unsigned, unsigned long long,
                                             enum cudaDriverEntryPointQueryResult *result)
{
    PFN_cuTensorMapEncodeTiled_v12000 encode = emulated_encode_map;
    memcpy(out, &encode, sizeof(encode));
    *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ------------------------------------------------------------------ memory */

cudaError_t cudaMalloc(void **out, size_t len_bytes)
{
    return allocate(&device_memory, out, len_bytes);
}

cudaError_t cudaFree(void *p)
{
    return release(&device_memory, p);
}

cudaError_t cudaMallocHost(void **out, size_t len_bytes)
{
    return allocate(&pinned, out, len_bytes);
}

cudaError_t cudaFreeHost(void *p)
{
    return release(&pinned, p);
}

cudaError_t cudaHostRegister(void *p, size_t len_bytes, unsigned)
{
    guard g(lock);
    pinned[p] = len_bytes;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *p)
{
    guard g(lock);
    run_all();
    return pinned.erase(p) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out)
{
    *free_out = *total_out = TOTAL_BYTES;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p)
{
    guard g(lock);
    out->type = is_in(pinned, p)          ? cudaMemoryTypeHost
                : is_in(device_memory, p) ? cudaMemoryTypeDevice
                                          : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind, cudaStream_t stream)
{
    guard g(lock);
    auto copy = [=] {
        for (size_t i = 0; i < height; i++)
            memcpy((uint8_t *)to + i * to_pitch, (const uint8_t *)from + i * from_pitch, width);
    };
    auto is_late = [](const void *p) { return is_in(pinned, p) || is_in(device_memory, p); };
    queue(stream, copy);
    if (!stream->capture && !(is_late(to) && is_late(from)))
        run_until(stream, stream->n_queued);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t len_bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return cudaMemcpy2DAsync(to, len_bytes, from, len_bytes, len_bytes, 1, kind, stream);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t len_bytes, cudaStream_t stream)
{
    return cudaMemcpyAsync(to, from, len_bytes, cudaMemcpyDeviceToDevice, stream);
}

/* ----------------------------------------------------------------- streams */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    guard g(lock);
    streams.push_back(*out = new emulated_stream());
    return cudaSuccess;
}

/* The stream itself stays: events may have been recorded in it. */
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    return cudaStreamSynchronize(s);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    guard g(lock);
    run_until(s, s->n_queued);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    guard g(lock);
    const emulated_event of = *e;
    if (of.stream)
        queue(s, [=] { run_until(of.stream, of.at); });
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode)
{
    guard g(lock);
    s->capture = new emulated_graph();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    guard g(lock);
    *out = s->capture;
    s->capture = NULL;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t g, unsigned long long)
{
    *out = new emulated_graph(*g);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    delete g;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g)
{
    guard held(lock);
    run_all();
    return cudaGraphDestroy(g);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s)
{
    guard held(lock);
    queue(s, [=] {
        for (const operation &o : g->operations)
            o();
    });
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    *out = new emulated_event();
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete e;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    guard g(lock);
    *e = {s, s->n_queued};
    return cudaSuccess;
}

/* Each look lets the device do one thing. */
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    guard g(lock);
    if (!e->stream || e->stream->n_done >= e->at)
        return cudaSuccess;
    run_until(e->stream, e->stream->n_done + 1);
    return cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    guard g(lock);
    if (e->stream)
        run_until(e->stream, e->at);
    return cudaSuccess;
}
