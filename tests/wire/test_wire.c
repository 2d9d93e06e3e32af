/* Golden bytes of every binary format; damaged bytes are refused. */
#include <stdlib.h>

#include "base/random.h"
#include "proto/wire/block_header.h"
#include "proto/wire/checksum.h"
#include "proto/wire/events.h"
#include "proto/wire/store_msg.h"
#include "tests/tap.h"

static void hex(const void *data, size_t n, char *out)
{
    for (size_t i = 0; i < n; i++)
        sprintf(out + 2 * i, "%02x", ((const uint8_t *)data)[i]);
    out[2 * n] = 0;
}

static const struct kv_layout LAYOUT = {NUM_BF16, 16, 8, 64, 16};

START_TEST(test_block_key_chain_matches_published_vectors)
{
    struct block_key fingerprint = {{0}};
    uint32_t tokens[33];
    struct block_key keys[2];
    char text[33];
    for (uint32_t i = 0; i < 33; i++)
        tokens[i] = i;
    struct block_key root = block_key_root(&fingerprint, NULL, 0, "salt", 4);
    ck_assert_uint_eq(block_keys(&root, tokens, 33, 16, keys), 2);
    block_key_hex(&root, text);
    ck_assert_str_eq(text, "a2b54ae30cdb8d5ac01bd9a080c32dba");
    block_key_hex(&keys[0], text);
    ck_assert_str_eq(text, "6964eedfecde31244ae14224b0fbbdb0");
    block_key_hex(&keys[1], text);
    ck_assert_str_eq(text, "e0d113cda86c48bb2092cc98521fb466");
}
END_TEST

START_TEST(test_block_key_depends_on_salt_adapter_and_every_token)
{
    struct block_key f = {{1}}, a = block_key_root(&f, NULL, 0, "ab", 2), b = block_key_root(&f, "a", 1, "b", 1);
    uint32_t tokens[16] = {0}, other[16] = {0};
    other[15] = 1;
    struct block_key x = block_key_next(&a, tokens, 16), y = block_key_next(&a, other, 16);
    ck_assert(!block_key_equal(&a, &b));
    ck_assert(!block_key_equal(&x, &y));
}
END_TEST

START_TEST(test_kv_layout_golden_bytes_and_round_trip)
{
    uint8_t b[KV_LAYOUT_WIRE_BYTES];
    char text[64];
    struct kv_layout back;
    kv_layout_encode(&LAYOUT, b);
    hex(b, sizeof(b), text);
    ck_assert_str_eq(text, "010003001000000008000000400000001000000000000000");
    ck_assert_int_eq(kv_layout_decode(b, sizeof(b), &back, NULL), TD_OK);
    ck_assert_int_eq(kv_layout_match(&LAYOUT, &back, NULL), TD_OK);
    ck_assert_uint_eq(kv_layout_page_bytes(&LAYOUT), 2u * 16 * 8 * 16 * 64 * 2);
}
END_TEST

START_TEST(test_kv_layout_kinds_and_windows_travel_where_zeroes_were)
{
    uint8_t b[KV_LAYOUT_WIRE_BYTES];
    struct kv_layout back, latent = LAYOUT, windowed = LAYOUT;
    struct td_error e;
    latent.kind = KV_LATENT;
    latent.n_kv_heads = 1;
    windowed.window = 0x10203;
    kv_layout_encode(&latent, b);
    ck_assert_uint_eq(b[3], 1);
    ck_assert_int_eq(kv_layout_decode(b, sizeof(b), &back, &e), TD_OK);
    ck_assert_int_eq(kv_layout_match(&latent, &back, &e), TD_OK);
    ck_assert_uint_eq(kv_layout_page_bytes(&back), 16u * 16 * 64 * 2); /* a layout with one plane */
    latent.n_kv_heads = 2;
    ck_assert_int_eq(kv_layout_check(&latent, &e), TD_ERR_INVALID);
    kv_layout_encode(&windowed, b);
    ck_assert_mem_eq(b + 20, "\3\2\1", 4);
    ck_assert_int_eq(kv_layout_decode(b, sizeof(b), &back, &e), TD_OK);
    ck_assert_int_eq(kv_layout_match(&LAYOUT, &back, &e), TD_ERR_VERSION);
    ck_assert_ptr_nonnull(strstr(e.text, "window"));
    ck_assert_uint_eq(kv_layout_first_kept(&back, 0x10203), 0);
    ck_assert_uint_eq(kv_layout_first_kept(&back, 0x10203 + 40), 2);
    ck_assert_uint_eq(kv_layout_first_kept(&LAYOUT, 1 << 30), 0);
}
END_TEST

