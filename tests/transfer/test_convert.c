/* Holders and readers with pages of different length: every token lands where the reader's layout says, or the peer is refused. */
#include "tests/tap.h"
#include "tests/transfer/node.h"
#include "transfer/convert.h"

enum { LAYERS = 3, HEADS = 2, DIM = 16, TOKENS_MAX = 256 };
#define LONG (20 * NS_PER_S)

static struct kv_layout layout_of(uint32_t page_tokens)
{
    return (struct kv_layout){NUM_F16, LAYERS, HEADS, DIM, page_tokens};
}

/* Element i of a token of one head, K or V, of a layer: the same wherever it lies. */
static uint16_t element(uint32_t layer, uint32_t head, uint32_t token, uint32_t i)
{
    return (uint16_t)random_at(layer * 64 + head, token, i);
}

static uint16_t *token_at(uint8_t *page, const struct kv_layout *l, uint32_t layer, uint32_t head, uint32_t slot)
{
    size_t at = (layer * 2 * HEADS + head) * kv_layout_head_bytes(l) + (size_t)slot * DIM * 2;
    return (uint16_t *)(void *)(page + at);
}

static void fill(uint8_t *arena, const struct kv_layout *l, uint32_t n_tokens)
{
    for (uint32_t t = 0; t < n_tokens; t++)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t head = 0; head < 2 * HEADS; head++)
                for (uint32_t i = 0; i < DIM; i++)
                    token_at(arena + t / l->page_tokens * kv_layout_page_bytes(l), l, layer, head,
                             t % l->page_tokens)[i] = element(layer, head, t, i);
}

static uint32_t count_wrong(uint8_t *arena, const struct kv_layout *l, uint32_t n_tokens)
{
    uint32_t n = 0;
    for (uint32_t t = 0; t < n_tokens; t++)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t head = 0; head < 2 * HEADS; head++)
                for (uint32_t i = 0; i < DIM; i++)
                    n += token_at(arena + t / l->page_tokens * kv_layout_page_bytes(l), l, layer, head,
                                  t % l->page_tokens)[i] != element(layer, head, t, i);
    return n;
}

static const struct {
    uint32_t holder, reader, holder_pages;
} SIZES[] = {{16, 32, 4}, {16, 64, 4}, {16, 64, 7}, {32, 64, 3}, {64, 16, 2}, {64, 32, 3}, {32, 16, 1}, {1, 256, 256}};
enum { N_SIZES = sizeof(SIZES) / sizeof(SIZES[0]) };
static const char *const BACKENDS[] = {"loopback", "tcp", "auto", "mapped"};
enum { N_BACKENDS = 4 };

START_TEST(test_convert_every_token_lands_in_its_slot)
{
    struct kv_layout theirs = layout_of(SIZES[_i].holder), ours = layout_of(SIZES[_i].reader);
    uint32_t n = SIZES[_i].holder_pages, begin, end;
    uint32_t n_ours = (uint32_t)convert_pages_begun(&ours, &theirs, n);
    uint8_t *from = mem_array(n, kv_layout_page_bytes(&theirs)), *to = mem_array(n_ours, kv_layout_page_bytes(&ours));
    void **places = mem_array(n_ours, sizeof(places[0]));
    for (uint32_t i = 0; i < n_ours; i++)
        places[i] = to + i * kv_layout_page_bytes(&ours);
    fill(from, &theirs, n * theirs.page_tokens);
    for (uint32_t i = n; i-- > 0;) { /* in no particular order */
        convert_range(&ours, &theirs, i, &begin, &end);
        ck_assert(begin < end && end <= n_ours);
        const uint8_t *page = from + i * kv_layout_page_bytes(&theirs);
        convert_page(&ours, &theirs, i, 1, LAYERS, page + kv_layout_layer_bytes(&theirs), places);
        convert_page(&ours, &theirs, i, 0, 1, page, places);
    }
    ck_assert_uint_eq(count_wrong(to, &ours, n * theirs.page_tokens), 0);
    ck_assert_uint_eq(convert_pages_full(&ours, &theirs, n), n * theirs.page_tokens / ours.page_tokens);
    free(from);
    free(to);
    free(places);
}
END_TEST

