/* The adapters that a worker serves, under the names that requests use. Immutable after opening. */
#pragma once

#include "model/adapter.h"

enum { MAX_ADAPTERS = 64, MAX_ADAPTER_NAME = 64 };

struct adapters {
    uint32_t n;
    char names[MAX_ADAPTERS][MAX_ADAPTER_NAME + 1];
    struct adapter *all[MAX_ADAPTERS];
};

/* option: "NAME=DIR,..."; NULL: no adapters. TD_ERR_INVALID or adapter_open()'s error, with the name. */
enum td_status adapters_open(const char *option, const struct model_config *config, struct adapters *out,
                             struct td_error *error_out);
void adapters_close(struct adapters *a);
/* Returns 1 + the adapter's place in all[], or 0 if no adapter has that name. */
uint32_t adapters_find(const struct adapters *a, const void *name, size_t len);
