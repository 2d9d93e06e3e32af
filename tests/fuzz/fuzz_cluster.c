/*
 * Fuzz targets of what clients, operators and strangers give to a cluster, one for each program
 * (-DTARGET=...): see fuzz.c.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <jansson.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/options.h"
#include "base/secret.h"
#include "proto/ask/ask_message.h"
#include "router/keys.h"
#include "transfer/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct log QUIET = {.who = "fuzz", .level = LOG_ERROR, .fd = -1};

/* A file with these bytes, which every target reads as it reads an operator's. */
static const char *as_file(const uint8_t *data, size_t size)
{
    static char path[32];
    static int fd = -1;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (fd < 0 || ftruncate(fd, 0) || pwrite(fd, data, size, 0) != (ssize_t)size || fchmod(fd, 0600))
        abort();
    return path;
}

/* A JSON request, as tandem generate --jsonl and a gateway read it. */
static void ask(const uint8_t *data, size_t size)
{
    struct ask_message *m = NULL;
    struct td_error e;
    json_t *request = json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES, NULL);
    if (request && !ask_message_make(request, &m, &e)) {
        uint8_t *packed = mem_array(tandem__v1__generate_request__get_packed_size(ask_message_get(m)) + 1, 1);
        tandem__v1__generate_request__pack(ask_message_get(m), packed);
        free(packed);
        ask_message_free(m);
    }
    json_decref(request);
}

static void keys(const uint8_t *data, size_t size)
{
    struct api_keys *k = NULL;
    struct td_error e;
    if (keys_open(as_file(data, size), &QUIET, &k, &e))
        return;
    (void)keys_find(k, "Bearer td-0123456789abcdef-00");
    keys_close(k);
}

static void secret(const uint8_t *data, size_t size)
{
    uint8_t mac[SECRET_MAC_BYTES];
    struct secret *s = NULL;
    struct td_error e;
    if (secret_open(NULL, as_file(data, size), &QUIET, &s, &e))
        return;
    secret_sign(s, "a", 1, mac);
    if (!secret_verify(s, "a", 1, mac, sizeof(mac)) || !secret_sign_by(s, 0, "a", 1, mac))
        abort();
    secret_close(s);
}

/* A file of options (--config). */
static void options(const uint8_t *data, size_t size)
{
    struct values {
        const char *text, *choice, *address;
        int64_t n, bytes, ms;
        double x, limit;
        bool flag;
    } v = {0};
    static const struct option TABLE[] = {
        {"text", OPT_STRING, offsetof(struct values, text), NULL, "TEXT", 0, 0, "a text"},
        {"choice", OPT_CHOICE, offsetof(struct values, choice), NULL, "one|two", 0, 0, "one of two"},
        {"address", OPT_ADDRESS, offsetof(struct values, address), NULL, "HOST:PORT", 0, 0, "an address"},
        {"n", OPT_INT, offsetof(struct values, n), "1", NULL, 0, 16, "a number"},
        {"bytes", OPT_BYTES, offsetof(struct values, bytes), "1K", NULL, 0, 1e15, "bytes"},
        {"ms", OPT_MS, offsetof(struct values, ms), "1s", NULL, 0, 1e6, "a time"},
        {"x", OPT_DOUBLE, offsetof(struct values, x), "0", NULL, 0, 1, "a share"},
        {"limit", OPT_LIMIT_MS, offsetof(struct values, limit), "0", NULL, 0, 1e6, "a limit"},
        {"flag", OPT_BOOL, offsetof(struct values, flag), NULL, NULL, 0, 0, "yes or no"},
        {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
    };
    char program[] = "fuzz", flag[] = "--config", path[32], *argv[] = {program, flag, path, NULL}, *strings = NULL;
    const struct options o = {.program = "fuzz", .usage = "", .about = "", .env_prefix = "TANDEM_FUZZ", .table = TABLE};
    enum options_action action;
    struct td_error e;
    snprintf(path, sizeof(path), "%s", as_file(data, size));
    if (!options_parse(&o, 3, argv, &v, NULL, NULL, &strings, &action, &e) && (v.n < 0 || v.n > 16 || v.ms < 0))
        abort();
    free(strings);
}

/* ---------------------------------------------------------------- the TCP transport */

static struct {
    struct wire *wire;
    struct wire_conn *conn;
    bool is_trusting, is_over, is_closed;
    uint8_t page[1 << 16];
} tcp_side;

static void on_accept(void *user, struct wire_conn *conn)
{
    conn->user = user;
    tcp_side.conn = conn;
    if (tcp_side.is_trusting)
        wire_trust(conn);
}

static void on_message(void *user, const uint8_t *header, uint32_t n)
{
    (void)user;
    uint8_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum ^= header[i];
    *(volatile uint8_t *)&sum = sum;
}

static void *on_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t n, void **token_out)
{
    on_message(user, header, header_len);
    if (!tcp_side.is_trusting)
        abort(); /* a stranger has brought a payload */
    *token_out = user;
    return n <= sizeof(tcp_side.page) ? tcp_side.page : NULL;
}

