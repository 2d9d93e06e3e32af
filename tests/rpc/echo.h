/*
 * Shared by the rpc tests: the Echo service, a recorder of what a client call sees, and a child process to
 * kill.
 *
 * Threads: everything here has its own locks. A thread of its own feeds each Count call, as an engine would.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "echo.pb-c.h"
#include "proto/rpc/rpc.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 10 /* factor by which sanitizers make things slower */
#else
#define SLOWER 1
#endif

uint64_t echo_now_ms(void);
/* "ADDRESS:0" of this host that is not loopback; false: there is none. */
bool echo_own_address(char *out, size_t out_bytes);

/* ------------------------------------------------------------------ service */

struct echo_stats {
    uint32_t n_opened, n_ended, n_half_closed, n_requests, n_full;
    uint32_t n_double_ends; /* must stay 0 */
    uint32_t n_overlaps;    /* two callbacks of one call at a time: must stay 0 */
    enum rpc_code last_code;
    char last_text[256];
    uint64_t last_end_ms;
};

struct echo_service;
struct echo_config {
    const char *listen; /* NULL: 127.0.0.1:0 */
    uint32_t max_message_bytes;
    uint64_t max_queued_bytes;
};
struct echo_service *echo_open(const struct echo_config *config); /* NULL: could not listen */
/* Closes the server, and waits for the feeding threads. */
void echo_close(struct echo_service *e);
struct rpc_server *echo_server(struct echo_service *e);
const char *echo_address(struct echo_service *e);
struct echo_stats echo_stats(struct echo_service *e);
/* Waits until n calls have ended; false after timeout_ms. */
bool echo_wait_ended(struct echo_service *e, uint32_t n, int timeout_ms);
bool echo_wait_opened(struct echo_service *e, uint32_t n, int timeout_ms);

/* ------------------------------------------------------------------ client */

struct rpc_client *echo_client(const char *address, uint32_t max_message_bytes);

struct record; /* what the client of a call has seen */
struct record_view {
    uint64_t n_messages;
    bool in_order; /* indices of Count rose by one, callbacks did not overlap, none came after the end */
    uint32_t n_ends;
    enum rpc_code code;
    char text[1200];
    uint32_t retry_after_ms;
    uint64_t end_ms;
    char last_text[64], last_header[64]; /* from the last EchoResponse */
};
struct record *record_open(void);
void record_close(struct record *r); /* the call must be over */
struct record_view record_view(struct record *r);
bool record_wait_end(struct record *r, int timeout_ms);
bool record_wait_messages(struct record *r, uint64_t n, int timeout_ms);
/* While it is set, the next on_message blocks, like a client that does not read. */
void record_block(struct record *r, bool block);
struct rpc_call *record_call(struct record *r);

enum td_status record_start(struct record *r, struct rpc_client *c, const char *path, int64_t timeout_ms);
enum td_status record_start_with(struct record *r, struct rpc_client *c, const char *path, int64_t timeout_ms,
                                 const char *const *headers);
/* Starts Count: sends its request and closes the sending side. */
void record_count(struct record *r, struct rpc_client *c, uint64_t n, uint32_t payload_bytes);

#define ECHO_PATH  "/tandem.test.Echo/Echo"
#define COUNT_PATH "/tandem.test.Echo/Count"
#define CHAT_PATH  "/tandem.test.Echo/Chat"

/* ------------------------------------------------------------------ child */

struct child {
    pid_t pid;
    int in_fd, out_fd; /* its stdin and stdout */
};
struct child child_start(const char *mode, const char *address); /* $ECHO_TOOL MODE ADDRESS */
bool child_read_line(struct child *c, char *line, size_t cap);
void child_end(struct child *c); /* SIGKILL and reap */
