/*
 * What a backend implements: the operations of kernels.h, one function each, with the same arguments and
 * meaning.
 *
 * kernels.c calls them through the table at the beginning of every opened backend. The CPU's backend is
 * linked in; a device's backend is a plugin, a shared module with one symbol, KERNELS_PLUGIN, that links
 * nothing of the program.
 */
#pragma once

#include "kernels/kernels.h"

/* Limits of a machine that bench/kernels_bench.h measures. */
enum kernels_limit { LIMIT_READ_ONE, LIMIT_READ, LIMIT_COPY, LIMIT_LINK, LIMIT_F32, LIMIT_BF16, N_LIMITS };

/* The shape of a matrix, checked: no dimension is 0 or above INT32_MAX. */
struct matrix_shape {
    uint32_t n_out, n_in;
    enum compute compute;
    /*
     * Type of elements: as stored; parts of different types are converted to f32, which holds all of them
     * exactly. NUM_BF16 if packed, or from e4m3.
     */
    enum num_type type;
    enum k_weights weights;
};

struct k_links; /* a library's connections between ranks */

struct kernels_backend {
    const char *(*isa_name)(const struct kernels *k);
    uint32_t (*n_threads)(const struct kernels *k);
    void (*close)(struct kernels *k);

    bool (*memory)(struct kernels *k, uint64_t *free_out, uint64_t *total_out);
    enum td_status (*alloc)(struct kernels *k, size_t len_bytes, void **out);
    void (*free)(struct kernels *k, void *p);
    enum td_status (*map)(struct kernels *k, const void *host, size_t len_bytes, size_t part_bytes, void **out);
    bool (*is_pinned)(const struct kernels *k, const void *mapped);
    void (*unmap)(struct kernels *k, void *mapped);
    const void *(*put)(struct kernels *k, const void *host, size_t len_bytes);
    void (*step)(struct kernels *k);
    void (*write)(struct kernels *k, void *to, const void *host, const struct k_pieces *p);
    void (*read)(struct kernels *k, void *host, const void *from, size_t len_bytes);
    void (*finish)(struct kernels *k);
    uint32_t (*replay_rows)(struct kernels *k, uint32_t n_rows);
    bool (*replay)(struct kernels *k, uint64_t shape);
    void (*replay_end)(struct kernels *k);
    void (*read_aside)(struct kernels *k, void *host, const void *from, const struct k_pieces *p);
    uint32_t (*mark)(struct kernels *k);
    bool (*passed)(struct kernels *k, uint32_t mark);
    void (*wait)(struct kernels *k, uint32_t mark);
    void (*write_aside)(struct kernels *k, void *to, const void *host, const struct k_pieces *p);
    uint64_t (*write_mark)(struct kernels *k);
    bool (*written)(struct kernels *k, uint64_t mark);
    void (*write_wait)(struct kernels *k, uint64_t mark);

    enum td_status (*matrix_pack)(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts,
                                  const struct matrix_shape *shape, struct k_matrix **out);
    void (*matrix_free)(struct kernels *k, struct k_matrix *m);
    uint64_t (*matrix_bytes)(const struct k_matrix *m);
    /* All three are NULL on devices, which keep packed bytes to themselves. */
    const void *(*matrix_data)(const struct k_matrix *m);
    enum td_status (*matrix_view)(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts,
                                  const struct matrix_shape *shape, const void *data, uint64_t len_bytes,
                                  struct k_matrix **out);
    void (*matrix_move)(struct k_matrix *m, const void *data);
    enum td_status (*stack_open)(struct kernels *k, struct k_matrix *const *matrices, uint32_t n, struct k_stack **out);
    void (*stack_close)(struct kernels *k, struct k_stack *s);
    uint64_t (*stack_bytes)(const struct k_stack *s);
    void (*linear)(struct kernels *k, const struct k_matrix *w, const float *x, uint32_t n_rows, float *y,
                   bool accumulate);
    void (*linear_each)(struct kernels *k, const struct k_stack *s, const struct k_each *e, uint32_t n_rows);
    void (*linear_sorted)(struct kernels *k, const struct k_stack *s, const uint32_t *first, uint32_t n_rows,
                          const float *x, float *y);

