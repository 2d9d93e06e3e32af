/*
 * Makes a GenerateRequest from a JSON request, by the table of parameters (ask_params.h).
 *
 * Anything that the table doesn't allow is refused: unknown members, wrong types, values out of bounds, two
 * prompts, members that have no effect with this prompt.
 *
 * Threads: any; an ask_message belongs to its caller.
 */
#pragma once

#include <jansson.h>

#include "base/status.h"
#include "tandem.pb-c.h"

struct ask_message;

/* On TD_ERR_INVALID error_out begins with the member's name. The message borrows texts from request until
 * ask_message_free. */
enum td_status ask_message_make(json_t *request, struct ask_message **out, struct td_error *error_out);
Tandem__V1__GenerateRequest *ask_message_get(struct ask_message *m);
void ask_message_free(struct ask_message *m); /* NULL is fine */

/* Sets limits in milliseconds (0: none) so that present and older routers understand them. */
void ask_limits(Tandem__V1__Slo *slo, double ttft_ms, double tpot_ms);
