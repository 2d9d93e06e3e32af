#include "worker/first_token.h"

#include <string.h>

#include "base/endian.h"

static void put_scored(uint8_t *p, uint32_t id, float logprob)
{
    uint32_t bits;
    memcpy(&bits, &logprob, sizeof(bits));
    put_u32(p, id);
    put_u32(p + 4, bits);
}

static uint32_t get_scored(const uint8_t *p, float *logprob)
{
    uint32_t bits = get_u32(p + 4);
    memcpy(logprob, &bits, sizeof(bits));
    return get_u32(p);
}

uint32_t first_token_encode(const struct sampled *token, uint8_t out[FIRST_TOKEN_MAX_BYTES])
{
    put_scored(out, token->id, token->logprob);
    put_u32(out + 8, 0);
    for (uint32_t i = 0; i < token->n_top; i++)
        put_scored(out + FIRST_TOKEN_BYTES + i * FIRST_TOKEN_TOP_BYTES, token->top_ids[i], token->top_logprobs[i]);
    return FIRST_TOKEN_BYTES + token->n_top * FIRST_TOKEN_TOP_BYTES;
}

enum td_status first_token_decode(const void *data, size_t len_bytes, struct sampled *out)
{
    const uint8_t *p = data;
    if (len_bytes < FIRST_TOKEN_BYTES || len_bytes > FIRST_TOKEN_MAX_BYTES ||
        (len_bytes - FIRST_TOKEN_BYTES) % FIRST_TOKEN_TOP_BYTES)
        return TD_ERR_PROTOCOL;
    struct sampled token = {.n_top = (uint32_t)(len_bytes - FIRST_TOKEN_BYTES) / FIRST_TOKEN_TOP_BYTES};
    token.id = get_scored(p, &token.logprob);
    for (uint32_t i = 0; i < token.n_top; i++)
        token.top_ids[i] =
            get_scored(p + FIRST_TOKEN_BYTES + (size_t)i * FIRST_TOKEN_TOP_BYTES, &token.top_logprobs[i]);
    *out = token;
    return TD_OK;
}
