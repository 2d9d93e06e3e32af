/*
 * One Generate call from the command line: the request is made from JSON members (proto/ask/ask_params.h),
 * and the answer is collected while it streams.
 *
 * Threads: any thread may call ask_start(). Callbacks run on rpc threads, one at a time for each ask.
 */
#pragma once

#include "cli/cli.h"
#include "proto/ask/ask_bounds.h"
#include "proto/ask/ask_message.h"

struct ask_choice { /* a further choice of a request with n > 1; the first choice is in struct ask */
    struct bytes text, reasoning;
    json_t *calls; /* of functions: list of {"id", "name", "arguments"}; NULL: none */
    json_t *ids, *logprobs, *top_logprobs;
    Tandem__V1__GenerateEnd *end;
};

struct ask {
    json_t *request;
    void (*on_text)(struct ask *a, const void *text, size_t len_bytes); /* optional */
    void (*on_done)(struct ask *a);                                     /* called once; may call ask_free() */
    void *user;

    struct bytes text, reasoning;
    json_t *calls; /* as in ask_choice */
    json_t *ids, *logprobs, *top_logprobs;
    Tandem__V1__GenerateEnd *end; /* NULL: the call failed, see code and error */
    struct ask_choice more[ASK_MAX_CHOICES - 1];
    uint32_t n_more; /* further choices that the request asks for */
    enum rpc_code code;
    uint32_t retry_after_ms;
    char error[1100];
};

/* Takes the reference to request. on_text gets a chat's answer as the model says it. If the request can't be
 * put into a message, on_done is called at once, with code and error. */
struct ask *ask_start(struct rpc_client *c, json_t *request, void (*on_text)(struct ask *, const void *, size_t),
                      void (*on_done)(struct ask *), void *user);
void ask_free(struct ask *a);

/*
 * The answer as JSON:
 *   {"id", "token_ids", "text", "reasoning", "tool_calls" [{"id", "name", "arguments"}, ..],
 *    "finish_reason", "logprobs", "top_logprobs" [[[id, logprob], ..], ..], "prompt_logprobs",
 *    "prompt_ranks", "prompt_top_logprobs", "usage", "timing", "placement", "predicted",
 *    "seed", "replans", "choices": [{"token_ids", "text", "finish_reason", ...}] (further ones, with n > 1)}
 * or {"id", "error": {"code", "message", "retry_after_ms"}}.
 */
json_t *ask_result(const struct ask *a);
