/*
 * Log-probabilities as OpenAI's two APIs have them.
 *
 *     chat        {"content": [{"token", "logprob", "bytes", "top_logprobs": [the same three]}], "refusal"}
 *     completion  {"tokens": [], "token_logprobs": [], "top_logprobs": [{token: logprob}], "text_offset": []}
 *
 * A token is shown by its bytes. Where they are no text, because the character has several tokens, a chat has
 * U+FFFD, and a completion "bytes:\\xe2\\x80", so that tokens are told apart. -9999 stands for a probability
 * of 0, as OpenAI has it; the first token of a prompt has none.
 */
#pragma once

#include "gateway/gateway_internal.h"

/* An empty object of the task's API. */
json_t *gw_scores_new(const struct gw_task *t);
/* Adds the tokens of a message. *n_chars: characters of tokens so far. */
void gw_scores_add(const struct gw_task *t, json_t *scores, const Tandem__V1__GenerateResponse *m, uint64_t *n_chars);
/* The prompt's tokens as vLLM has them: [null, {ID: {"logprob", "rank", "decoded_token"}}, ...]. end may
 * be NULL. */
json_t *gw_scores_prompt_list(const struct gw_task *t, const Tandem__V1__GenerateEnd *end);
/* Of a completion: the prompt's tokens, which are then before those that scores has. */
void gw_scores_add_prompt(const struct gw_task *t, json_t *scores, const Tandem__V1__GenerateEnd *end);
