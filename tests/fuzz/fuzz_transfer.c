/*
 * Fuzz targets of the transfer protocol, one for each program (-DTARGET=...): see fuzz.c.
 *
 * `transfer` decodes one message. `xfer` is a whole conversation: a real xfer in virtual time, which leases
 * three pages and pulls from the fuzzer, meets a peer that has proved the secret and then says what it likes,
 * correctly sealed, so that no check of the seal keeps nonsense from the state machine.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/endian.h"
#include "base/mem.h"
#include "proto/wire/checksum.h"
#include "transfer/wire.h"
#include "transfer/xfer_msg.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void transfer(const uint8_t *data, size_t size)
{
    struct xfer_msg m;
    struct td_error e;
    (void)xfer_msg_decode(data, size, &m, &e);
}

/* ------------------------------------------------------------- a conversation */

enum { PAGES = 8, LEASED = 3, LEASE = 1, PULL = 2, OURS = 77, THEIRS = 666 };
static const struct kv_layout LAYOUT = {NUM_F32, 2, 1, 4, 4};

static struct {
    struct xfer *x;
    struct clock clock;
    struct wire *wire;
    struct wire_conn *conn;
    uint8_t hello_ours[XFER_MSG_HELLO_MAX], hello_theirs[XFER_MSG_HELLO_MAX];
    uint32_t hello_ours_len, hello_theirs_len, n_said, n_heard, n_lease_ends, n_pull_ends, n_placed;
    bool is_accepted, is_up, is_open, is_over, is_closed;
    size_t page_bytes;
    uint8_t *arena;
} talk;

static void say(const uint8_t *message, uint32_t n)
{
    uint8_t sealed[WIRE_HEADER_MAX];
    if (talk.is_over)
        return;
    memcpy(sealed, message, n);
    wire_send(talk.conn, sealed, xfer_msg_seal(sealed, n, ++talk.n_said), NULL, 0, NULL, NULL);
}

static void say_hello(void)
{
    const struct xfer_msg_hello h = {.incarnation = THEIRS, .layout = LAYOUT, .name = "fuzz"};
    talk.hello_ours_len = xfer_msg_put_hello(talk.hello_ours, &h);
    say(talk.hello_ours, talk.hello_ours_len);
}

static void say_auth(void)
{
    uint8_t mac[XFER_MSG_MAC_BYTES], out[WIRE_HEADER_MAX];
    struct bytes said =
        talk.is_accepted
            ? xfer_msg_said('a', talk.hello_theirs, talk.hello_theirs_len, talk.hello_ours, talk.hello_ours_len)
            : xfer_msg_said('c', talk.hello_ours, talk.hello_ours_len, talk.hello_theirs, talk.hello_theirs_len);
    secret_sign(NULL, said.data, said.len, mac);
    bytes_free(&said);
    say(out, xfer_msg_put_auth(out, mac));
}

static void on_accept(void *user, struct wire_conn *conn)
{
    conn->user = user;
    talk.conn = conn;
    talk.is_accepted = talk.is_open = true;
}

static void on_open(void *user)
{
    (void)user;
    talk.is_open = true;
}

static void on_message(void *user, const uint8_t *header, uint32_t len)
{
    struct xfer_msg m;
    (void)user;
    if (xfer_msg_unseal(header, &len, ++talk.n_heard, NULL) || xfer_msg_decode(header, len, &m, NULL))
        abort(); /* the xfer itself must keep the protocol */
    if (m.type == MSG_HELLO) {
        memcpy(talk.hello_theirs, header, len);
        talk.hello_theirs_len = len;
        if (talk.is_accepted)
            say_hello();
        else
            say_auth();
    }
    if (m.type == MSG_AUTH) {
        talk.is_up = true;
        if (talk.is_accepted)
            say_auth();
    }
}

static void *on_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t len, void **token_out)
{
    (void)user, (void)header, (void)header_len, (void)len, (void)token_out;
    return NULL;
}

static void on_payload_done(void *user, void *token, enum td_status status)
{
    (void)user, (void)token, (void)status;
}

static void on_error(void *user, enum td_status why)
{
    (void)user, (void)why;
    talk.is_over = true;
}

static void on_closed(void *user)
{
    (void)user;
    talk.is_closed = true;
}

static void on_user_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes)
{
    uint8_t sum = (uint8_t)kind;
    (void)user, (void)peer;
    for (uint32_t i = 0; i < len_bytes; i++)
        sum ^= ((const uint8_t *)data)[i];
    *(volatile uint8_t *)&sum = sum;
}

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)user, (void)id, (void)status, (void)in_doubt;
    talk.n_lease_ends++;
}

static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    (void)user, (void)id;
    if (result->n_pages > PAGES - LEASED)
        abort();
    talk.n_pull_ends++;
}

static void *place(void *user, struct xfer_id id, uint32_t index)
{
    (void)user, (void)id;
    if (talk.n_placed++ >= PAGES || index >= PAGES - LEASED)
        return NULL;
    return talk.arena + (LEASED + index) * talk.page_bytes;
}

/* Lets both sides go on until nothing happens. */
static void turn(void)
{
    uint64_t due;
    for (bool more = true; more;) {
        more = xfer_step(talk.x, &due);
        more |= wire_progress(talk.wire);
    }
}

static void pass_ms(uint64_t ms)
{
    clock_advance(&talk.clock, ms * NS_PER_MS);
    turn();
}

