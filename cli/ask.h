/*
 * One Generate call from the command line: a request made from JSON members (proto/ask/ask_params.h), an
 * answer collected while it streams.
 *
 * Threads: ask_start from any; callbacks on rpc threads, one at a time per ask.
 */
#pragma once

#include "cli/cli.h"
#include "proto/ask/ask_bounds.h"
#include "proto/ask/ask_message.h"

struct ask_choice { /* of several; the first one's are in the ask */
    struct bytes text;
    json_t *ids, *logprobs, *top_logprobs;
    Tandem__V1__GenerateEnd *end;
};

struct ask {
    json_t *request;
    void (*on_text)(struct ask *a, const void *text, size_t len_bytes); /* optional */
    void (*on_done)(struct ask *a);                                     /* once; ask_free() may follow */
    void *user;

    struct bytes text;
    json_t *ids, *logprobs, *top_logprobs;
    Tandem__V1__GenerateEnd *end; /* NULL: failed, see code and error */
    struct ask_choice more[ASK_MAX_CHOICES - 1];
    uint32_t n_more; /* of the request */
    enum rpc_code code;
    uint32_t retry_after_ms;
    char error[1100];
};

/* Takes the reference to request. A request that can't be put into a message calls on_done at once, with code
 * and error. */
struct ask *ask_start(struct rpc_client *c, json_t *request, void (*on_text)(struct ask *, const void *, size_t),
                      void (*on_done)(struct ask *), void *user);
void ask_free(struct ask *a);

/*
 * {"id", "token_ids", "text", "finish_reason", "logprobs", "top_logprobs" [[[id, logprob], ..], ..],
 * "prompt_logprobs", "prompt_ranks", "prompt_top_logprobs", "usage", "timing", "placement", "predicted",
 * "seed", with n > 1 "choices": [{"token_ids", "text", "finish_reason", ...}] of the others} or {"id",
 * "error": {"code", "message", "retry_after_ms"}}.
 */
json_t *ask_result(const struct ask *a);
