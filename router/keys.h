/*
 * API keys: who a client is, and how much he may ask for.
 *
 * The file (--api-keys) is one JSON object, {"keys": [KEY...]}; tandem key writes it, and it may be edited:
 *   "id", "salt", "hash"     which key: its id, 16 bytes and SHA-256(salt || key), in hexadecimal
 *   "tenant"                 whose it is; several keys may have one tenant
 *   "weight"                 the tenant's share of the queue (sched/fair.h); default 1
 *   "requests_per_minute", "prompt_tokens_per_minute", "output_tokens_per_minute"
 *                            default: no limit
 *   "texts_per_minute"       calls of Tokenize, Detokenize, Pin, Release and Flush; default: no limit
 *   "concurrency"            requests that are open at once; default: no limit of its own (keys_share())
 *   "pin_blocks"             blocks that the tenant may pin; default: half of --pin-blocks
 *   "loras"                  names of the adapters that it may use, [""] for none of them; default: all
 *   "models"                 names of the models that it may use; default: all
 *
 * A key is "td-ID-SECRET": the id finds the entry, so a call costs one hash whatever the number of keys. The
 * secret has 256 random bits, so one round of SHA-256 is enough.
 *
 * The file is read again when it has changed. A key that is gone is refused from then on; its requests go on.
 * A file that can't be read or is wrong changes nothing, and is said once in the log.
 *
 * Rates are buckets that hold a minute's worth. A request is let in while its key's buckets of tokens are
 * above zero and that of requests holds one. It then takes what it needs, below zero if need be: a prompt
 * that is longer than a minute's worth makes those after it wait, and is not kept waiting for ever itself.
 * What comes out is charged as it is sent; a request that was never placed gets back what it took. With
 * several routers each one grants its part, the rate divided by their number, so a client that uses only one
 * of n gets an n-th.
 *
 * Threads: any; a lock guards everything. Keys live until keys_close(), also those that are gone.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/log.h"
#include "base/status.h"

enum { KEYS_TENANT_BYTES = 128, KEYS_MOST = 1 << 16 };

struct api_keys;
struct api_key; /* borrowed */

/* TD_ERR_INVALID names the file and the member that is wrong. log is borrowed. */
enum td_status keys_open(const char *path, const struct log *log, struct api_keys **out, struct td_error *error_out);
void keys_close(struct api_keys *k); /* NULL is fine */

/* The key of a header, "Bearer KEY"; NULL: none that is known now. */
struct api_key *keys_find(struct api_keys *k, const char *authorization);

struct key_terms { /* a copy of what a key is good for */
    char tenant[KEYS_TENANT_BYTES];
    double weight;
    uint32_t pin_blocks; /* UINT32_MAX: the default */
    uint64_t tenant_id;  /* ring_id() of tenant */
};
void keys_terms(struct api_keys *k, const struct api_key *key, struct key_terms *out);
/* Whether the key may use the model and the adapter ("": none; NULL: not asked). TD_ERR_FORBIDDEN names the
 * field. */
enum td_status keys_allow(struct api_keys *k, const struct api_key *key, const char *model, const char *lora,
                          struct td_error *error_out);

/* n_routers: how many grant the rates. tenant_open_most: answers that all keys of one tenant together may
 * have open at this router. Until it is called: one, and no limit. */
void keys_share(struct api_keys *k, uint32_t n_routers, uint32_t tenant_open_most);

/* Takes what a request of n_choices answers needs, or one text.
 * TD_ERR_REFUSED: not now; *retry_after_ms_out says when. */
enum td_status keys_take(struct api_keys *k, struct api_key *key, uint32_t n_prompt_tokens, uint32_t n_choices,
                         uint64_t now_ns, uint32_t *retry_after_ms_out, struct td_error *error_out);
enum td_status keys_take_text(struct api_keys *k, struct api_key *key, uint64_t now_ns, uint32_t *retry_after_ms_out,
                              struct td_error *error_out);
void keys_charge_output(struct api_keys *k, struct api_key *key, uint32_t n_tokens);
/* Answers open, or end. is_free: the request was never placed, and gets back what keys_take() took. */
void keys_opened(struct api_keys *k, struct api_key *key, uint32_t n_choices);
void keys_ended(struct api_keys *k, struct api_key *key, uint32_t n_choices, bool is_free, uint32_t n_prompt_tokens);

/* ------------------------------------------------------------ for tandem key */

/* Adds a new key for the tenant to the file, which is made (mode 0600) if it does not exist. key_out: the key
 * itself, which nothing else ever shows. */
enum { KEYS_TEXT_BYTES = 96 };
enum td_status keys_add(const char *path, const char *tenant, char key_out[KEYS_TEXT_BYTES],
                        struct td_error *error_out);
