/* The adapters that a worker serves, by the names that clients call them. Immutable after opening. */
#pragma once

#include "model/adapter.h"

enum { MAX_ADAPTERS = 64, MAX_ADAPTER_NAME = 64 };

struct adapters {
    uint32_t n;
    char names[MAX_ADAPTERS][MAX_ADAPTER_NAME + 1];
    struct adapter *all[MAX_ADAPTERS];
};

/* option: "NAME=DIR,NAME=DIR", or NULL: none. TD_ERR_INVALID or what adapter_open() says, with the name. */
enum td_status adapters_open(const char *option, const struct model_config *config, struct adapters *out,
                             struct td_error *error_out);
void adapters_close(struct adapters *a);
/* 1 + its place; 0: there is none of that name. */
uint32_t adapters_find(const struct adapters *a, const void *name, size_t len);
