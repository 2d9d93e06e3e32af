/* Calls of functions that come in parts, put together. */
#pragma once

#include <jansson.h>

#include "tandem.pb-c.h"

/* Adds what is new of calls to those that came: a list of {"id", "name", "arguments"}, texts; NULL: none
 * came. */
void ask_calls_add(json_t **calls, const Tandem__V1__GenerateResponse *m);