static void meet(bool is_pulled_from)
{
    const struct xfer_lease_params lease = {.id = {OURS, LEASE}, .duration_ns = 20 * NS_PER_S, .on_end = on_lease_end};
    const struct xfer_pull_params pull = {.id = {OURS, PULL},
                                          .address = "fuzz",
                                          .deadline_ns = clock_now(&talk.clock) + 20 * NS_PER_S,
                                          .place = place,
                                          .on_end = on_pull_end};
    struct xfer_page pages[LEASED];
    for (uint32_t i = 0; i < LEASED; i++)
        pages[i] = (struct xfer_page){talk.arena + i * talk.page_bytes, i};
    xfer_lease_grant(talk.x, &lease);
    xfer_lease_announce(talk.x, lease.id, 0, pages, LEASED - 1, 0, 2);
    xfer_lease_announce(talk.x, lease.id, LEASED - 1, pages + LEASED - 1, 1, 0, 1);
    if (is_pulled_from) {
        xfer_pull_start(talk.x, &pull);
        turn();
    } else {
        talk.n_pull_ends++; /* there is none */
        talk.conn = wire_connect(talk.wire, "xfer", 0, &talk);
        turn();
        say_hello();
    }
    turn();
    if (!talk.is_up)
        abort();
}

/* DATA with its payload. flags: bit 0: with the right checksum; bit 1: a payload of another length. */
static void say_data(const uint8_t *header, uint32_t n, uint8_t flags)
{
    static uint8_t payload[1 << 12];
    uint8_t out[WIRE_HEADER_MAX];
    struct xfer_msg m;
    uint64_t len = talk.page_bytes >> (flags >> 1 & 1);
    if (talk.is_over)
        return;
    memset(payload, 7, sizeof(payload));
    memcpy(out, header, n);
    if (flags & 1 && !xfer_msg_decode(header, n, &m, NULL) && m.type == MSG_DATA) {
        struct xfer_msg_data *d = &m.data;
        const struct checksum_identity identity = {d->id.incarnation, d->id.counter,  d->index,
                                                   d->generation,     d->layer_begin, d->layer_end};
        len = m.data.layer_end - m.data.layer_begin == 1 ? talk.page_bytes / 2 : talk.page_bytes;
        d->checksum = checksum_bytes(&identity, payload, len);
        n = xfer_msg_put_data(out, d);
    }
    wire_send(talk.conn, out, n, payload, len, NULL, NULL);
}

static void leave(void)
{
    if (talk.conn) {
        wire_close(talk.conn);
        while (!talk.is_closed)
            turn();
    }
    pass_ms(2000);
    while (!xfer_stop(talk.x))
        pass_ms(100);
    xfer_close(talk.x);
    if (talk.n_lease_ends != 1 || talk.n_pull_ends != 1)
        abort(); /* each ends exactly once */
    for (size_t i = 0; i < LEASED * talk.page_bytes; i++)
        if (talk.arena[i])
            abort(); /* a page of the lease was written */
}

/*
 * The first byte says who connects. Then steps: a byte of what (low 2 bits) and flags (the others), a u16
 * length, bytes. What: 0, 1: a sealed message; 2: DATA; 3: time passes (the length, at most 2 s).
 */
static void xfer(const uint8_t *data, size_t size)
{
    static const struct log QUIET = {.who = "fuzz", .level = LOG_ERROR, .fd = -1};
    struct xfer_hub *hub = xfer_hub_open();
    memset(&talk, 0, sizeof(talk));
    clock_init_virtual(&talk.clock, NS_PER_S);
    talk.page_bytes = kv_layout_page_bytes(&LAYOUT);
    talk.arena = mem_zalloc(PAGES * talk.page_bytes);
    const struct xfer_config config = {.backend = XFER_LOOPBACK,
                                       .hub = hub,
                                       .name = "xfer",
                                       .listen = "xfer",
                                       .incarnation = OURS,
                                       .layout = &LAYOUT,
                                       .arena = talk.arena,
                                       .arena_bytes = PAGES * talk.page_bytes,
                                       .is_driven = true,
                                       .clock = &talk.clock,
                                       .log = &QUIET,
                                       .callbacks = {.on_message = on_user_message}};
    const struct wire_config wire = {.listen = "fuzz",
                                     .hub = hub,
                                     .log = &QUIET,
                                     .events = {&talk, on_accept, on_open, on_message, on_payload, NULL,
                                                on_payload_done, NULL, on_error, on_closed}};
    if (xfer_open(&config, &talk.x, NULL) || wire_loopback_open(&wire, &talk.wire, NULL))
        abort();
    meet(size && data[0] & 1);
    for (size_t at = 1; at + 3 <= size && !talk.is_over;) {
        uint8_t what = data[at] & 3, flags = data[at] >> 2;
        uint32_t len = get_u16(data + at + 1), n = len;
        at += 3;
        if (what == 3) {
            pass_ms(len % 2000);
            continue;
        }
        n = n > size - at ? (uint32_t)(size - at) : n;
        n = n > WIRE_HEADER_MAX - XFER_MSG_SEAL_BYTES ? WIRE_HEADER_MAX - XFER_MSG_SEAL_BYTES : n;
        if (what == 2)
            say_data(data + at, n, flags);
        else
            say(data + at, n);
        at += n;
        if (flags & 4)
            turn();
    }
    turn();
    leave();
    wire_free(talk.wire);
    xfer_hub_close(hub);
    free(talk.arena);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    void (*const all[])(const uint8_t *, size_t) = {transfer, xfer};
    (void)all; /* each program uses only one of them */
    TARGET(data, size);
    return 0;
}
