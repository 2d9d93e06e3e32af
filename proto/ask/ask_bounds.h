/*
 * Bounds of a GenerateRequest. The router checks every request against them; the table of parameters
 * (ask_params.h) tells them to clients. Only the router knows the bounds that depend on the model
 * (vocabulary, context).
 */
#pragma once

enum {
    ASK_MAX_CHOICES = 16,
    ASK_MAX_STOP_STRINGS = 16,
    ASK_MAX_STOP_BYTES = 256, /* of a bad word, too */
    ASK_MAX_BAD_WORDS = 64,
    ASK_MAX_LABEL_BYTES = 64, /* tenant, cache_salt, workflow_id, request_id, lora */
    ASK_MAX_BIASES = 1024,
    ASK_MAX_STOP_IDS = 56,
    ASK_MAX_ALLOWED = 4096,
    ASK_MAX_TOP_LOGPROBS = 20,
    ASK_MAX_PRIORITY = 10, /* and -10 */
    ASK_MAX_TOP_K = 1 << 30,
};

#define ASK_MAX_TEMPERATURE  100
#define ASK_LEAST_TOP_P      1e-6f
#define ASK_MAX_PENALTY      2 /* and -2: presence and frequency */
#define ASK_LEAST_REPETITION 1e-3f
#define ASK_MAX_REPETITION   10
#define ASK_MAX_BIAS         100 /* and -100 */
#define ASK_MAX_LIMIT_MS     1e12