    void (*take_rows)(struct kernels *k, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
                      uint32_t n_rows, float scale, float *out);
    void (*rmsnorm)(struct kernels *k, const float *x, const float *w, float eps, uint32_t n_rows, uint32_t dim,
                    float *y);
    void (*head_norm)(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
                      const float *w, float eps, uint32_t n_rows, uint32_t dim);
    void (*add)(struct kernels *k, const float *x, size_t n, float *y);
    void (*copy_heads)(struct kernels *k, const struct k_each *e, uint32_t n_heads, uint32_t dim, uint32_t n_rows);
    void (*glu)(struct kernels *k, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu,
                float *out);
    void (*softcap)(struct kernels *k, float *x, size_t n, float cap);
    void (*rope)(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
                 const struct k_rotary *r, const uint32_t *table_rows, uint32_t n_rows);

    void (*route)(struct kernels *k, const struct k_router *r, const float *logits, uint32_t n_rows, uint32_t stride,
                  uint32_t *experts_out, float *weights_out);
    void (*sort_slots)(struct kernels *k, const struct k_slots *s, uint32_t n_experts, uint32_t n_rows);
    void (*combine)(struct kernels *k, const float *x, uint32_t dim, const uint32_t *rows, const float *weights,
                    uint32_t n, uint32_t n_rows, float *y);

    void (*sample_rows)(struct kernels *k, const float *logits, uint32_t n, uint32_t n_rows, const struct k_draw *draws,
                        struct k_sampled *out);

    /*
 * Gathers by copies (kernels/group.c); turn alternates between 0 and 1.
 *
 * offer: rank k has queued its part; the other ranks may read it after this event.
 * follow: operations that k queues next come after the offer of peer.
 * reach: returns memory of peer as k's operations can read it; valid until the next reach.
 */
    void (*offer)(struct kernels *k, uint32_t turn);
    void (*follow)(struct kernels *k, struct kernels *peer, uint32_t turn);
    const float *(*reach)(struct kernels *k, struct kernels *peer, const float *from, size_t len_bytes);
    /*
     * Gathers by a library, with the arguments of k_gather. links_open returns NULL if it has none for these
     * ranks.
     */
    struct k_links *(*links_open)(struct kernels *const *ranks, uint32_t n);
    void (*links_close)(struct k_links *l);
    void (*links_gather)(struct k_links *l, uint32_t rank, const uint32_t *first, uint32_t to, uint32_t n_rows,
                         const float *mine, float *all);

    void (*put_seqs)(struct kernels *k, const struct k_attn_seq *seqs, uint32_t n_seqs, uint32_t page_tokens);
    void (*kv_store)(struct kernels *k, const struct k_attn *a);
    void (*attention)(struct kernels *k, const struct k_attn *a);

    /*
 * Runs a limit once (queued like an operation). For limits of memory, `memory` has twice len_bytes. Returns
 * the bytes moved or the operations done; 0: the limit is not known here.
 */
    double (*run_limit)(struct kernels *k, enum kernels_limit limit, void *memory, size_t len_bytes);
    /* NULL: there are no traces of this device. */
    enum td_status (*trace_begin)(struct kernels *k, struct td_error *error_out);
    struct k_trace_event *(*trace_end)(struct kernels *k, uint32_t *n_out);
};

/* The beginning of every backend's struct kernels; kernels_open() sets config. */
struct kernels {
    const struct kernels_backend *backend;
    struct kernels_config config;
};

enum td_status cpu_open(const struct kernels_config *config, struct kernels **out, struct td_error *error_out);
uint32_t cpu_threads(const struct kernels_config *config); /* threads that cpu_open() would use */

/* A plugin's symbol. abi: the program's KERNELS_ABI; a plugin of another one returns TD_ERR_VERSION. */
enum { KERNELS_ABI = 8 };
#define KERNELS_PLUGIN "tandem_kernels_open"
typedef enum td_status (*kernels_plugin)(uint32_t abi, const struct kernels_config *config, struct kernels **out,
                                         struct td_error *error_out);