static void on_payload_done(void *user, void *token, enum td_status status)
{
    (void)user, (void)token, (void)status;
}

static void on_error(void *user, enum td_status why)
{
    (void)user, (void)why;
    tcp_side.is_over = true;
}

static void on_closed(void *user)
{
    (void)user;
    tcp_side.is_closed = true;
}

static void tcp_open(struct secret *encrypt)
{
    const struct wire_config c = {.listen = "127.0.0.1:0",
                                  .encrypt = encrypt,
                                  .log = &QUIET,
                                  .events = {.user = &tcp_side,
                                             .on_accept = on_accept,
                                             .on_message = on_message,
                                             .on_payload = on_payload,
                                             .on_payload_done = on_payload_done,
                                             .on_error = on_error,
                                             .on_closed = on_closed}};
    if (!tcp_side.wire && wire_tcp_open(&c, &tcp_side.wire, NULL))
        abort();
}

/* A port of the client's side is free again a second after its connection: more than 14,000 runs in one
 * second have to wait for one. */
static int connect_to_wire(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    a.sin_port = htons((uint16_t)atoi(strrchr(tcp_side.wire->address, ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(fd, (struct sockaddr *)&a, sizeof(a))) {
        if (errno != EADDRNOTAVAIL) {
            perror("connect");
            abort();
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return fd;
}

/* The first byte says whether the peer has proved itself; the rest is what it sends. */
static void send_to_wire(const uint8_t *data, size_t size)
{
    if (!size)
        return;
    int fd = connect_to_wire();
    tcp_side.is_trusting = data[0] & 1;
    tcp_side.is_over = tcp_side.is_closed = false;
    tcp_side.conn = NULL;
    ssize_t sent = send(fd, data + 1, size - 1, MSG_NOSIGNAL);
    shutdown(fd, SHUT_WR);
    while (!tcp_side.conn || !tcp_side.is_over)
        wire_progress(tcp_side.wire);
    wire_close(tcp_side.conn);
    while (!tcp_side.is_closed)
        wire_progress(tcp_side.wire);
    close(fd);
    (void)sent;
}

static void tcp(const uint8_t *data, size_t size)
{
    tcp_open(NULL);
    send_to_wire(data, size);
}

static void tcp_tls(const uint8_t *data, size_t size)
{
    static struct secret *s;
    struct td_error e;
    if (!s && secret_open("a secret", NULL, &QUIET, &s, &e))
        abort();
    tcp_open(s);
    send_to_wire(data, size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    void (*const all[])(const uint8_t *, size_t) = {ask, keys, secret, options, tcp, tcp_tls};
    (void)all; /* each program uses only one of them */
    TARGET(data, size);
    return 0;
}