START_TEST(test_kv_layout_mismatch_names_the_field)
{
    static const char *const FIELDS[] = {"dtype", "n_layers", "n_kv_heads", "head_dim", "page_tokens"};
    for (int i = 0; i < 5; i++) {
        struct kv_layout other = LAYOUT;
        struct td_error e;
        uint32_t *fields[] = {NULL, &other.n_layers, &other.n_kv_heads, &other.head_dim, &other.page_tokens};
        if (i)
            ++*fields[i];
        else
            other.dtype = NUM_F32;
        ck_assert_int_eq(kv_layout_match(&LAYOUT, &other, &e), TD_ERR_VERSION);
        ck_assert_ptr_nonnull(strstr(e.text, FIELDS[i]));
    }
}
END_TEST

START_TEST(test_kv_layout_absurd_values_are_refused)
{
    uint8_t b[KV_LAYOUT_WIRE_BYTES];
    struct kv_layout back;
    /* Each field with its largest value; 65,535 is a valid window. */
    for (size_t at = 2; at < 24; at += at == 18 ? 4 : 2) {
        kv_layout_encode(&LAYOUT, b);
        b[at] = b[at + 1] = 0xff;
        ck_assert_int_ne(kv_layout_decode(b, sizeof(b), &back, NULL), TD_OK);
    }
    ck_assert_int_ne(kv_layout_decode(b, 23, &back, NULL), TD_OK);
}
END_TEST

START_TEST(test_checksum_covers_bytes_and_identity)
{
    uint8_t data[1000] = {1, 2, 3};
    struct checksum_identity id = {1, 2, 3, 4, 5, 6};
    uint64_t sum = checksum_bytes(&id, data, sizeof(data));
    ck_assert_uint_eq(sum, 0x393e3e47e2a6bca5ull);
    ck_assert_uint_ne(sum, checksum_bytes(&id, data, sizeof(data) - 1));
    struct checksum_identity other[] = {{2, 2, 3, 4, 5, 6}, {1, 3, 3, 4, 5, 6}, {1, 2, 4, 4, 5, 6},
                                        {1, 2, 3, 5, 5, 6}, {1, 2, 3, 4, 6, 6}, {1, 2, 3, 4, 5, 7}};
    for (int i = 0; i < 6; i++)
        ck_assert_uint_ne(sum, checksum_bytes(&other[i], data, sizeof(data)));
    data[999] ^= 1;
    ck_assert_uint_ne(sum, checksum_bytes(&id, data, sizeof(data)));
}
END_TEST

START_TEST(test_checksum_copy_is_the_sum_of_what_was_copied)
{
    static const size_t LENGTHS[] = {1, 8, 240, 241, 1024, 4095, 4096, 4097, 65536, 70001};
    static uint8_t from[70100] __attribute__((aligned(64))), to[70200] __attribute__((aligned(64)));
    const struct checksum_identity id = {1, 2, 3, 4, 5, 6};
    for (size_t i = 0; i < sizeof(from); i++)
        from[i] = (uint8_t)random_mix(i);
    for (size_t i = 0; i < sizeof(LENGTHS) / sizeof(LENGTHS[0]); i++) {
        for (size_t at = 0; at < 64; at += 7) { /* at any offset */
            size_t n = LENGTHS[i], other = (at * 3) % 64;
            memset(to, 0xee, sizeof(to));
            ck_assert_uint_eq(checksum_copy(&id, to + other, from + at, n), checksum_bytes(&id, from + at, n));
            ck_assert_mem_eq(to + other, from + at, n);
            ck_assert_uint_eq(to[other + n], 0xee);
            ck_assert(!other || to[other - 1] == 0xee);
        }
    }
}
END_TEST

/* The reference is memcpy and checksum_bytes(). Lengths are around the blocks of the sum and the chunks of
 * the ways, and random. */
