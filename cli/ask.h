/*
 * One Generate call from the command line: a request made from JSON members, an answer collected while it streams.
 *
 * Members of a request (all but the prompt optional): id, prompt (text) | prompt_ids | messages [{role, content, ...}] with tools and
 * variables of the template,
 * add_special_tokens (true), max_tokens, min_tokens, ignore_eos, stop [text], stop_ids, greedy, temperature, top_k, top_p, min_p,
 * n, typical_p, allowed_ids [id], top_logprobs (how many), echo, bypass_cache, skip_special_tokens (true),
 * presence_penalty, frequency_penalty, repetition_penalty, seed, logit_bias {"id": bias}, logprobs, prompt_logprobs,
 * ttft_ms, tpot_ms (both with fractions), deadline_ms, priority, tenant, cache_salt, workflow_id.
 *
 * Threads: ask_start from any; callbacks on rpc threads, one at a time per ask.
 */
#pragma once

#include "cli/cli.h"

enum { ASK_MAX_CHOICES = 16 };

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

    struct rpc_call *call;
    struct bytes text;
    json_t *ids, *logprobs, *top_logprobs;
    Tandem__V1__GenerateEnd *end; /* NULL: failed, see code and error */
    struct ask_choice more[ASK_MAX_CHOICES - 1];
    uint32_t n_more; /* of the request */
    enum rpc_code code;
    uint32_t retry_after_ms;
    char error[1100];
};

/* The message that a request's members make. TD_ERR_INVALID names the member. Borrows from request until ask_message_free. */
struct ask_message;
enum td_status ask_message_make(json_t *request, struct ask_message **out, struct td_error *error_out);
Tandem__V1__GenerateRequest *ask_message_get(struct ask_message *m);
void ask_message_free(struct ask_message *m); /* NULL is fine */

/* Takes the reference to request. A request that can't be put into a message calls on_done at once, with code and error. */
struct ask *ask_start(struct rpc_client *c, json_t *request, void (*on_text)(struct ask *, const void *, size_t),
                      void (*on_done)(struct ask *), void *user);
void ask_free(struct ask *a);
/* Limits in milliseconds, 0: none, as routers of now and of before understand them. */
void ask_limits(Tandem__V1__Slo *slo, double ttft_ms, double tpot_ms);

/*
 * {"id", "token_ids", "text", "finish_reason", "logprobs", "top_logprobs" [[[id, logprob], ..], ..], "prompt_logprobs", "prompt_ranks", "prompt_top_logprobs", "usage", "timing", "placement", "predicted",
 * "seed", with n > 1 "choices": [{"token_ids", "text", "finish_reason", ...}] of the others} or {"id", "error": {"code", "message", "retry_after_ms"}}.
 */
json_t *ask_result(const struct ask *a);