static struct xfer_hub *hub;

static struct node *open_node(const char *backend, const char *name, uint32_t page_tokens, uint32_t n_pages)
{
    return node_open(&(struct node_params){
        .backend = backend, .hub = hub, .name = name, .layout = layout_of(page_tokens), .n_pages = n_pages});
}

START_TEST(test_convert_pages_arrive_over_every_backend)
{
    const char *backend = BACKENDS[_i % N_BACKENDS];
    uint32_t which = (uint32_t)_i / N_BACKENDS, n = SIZES[which].holder_pages, tokens = n * SIZES[which].holder;
    hub = xfer_hub_open();
    uint32_t n_ours = (tokens + SIZES[which].reader - 1) / SIZES[which].reader;
    struct node *h = open_node(backend, "holder", SIZES[which].holder, n);
    struct node *r = open_node(backend, "reader", SIZES[which].reader, n_ours);
    for (uint64_t counter = 1; counter <= 2; counter++) { /* the second goes by the mapped arena, if there is one */
        fill(h->arena, &h->layout, tokens);
        memset(r->arena, 0, r->arena_bytes);
        node_grant(h, counter, LONG);
        for (uint16_t layer = 0; layer < LAYERS; layer++)
            node_announce(h, counter, 0, 0, n, layer, (uint16_t)(layer + 1));
        xfer_lease_finish(h->x, node_id(counter), n, NULL, 0);
        node_pull(r, counter, h->address, 0, LONG);
        NODE_WAIT(r, r->pulls[counter].ends);
        NODE_WAIT(h, h->leases[counter].ends); /* until then its pages stay as they are */
        ck_assert_int_eq(r->pulls[counter].status, TD_OK);
        ck_assert_uint_eq(r->pulls[counter].n_pages, n_ours);
        ck_assert_uint_eq(r->pulls[counter].placed, n_ours);
        ck_assert_uint_eq(r->pulls[counter].progress, tokens / SIZES[which].reader);
        ck_assert_uint_eq(r->pulls[counter].bytes, n * h->page_bytes);
        ck_assert_uint_eq(count_wrong(r->arena, &r->layout, tokens), 0);
    }
    node_check_quiet(r);
    node_check_quiet(h);
    node_close(r);
    node_close(h);
    xfer_hub_close(hub);
}
END_TEST

/* However many of its pages the reader has: none is written, and of the holder's none is asked for that lies in those alone. */
START_TEST(test_convert_pages_that_are_had_stay_as_they_are)
{
    uint32_t n = SIZES[_i].holder_pages, reader = SIZES[_i].reader, tokens = n * SIZES[_i].holder;
    uint32_t n_ours = (tokens + reader - 1) / reader;
    hub = xfer_hub_open();
    struct node *h = open_node("loopback", "holder", SIZES[_i].holder, n);
    struct node *r = open_node("loopback", "reader", reader, n_ours);
    fill(h->arena, &h->layout, tokens);
    for (uint32_t have = 0; have <= n_ours; have++) {
        uint32_t n_had = have * reader / SIZES[_i].holder < n ? have * reader / SIZES[_i].holder : n;
        memset(r->arena, 0x5a, r->arena_bytes);
        node_grant(h, have, LONG);
        node_announce(h, have, 0, 0, n, 0, LAYERS);
        xfer_lease_finish(h->x, node_id(have), n, NULL, 0);
        node_pull_rest(r, have, h->address, 0, LONG, have);
        NODE_WAIT(r, r->pulls[have].ends);
        ck_assert_int_eq(r->pulls[have].status, TD_OK);
        ck_assert_uint_eq(r->pulls[have].n_pages, n_ours);
        ck_assert_uint_eq(r->pulls[have].placed, n_ours - have);
        ck_assert_uint_eq(r->pulls[have].bytes, (n - n_had) * h->page_bytes);
        for (size_t i = 0; i < have * r->page_bytes; i++)
            ck_assert_uint_eq(r->arena[i], 0x5a);
        fill(r->arena, &r->layout, have * reader);
        ck_assert_uint_eq(count_wrong(r->arena, &r->layout, tokens), 0);
    }
    node_check_quiet(r);
    node_check_quiet(h);
    node_close(r);
    node_close(h);
    xfer_hub_close(hub);
}
END_TEST