START_TEST(test_checksum_ways_all_give_the_same_bits_at_any_length_and_place)
{
    enum { MOST = 70000, SPACE = MOST + 256, TURNS = 400 };
    static uint8_t from[SPACE] __attribute__((aligned(64))), to[SPACE] __attribute__((aligned(64)));
    static const size_t EDGES[] = {0, 64, 240, 256, 1024, 1280, 4096, 8192, 65536};
    const uint32_t n_ways = checksum_choose()->n_ways;
    for (size_t i = 0; i < SPACE; i++)
        from[i] = (uint8_t)random_mix(i);
    for (uint64_t turn = 0; turn < TURNS; turn++) {
        uint64_t r = random_mix(turn);
        size_t edge = EDGES[r % (sizeof(EDGES) / sizeof(EDGES[0]))] + r / 16 % 131;
        size_t n = turn % 2 ? r % MOST : (edge > 65 ? edge - 65 : edge);
        size_t at = turn % 3 ? r >> 40 & 127 : 0, there = 64 + (turn % 5 ? r >> 50 & 63 : 0);
        const struct checksum_identity id = {r, turn, 3, 4, 5, 6};
        uint64_t expected = checksum_bytes(&id, from + at, n);
        for (uint32_t way = 0; way < n_ways; way++) {
            memset(to, 0xee, sizeof(to));
            ck_assert_msg(checksum_copy_by(way, &id, to + there, from + at, n) == expected,
                          "%s: %zu bytes from %zu to %zu: another sum", checksum_choose()->ways[way].name, n, at,
                          there);
            ck_assert_mem_eq(to + there, from + at, n);
            ck_assert_uint_eq(to[there - 1], 0xee);
            ck_assert_uint_eq(to[there + n], 0xee);
        }
    }
}
END_TEST

/* Measured again, the chosen way is still about as fast as any other. At most three tries, because other work
 * on the machine disturbs the measurement. */
START_TEST(test_checksum_choice_is_the_fastest_way)
{
    const struct checksum_choice *choice = checksum_choose();
    double share = 0;
    ck_assert_ptr_eq(choice, checksum_choose());
    ck_assert_uint_lt(choice->chosen, choice->n_ways);
    for (int try = 0; try < 3 && share < 0.8; try++) {
        struct checksum_choice again;
        checksum_measure(&again);
        ck_assert_uint_eq(again.n_ways, choice->n_ways);
        ck_assert(again.memcpy_gb_per_s > 0);
        for (uint32_t i = 0; i < again.n_ways; i++)
            ck_assert_msg(again.ways[i].gb_per_s > 0, "%s sums wrongly", again.ways[i].name);
        share = again.ways[choice->chosen].gb_per_s / again.ways[again.chosen].gb_per_s;
    }
    if (getenv("TANDEM_SANITIZE")) /* the ways then cost what their instrumentation costs */
        return;
    ck_assert_msg(share >= 0.8, "%s has %.2f of the fastest", choice->ways[choice->chosen].name, share);
}
END_TEST

/* Changes that a sum of words would not notice: the same bytes in another order, or bytes of an older
 * page. */
START_TEST(test_checksum_sees_swapped_shifted_and_stale_bytes)
{
    enum { BYTES = 65536, PART = 64 };
    static uint8_t page[BYTES], other[BYTES];
    const struct checksum_identity id = {1, 2, 3, 4, 5, 6};
    for (size_t i = 0; i < BYTES; i++)
        page[i] = (uint8_t)random_mix(i);
    const uint64_t sum = checksum_bytes(&id, page, BYTES);
    for (size_t at = 0; at + 2 * PART <= BYTES; at += 1000 / 8 * 8) { /* swaps neighbouring pieces */
        for (size_t n = 1; n <= PART; n *= 2) {
            memcpy(other, page, BYTES);
            memcpy(other + at, page + at + n, n);
            memcpy(other + at + n, page + at, n);
            ck_assert_uint_ne(checksum_bytes(&id, other, BYTES), sum);
        }
    }
    for (size_t n = 1; n <= 4096; n *= 2) { /* shifts all bytes */
        memcpy(other, page + n, BYTES - n);
        memcpy(other + BYTES - n, page, n);
        ck_assert_uint_ne(checksum_bytes(&id, other, BYTES), sum);
    }
    /* Replaces a piece by that of an older page, then by zeros. */
    for (size_t at = 0; at < BYTES; at += 4096) {
        memcpy(other, page, BYTES);
        for (size_t i = 0; i < 64; i++)
            other[at + i] = (uint8_t)random_mix(at + i + BYTES);
        ck_assert_uint_ne(checksum_bytes(&id, other, BYTES), sum);
        memset(other + at, 0, 64);
        ck_assert_uint_ne(checksum_bytes(&id, other, BYTES), sum);
    }
}
END_TEST

