/*
 * Request traces: when each request arrived, how long its prompt and its answer were, and which blocks it
 * shares with others.
 *
 * Formats, told apart by their first line; all may be packed with gzip or zstd (docs/replay.md says where to
 * get them):
 *
 *   Mooncake, one JSON object a line (FAST'25 release). timestamp is in milliseconds; hash_ids name the
 *   blocks of the prompt from its head, of which the last may be partial. An id names the whole prefix that
 *   it ends.
 *
 *       {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
 *
 *   Qwen-Bailian: the same with seconds, blocks of 16 tokens, chats and turns. Its type becomes the tenant.
 *
 *       {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.1, "input_length": 521,
 *        "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090]}
 *
 *   tandem's own: a line that says so, then Mooncake's members and further ones. Only the first three members
 *   are required.
 *
 *       {"tandem_trace": 1, "block_tokens": 16}
 *       {"timestamp": 27482, "input_length": 30, "output_length": 52, "hash_ids": [46, 47],
 *        "tenant": "a", "priority": 2, "ttft_ms": 500, "tpot_ms": 50, "id": "r8", "session": "s3",
 *        "follows": "r7", "delay_ms": 1200}
 *
 *   Azure (2023, 2024, multimodal 2025), comma separated with a header, without blocks:
 *
 *       TIMESTAMP,ContextTokens,GeneratedTokens
 *       2023-11-16 18:15:46.6805900,374,44
 *
 *   BurstGPT: the same with seconds. Its model becomes the tenant, its session ID the session. Requests
 *   without a prompt token (failures of the observed service) are left out and counted.
 *
 *       Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
 *       5,ChatGPT,472,18,490,Conversation log
 *
 * Parsed requests are sorted by arrival, equal arrivals in the order of the file, and arrivals count from the
 * first request. Other members of an object are refused in tandem's own format and ignored in the others;
 * blank lines are ignored. An error names its line.
 *
 * Threads: a trace is read-only once it is parsed.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

enum trace_format { TRACE_MOONCAKE, TRACE_BAILIAN, TRACE_TANDEM, TRACE_AZURE, TRACE_BURSTGPT, TRACE_FORMATS };

struct trace_request {
    uint64_t arrival_ns;         /* since the first request of the trace */
    uint32_t n_prompt, n_output; /* tokens; n_prompt >= 1 */
    uint32_t n_blocks;           /* at most n_prompt; 0: the trace names none */
    uint64_t first_block;        /* index into trace.blocks */
    uint32_t tenant;             /* index into trace.tenants */
    int32_t priority;            /* -10 .. 10 */
    double ttft_ms, tpot_ms;     /* limits of the request; 0: none */
    uint32_t delay_ms;           /* from the end of the request that it follows */
    uint64_t session;            /* equal within a session; 0: none */
    uint64_t follows;            /* 1 + index of the request that must end before this one is sent; 0: none */
};

struct trace {
    struct trace_request *requests;
    uint64_t n_requests;
    uint64_t *blocks; /* ids, request by request, requests in the order of the file */
    uint64_t n_blocks;
    char **tenants; /* names; the first is "": no tenant named */
    uint32_t n_tenants;
    uint32_t block_tokens; /* tokens of a block */
    enum trace_format format;
    uint64_t n_left_out; /* lines without a prompt token */
};

/* NULL: the trace has no blocks at all. */
static inline const uint64_t *trace_blocks(const struct trace *t, const struct trace_request *r)
{
    return t->blocks ? t->blocks + r->first_block : NULL;
}

const char *trace_format_name(enum trace_format format); /* "mooncake", ... */

/* Parses a whole file. data is not needed after the call. TD_ERR_INVALID names line and member. Memory: below
 * 64 * size + 1 MiB, and 32 times the longest line while that line is parsed. */
enum td_status trace_parse(const char *data, size_t size, struct trace **out, struct td_error *error_out);

/* Unpacks gzip or zstd data, known by its first bytes; copies other data. *out is malloc'd. TD_ERR_INVALID:
 * damaged. TD_ERR_NO_SPACE: more than max_bytes. */
enum td_status trace_unpack(const char *data, size_t size, size_t max_bytes, char **out, size_t *size_out,
                            struct td_error *error_out);

/* Reads and parses a file. Packed and unpacked it has at most max_bytes. TD_ERR_NOT_FOUND, TD_ERR_IO,
 * TD_ERR_NO_SPACE (too large), TD_ERR_INVALID. */
enum td_status trace_read(const char *path, size_t max_bytes, struct trace **out, struct td_error *error_out);

/* Appends the trace as a file of that format, which trace_parse() reads again. TD_ERR_UNSUPPORTED: the format
 * is not tandem, mooncake or azure. */
enum td_status trace_write(const struct trace *t, enum trace_format format, struct bytes *out,
                           struct td_error *error_out);

void trace_close(struct trace *t); /* NULL is fine */
