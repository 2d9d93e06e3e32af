/* The device on which a test computes (TANDEM_DEVICE: cpu or cuda), whether the machine has it, and where
 * ranks are. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/kernels.h"

static inline enum kernels_device device_wanted(void)
{
    const char *name = getenv("TANDEM_DEVICE");
    return name && !strcmp(name, "cuda") ? DEVICE_CUDA : DEVICE_CPU;
}

/* Whether all ranks are on one device. With TANDEM_RANK_DEVICES=next each rank has a device of its own. */
static inline bool ranks_share_device(void)
{
    const char *where = getenv("TANDEM_RANK_DEVICES");
    return !where || strcmp(where, "next") != 0;
}

/* TANDEM_RANKS=NxM gives the numbers of tensor-parallel ranks and of pipeline stages; default: one each. */
static inline void ranks_wanted(uint32_t *n_tensor_out, uint32_t *n_pipeline_out)
{
    const char *text = getenv("TANDEM_RANKS");
    *n_tensor_out = *n_pipeline_out = 1;
    if (text && sscanf(text, "%ux%u", n_tensor_out, n_pipeline_out) != 2)
        abort();
}

/* Finds out why a device can't be opened; an empty text: it can. Asks in a process of its own, because CUDA's
 * state does not survive a fork. With TANDEM_DEVICE_REQUIRED the test fails instead. */
static inline void ask_device(enum kernels_device device, char *why, size_t why_bytes)
{
    int ends[2];
    if (pipe(ends))
        abort();
    pid_t child = fork();
    if (!child) {
        struct kernels *k = NULL;
        struct td_error error = {0};
        struct kernels_config config = {.device = device};
        if (kernels_open(&config, &k, &error) && write(ends[1], error.text, strlen(error.text)) < 0)
            _exit(1);
        kernels_close(k);
        _exit(0);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], why, why_bytes - 1);
    why[n > 0 ? n : 0] = 0;
    close(ends[0]);
    waitpid(child, NULL, 0);
    if (*why && getenv("TANDEM_DEVICE_REQUIRED")) {
        fprintf(stderr, "%s\n", why);
        exit(1);
    }
}

/* True: the machine does not have the device, and the program has printed its skip line. */
static inline bool skip_without_device(const char *name)
{
    char why[256] = "";
    ask_device(device_wanted(), why, sizeof(why));
    if (*why)
        printf("ok 1 - %s # SKIP %s\n1..1\n", name, why);
    return *why;
}