START_TEST(test_events_golden_bytes_and_round_trip)
{
    struct block_event ev = {BLOCK_ADDED, TIER_SSD, 7, {{0xaa, 0xbb}}};
    struct events_header h = {.incarnation = 0x1122334455667788, .first_sequence = 5, .count = 1}, back;
    struct bytes b = {0};
    char text[200];
    events_encode(&h, &ev, &b);
    hex(b.data, b.len, text);
    ck_assert_str_eq(text, "010000000100000088776655443322110500000000000000"
                           "0102000007000000aabb0000000000000000000000000000");
    ck_assert_int_eq(events_decode(b.data, b.len, &back), TD_OK);
    ck_assert_uint_eq(back.first_sequence, 5);
    ck_assert_int_eq(events_at(b.data, 0).tier, TIER_SSD);
    ck_assert_int_ne(events_decode(b.data, b.len - 1, &back), TD_OK);
    b.data[24] = 9; /* an unknown kind */
    ck_assert_int_ne(events_decode(b.data, b.len, &back), TD_OK);
    bytes_free(&b);
}
END_TEST

START_TEST(test_block_header_every_flipped_bit_is_noticed)
{
    size_t n = kv_layout_page_bytes(&LAYOUT);
    uint8_t *value = mem_zalloc(BLOCK_HEADER_BYTES + n);
    struct block_key key = {{1, 2, 3}};
    struct block_header h = {.key = key, .layout = LAYOUT, .n_tokens = 16, .index = 3, .payload_bytes = n}, back;
    for (size_t i = 0; i < n; i++)
        value[BLOCK_HEADER_BYTES + i] = (uint8_t)(i * 7);
    h.checksum = block_checksum(&key, 3, value + BLOCK_HEADER_BYTES, n);
    block_header_encode(&h, value);
    ck_assert_int_eq(block_verify(value, BLOCK_HEADER_BYTES + n, &key, &LAYOUT, &back), TD_OK);
    for (size_t bit = 0; bit < BLOCK_HEADER_BYTES * 8; bit++) {
        value[bit / 8] ^= (uint8_t)(1 << bit % 8);
        ck_assert_int_ne(block_verify(value, BLOCK_HEADER_BYTES + n, &key, &LAYOUT, &back), TD_OK);
        value[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (size_t i = 0; i < n; i += 997) {
        value[BLOCK_HEADER_BYTES + i] ^= 0x10;
        ck_assert_int_eq(block_verify(value, BLOCK_HEADER_BYTES + n, &key, &LAYOUT, &back), TD_ERR_CHECKSUM);
        value[BLOCK_HEADER_BYTES + i] ^= 0x10;
    }
    struct block_key other = {{9}};
    ck_assert_int_ne(block_verify(value, BLOCK_HEADER_BYTES + n, &other, &LAYOUT, &back), TD_OK);
    ck_assert_int_ne(block_verify(value, BLOCK_HEADER_BYTES + n - 1, &key, &LAYOUT, &back), TD_OK);
    free(value);
}
END_TEST

/* Golden bytes of the fields that were reserved before there were codecs; all other bytes are unchanged. */
START_TEST(test_block_header_golden_bytes)
{
    struct block_header h = {.key = {{0xaa, 0xbb}},
                             .layout = LAYOUT,
                             .n_tokens = 16,
                             .index = 3,
                             .tenant = 0x01020304,
                             .codec = BLOCK_INT8,
                             .payload_bytes = 0x1122,
                             .checksum = 0x1122334455667788},
                        back;
    uint8_t b[BLOCK_HEADER_BYTES];
    char text[2 * BLOCK_HEADER_BYTES + 1];
    block_header_encode(&h, b);
    hex(b, 80, text);
    ck_assert_str_eq(text, "54444b4201005800aabb0000000000000000000000000000"
                           "010003001000000008000000400000001000000000000000"
                           "1000000003000000221100000000000088776655443322110200000004030201");
    ck_assert_int_eq(block_header_decode(b, sizeof(b), &back), TD_OK);
    ck_assert(back.codec == BLOCK_INT8 && back.tenant == 0x01020304);
    h.codec = BLOCK_CODECS; /* a codec of a newer version */
    block_header_encode(&h, b);
    ck_assert_int_eq(block_header_decode(b, sizeof(b), &back), TD_ERR_VERSION);
}
END_TEST

START_TEST(test_store_messages_round_trip_and_bounds)
{
    struct block_key keys[3] = {{{1}}, {{2}}, {{3}}};
    struct store_keys_msg m = {.id_incarnation = 1, .id_counter = 2, .first_index = 9, .n_keys = 3, .keys = keys[0].b},
                          back;
    struct store_want_msg want;
    struct bytes b = {0};
    const uint16_t positions[] = {0, 2}, wrong[] = {2, 2};
    store_keys_encode(&m, &b);
    ck_assert_int_eq(store_keys_decode(b.data, b.len, &back), TD_OK);
    struct block_key third = store_keys_at(&back, 2);
    ck_assert(block_key_equal(&third, &keys[2]));
    ck_assert_uint_eq(back.first_index, 9);
    for (size_t n = 0; n < b.len; n++)
        ck_assert_int_ne(store_keys_decode(b.data, n, &back), TD_OK);
    bytes_clear(&b);
    m.address = "unix:a";
    m.address_len = 6;
    m.tenant = store_tenant("acme", 4);
    store_keys_encode(&m, &b);
    ck_assert_int_eq(store_keys_decode(b.data, b.len, &back), TD_OK);
    ck_assert(back.address_len == 6 && !memcmp(back.address, "unix:a", 6));
    ck_assert_uint_eq(back.tenant, m.tenant);
    for (size_t n = 24 + 3 * 16 + 1; n < b.len; n++)
        ck_assert_int_ne(store_keys_decode(b.data, n, &back), TD_OK);
    ck_assert_uint_eq(m.tenant, 0x5d8858e1); /* this value is on disks */
    ck_assert(!store_tenant("default", 7) && !store_tenant("", 0) && store_tenant("defaulT", 7));
    bytes_clear(&b);
    store_want_encode(1, 2, positions, 2, &b);
    ck_assert_int_eq(store_want_decode(b.data, b.len, &want), TD_OK);
    ck_assert_uint_eq(store_want_at(&want, 1), 2);
    bytes_clear(&b);
    store_want_encode(1, 2, wrong, 2, &b);
    ck_assert_int_eq(store_want_decode(b.data, b.len, &want), TD_ERR_PROTOCOL);
    bytes_free(&b);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("wire");
    TCase *t = tcase_create("formats");
    tcase_add_test(t, test_block_key_chain_matches_published_vectors);
    tcase_add_test(t, test_block_key_depends_on_salt_adapter_and_every_token);
    tcase_add_test(t, test_kv_layout_golden_bytes_and_round_trip);
    tcase_add_test(t, test_kv_layout_kinds_and_windows_travel_where_zeroes_were);
    tcase_add_test(t, test_kv_layout_mismatch_names_the_field);
    tcase_add_test(t, test_kv_layout_absurd_values_are_refused);
    tcase_add_test(t, test_checksum_covers_bytes_and_identity);
    tcase_add_test(t, test_checksum_copy_is_the_sum_of_what_was_copied);
    tcase_add_test(t, test_checksum_ways_all_give_the_same_bits_at_any_length_and_place);
    tcase_add_test(t, test_checksum_choice_is_the_fastest_way);
    tcase_add_test(t, test_checksum_sees_swapped_shifted_and_stale_bytes);
    tcase_add_test(t, test_events_golden_bytes_and_round_trip);
    tcase_add_test(t, test_block_header_every_flipped_bit_is_noticed);
    tcase_add_test(t, test_block_header_golden_bytes);
    tcase_add_test(t, test_store_messages_round_trip_and_bounds);
    suite_add_tcase(s, t);
    return tap_main(s);
}