START_TEST(test_convert_more_pages_than_the_reader_has_end_the_pull)
{
    hub = xfer_hub_open();
    struct node *h = open_node("loopback", "holder", 64, 2), *r = open_node("loopback", "reader", 16, 7);
    node_grant(h, 1, LONG);
    node_announce(h, 1, 0, 0, 2, 0, LAYERS);
    xfer_lease_finish(h->x, node_id(1), 2, NULL, 0);
    node_pull(r, 1, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[1].ends);
    ck_assert_int_ne(r->pulls[1].status, TD_OK);
    node_check_quiet(r);
    node_close(r);
    node_close(h);
    xfer_hub_close(hub);
}
END_TEST

START_TEST(test_convert_refuses_other_differences_by_name)
{
    struct td_error error = {""};
    const struct kv_layout ours = layout_of(16);
    struct {
        struct kv_layout theirs;
        const char *field;
    } cases[] = {{ours, "page_tokens"}, {ours, "n_kv_heads"}, {ours, "n_layers"}, {ours, "head_dim"}, {ours, "dtype"}};
    cases[0].theirs.page_tokens = 24;
    cases[1].theirs.n_kv_heads = 1; /* split by heads: nothing says which */
    cases[2].theirs.n_layers = 4;
    cases[3].theirs.head_dim = 8;
    cases[4].theirs.dtype = NUM_BF16;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ck_assert_int_eq(convert_check(&ours, &cases[i].theirs, &error), TD_ERR_VERSION);
        ck_assert_msg(strstr(error.text, cases[i].field) != NULL, "%s", error.text);
        cases[i].theirs.page_tokens = 64; /* a page that fits does not make up for it */
        ck_assert(i == 0 || convert_check(&ours, &cases[i].theirs, &error) == TD_ERR_VERSION);
    }
    const struct kv_layout longer = layout_of(64);
    ck_assert_int_eq(convert_check(&ours, &longer, &error), TD_OK);
    ck_assert_int_eq(convert_check(&longer, &ours, &error), TD_OK);
}
END_TEST

START_TEST(test_convert_peers_whose_pages_do_not_fit_never_meet)
{
    hub = xfer_hub_open();
    struct node *h = open_node("loopback", "holder", 24, 2), *r = open_node("loopback", "reader", 16, 2);
    node_pull(r, 1, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[1].ends);
    ck_assert_int_eq(r->pulls[1].status, TD_ERR_VERSION);
    node_close(r);
    node_close(h);
    xfer_hub_close(hub);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("convert");
    TCase *tc = tcase_create("convert");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, test_convert_every_token_lands_in_its_slot, 0, N_SIZES);
    tcase_add_loop_test(tc, test_convert_pages_arrive_over_every_backend, 0, N_SIZES * N_BACKENDS);
    tcase_add_loop_test(tc, test_convert_pages_that_are_had_stay_as_they_are, 0, N_SIZES);
    tcase_add_test(tc, test_convert_more_pages_than_the_reader_has_end_the_pull);
    tcase_add_test(tc, test_convert_refuses_other_differences_by_name);
    tcase_add_test(tc, test_convert_peers_whose_pages_do_not_fit_never_meet);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
