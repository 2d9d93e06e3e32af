/* What ran on a device in the steps of a bench's rows: rows with sums, and a file for a trace viewer
 * (chrome://tracing, ui.perfetto.dev; the Trace Event Format). */
#pragma once

#include "bench/bench.h"
#include "kernels/kernels.h"

struct engine_trace;

struct engine_trace *engine_trace_open(void);
void engine_trace_close(struct engine_trace *t); /* NULL is fine */

/* From begin to end operations are recorded. end without begin does nothing. */
enum td_status engine_trace_begin(struct engine_trace *t, struct kernels *k, struct td_error *error_out);
void engine_trace_end(struct engine_trace *t, struct kernels *k);

/*
 * Adds rows for what was recorded since the last call, in ms for each of n_steps steps beside step_ms, the
 * time of a step that was not recorded (recording delays launches, but not what runs): how long the device
 * was idle, and the time of each kernel. Idle is the time in which no kernel was placed. Where launches
 * overlap, a kernel is placed while the one before it ends, and waits: that wait counts as its time, so the
 * sum of kernels may exceed the step, and idle is less than what launches cost. Keeps the events under the
 * name for the file.
 */
void engine_trace_rows(struct engine_trace *t, const char *name, uint32_t n_steps, double step_ms,
                       struct bench_rows *out);

enum td_status engine_trace_write(const struct engine_trace *t, const char *path, struct td_error *error_out);
