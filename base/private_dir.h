/*
 * Directories of this user alone, mode 0700: the run directory, and in it the sockets of operators. A
 * directory that another user made is refused, so nobody can put a socket or file of his own in our way.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

/* Path of the default run directory: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-UID. Makes nothing. False:
 * it is longer than out. */
bool private_dir_default(char *out, size_t out_bytes);

/* Makes a directory of mode 0700, and its parents. TD_ERR_IO: it can't be made, or is another user's. */
enum td_status private_dir_make(const char *path, struct td_error *error_out);

/* Whether nobody but us can put files there. TD_ERR_IO: it is no directory, it is another user's, or others
 * may write into it. */
enum td_status private_dir_check(const char *path, struct td_error *error_out);
