/* Blocks of threads as fibers (emulator.h). */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <vector>

#include "cuda_runtime_api.h"
#include "tests/emulator/queue.h"

namespace emulator
{
uint3 thread_index, block_index;
dim3 block_size, grid_size;
alignas(1024) uint8_t shared_memory[SHARED_BYTES + MARGIN_BYTES];

namespace
{
enum { MOST_THREADS = 1024, STACK_BYTES = 64 << 10, POISON = 0xff, MARGIN = 0x5a, COPY_BYTES = 16 };

enum state : uint8_t { READY, LOOKING, AT_WARP, AT_BLOCK, OVER };

struct copy {
    uint8_t *to;
    const uint8_t *from; /* NULL: zeros */
    uint32_t group;
};

struct meeting {
    slot slots[WARP];
    uint32_t n_readers; /* lanes that have not begun another one */
};

struct thread {
    void *stack_pointer; /* while another one runs */
    uint3 index;
    slot mine;         /* what it brings to a meeting */
    meeting *last;     /* the last meeting it had; NULL: none */
    uint32_t n_groups; /* groups of copies that were committed */
    std::vector<copy> copies;
    std::vector<struct product> products;
    std::vector<size_t> product_groups; /* products of each group that is in flight */
};

struct group { /* lanes that wait for the others of a mask */
    uint32_t mask, arrived;
    enum operation what;
};

struct warp {
    group groups[WARP];
    uint32_t n_groups;
};

thread threads[MOST_THREADS];
enum state states[MOST_THREADS];
warp warps[MOST_THREADS / WARP];
std::vector<meeting *> unused;
uint8_t *stacks;
uint32_t n_threads, running;
void *scheduler;
const std::function<void()> *body;
} // namespace

[[noreturn]] void fail(const char *why)
{
    fprintf(stderr, "emulator: block %u %u %u of %u %u %u, thread %u of %u: %s\n", block_index.x, block_index.y,
            block_index.z, grid_size.x, grid_size.y, grid_size.z, running, n_threads, why);
    abort();
}

namespace
{
/* Saves the registers that a function must keep, and goes on where `to` was left. */
extern "C" void emulator_switch(void **from, void *to);
__asm__(".text\n"
        ".type emulator_switch, @function\n"
        "emulator_switch:\n"
        "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n"
        "    ret\n"
        ".size emulator_switch, . - emulator_switch\n");

void pause_as(enum state s)
{
    states[running] = s;
    emulator_switch(&threads[running].stack_pointer, scheduler);
}

void run_thread(void)
{
    (*body)();
    pause_as(OVER);
    abort();
}

/* Gives back what the thread's last meeting brought. */
void leave(thread *t)
{
    if (t->last && !--t->last->n_readers)
        unused.push_back(t->last);
    t->last = NULL;
}

/* A stack on which emulator_switch() finds six registers and the function to begin with. */
void prepare(uint32_t i)
{
    void **top = (void **)(void *)(stacks + (i + 1) * (size_t)STACK_BYTES);
    *--top = NULL; /* a function begins with a stack that is 8 bytes off 16 */
    *--top = (void *)run_thread;
    for (int r = 0; r < 6; r++)
        *--top = NULL;
    threads[i].stack_pointer = top;
    threads[i].index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
    threads[i].n_groups = 0;
    states[i] = READY;
    leave(&threads[i]);
    threads[i].copies.clear();
    threads[i].products.clear();
    threads[i].product_groups.clear();
}

void resume(uint32_t i)
{
    running = i;
    thread_index = threads[i].index;
    emulator_switch(&scheduler, threads[i].stack_pointer);
}

/* All threads that can run do so once. False: they have only looked, in vain, for what they wait for. */
bool turn(bool is_ascending)
{
    bool any = false;
    for (uint32_t n = 0; n < n_threads; n++) {
        uint32_t i = is_ascending ? n : n_threads - 1 - n;
        if (states[i] > LOOKING)
            continue;
        bool looks = states[i] == LOOKING;
        resume(i);
        any |= !looks || states[i] != LOOKING;
    }
    return any || copy_box_now();
}

/* Lets threads that wait at the barrier go on. False: all threads are over. */
bool pass_barrier(void)
{
    bool any = false;
    for (uint32_t i = 0; i < n_threads; i++) {
        running = i;
        if (states[i] == AT_WARP || states[i] == LOOKING)
            fail("waits for threads or copies that do not come");
        if (states[i] == AT_BLOCK) {
            states[i] = READY;
            any = true;
        }
    }
    return any;
}

/* The lanes of the mask that wait for the others. */
group *group_of(warp *w, uint32_t mask, operation what)
{
    for (uint32_t i = 0; i < w->n_groups; i++)
        if (w->groups[i].mask == mask) {
            if (w->groups[i].what != what)
                fail("and others of its warp do different operations at once");
            return &w->groups[i];
        }
    w->groups[w->n_groups] = {mask, 0, what};
    return &w->groups[w->n_groups++];
}

/* All have come: they get what each has brought, and go on. */
void begin(uint32_t first, uint32_t mask, void (*combine)(slot *))
{
    if (unused.empty())
        unused.push_back(new meeting());
    meeting *m = unused.back();
    unused.pop_back();
    for (uint32_t i = 0; i < WARP; i++)
        if (mask >> i & 1) {
            m->slots[i] = threads[first + i].mine;
            m->n_readers++;
            threads[first + i].last = m;
            states[first + i] = READY;
        }
    if (combine)
        combine(m->slots);
}

void run_block(size_t shared_bytes, bool is_ascending)
{
    memset(shared_memory, POISON, shared_bytes);
    memset(shared_memory + shared_bytes, MARGIN, MARGIN_BYTES);
    for (uint32_t i = 0; i < n_threads; i++)
        prepare(i);
    do
        while (turn(is_ascending))
            ;
    while (pass_barrier());
    for (size_t i = 0; i < MARGIN_BYTES; i++)
        if (shared_memory[shared_bytes + i] != MARGIN)
            fail("has written behind the block's shared memory");
}
} // namespace

const slot *meet(uint32_t mask, operation what, const void *mine, size_t len_bytes, void (*combine)(slot *all))
{
    thread &t = threads[running];
    uint32_t own = running % WARP, first = running - own, n = n_threads - first;
    if (n < WARP)
        mask &= (1u << n) - 1;
    if (!(mask >> own & 1))
        fail("is not in the mask of its operation");
    leave(&t);
    if (len_bytes)
        memcpy(t.mine.bytes, mine, len_bytes);
    warp &w = warps[first / WARP];
    group *g = group_of(&w, mask, what);
    g->arrived |= 1u << own;
    if (g->arrived == mask) {
        *g = w.groups[--w.n_groups];
        begin(first, mask, combine);
    } else {
        pause_as(AT_WARP);
    }
    return t.last->slots;
}

void meet_block(void)
{
    pause_as(AT_BLOCK);
}

void copy_later(void *to, const void *from, bool valid)
{
    thread &t = threads[running];
    if ((uintptr_t)to % COPY_BYTES || (valid && (uintptr_t)from % COPY_BYTES))
        fail("copies to or from an address that is no multiple of 16");
    memset(to, POISON, COPY_BYTES);
    t.copies.push_back({(uint8_t *)to, valid ? (const uint8_t *)from : NULL, t.n_groups});
}

void copies_commit(void)
{
    threads[running].n_groups++;
}

void copies_wait(uint32_t pending)
{
    thread &t = threads[running];
    size_t n = 0;
    for (; n < t.copies.size() && t.copies[n].group + pending < t.n_groups; n++)
        if (t.copies[n].from)
            memcpy(t.copies[n].to, t.copies[n].from, COPY_BYTES);
        else
            memset(t.copies[n].to, 0, COPY_BYTES);
    t.copies.erase(t.copies.begin(), t.copies.begin() + (ptrdiff_t)n);
}

/* ------------------------------------------------------------------ Hopper */

void look_again(void)
{
    pause_as(LOOKING);
}

void multiply_later(const struct product &p)
{
    threads[running].products.push_back(p);
}

void products_commit(void)
{
    thread &t = threads[running];
    size_t before = 0;
    for (size_t n : t.product_groups)
        before += n;
    t.product_groups.push_back(t.products.size() - before);
}

static void multiply_groups(slot *all)
{
    uint32_t first = running / WARP * WARP, pending = value_of<uint32_t>(all[running % WARP]);
    for (uint32_t i = 1; i < WARP; i++)
        if (threads[first + i].product_groups != threads[first].product_groups)
            fail("has queued other products than its warp");
    while (threads[first].product_groups.size() > pending) {
        size_t n = threads[first].product_groups[0];
        for (size_t j = 0; j < n; j++) {
            const struct product *lanes[WARP];
            for (uint32_t i = 0; i < WARP; i++)
                lanes[i] = &threads[first + i].products[j];
            multiply_now(lanes, first / WARP % 4);
        }
        for (uint32_t i = first; i < first + WARP; i++) {
            threads[i].products.erase(threads[i].products.begin(), threads[i].products.begin() + (ptrdiff_t)n);
            threads[i].product_groups.erase(threads[i].product_groups.begin());
        }
    }
}

void products_wait(uint32_t pending)
{
    meet(0xffffffff, WAIT_PRODUCTS, &pending, sizeof(pending), multiply_groups);
}

void run_kernel(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &thread)
{
    n_threads = block.x * block.y * block.z;
    grid_size = grid;
    block_size = block;
    body = &thread;
    if (!stacks)
        stacks = (uint8_t *)mmap(NULL, (size_t)MOST_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (n_threads > MOST_THREADS || shared_bytes > SHARED_BYTES || stacks == MAP_FAILED)
        fail("the launch is too large");
    uint32_t n = 0;
    for (uint32_t z = 0; z < grid.z; z++)
        for (uint32_t y = 0; y < grid.y; y++)
            for (uint32_t x = 0; x < grid.x; x++) {
                block_index = {x, y, z};
                run_block(shared_bytes, n++ % 2 == 0);
            }
}
} // namespace emulator
