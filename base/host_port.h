/* Splits "HOST:PORT", the form in which options and messages give addresses. */
#pragma once

#include "base/status.h"

enum { HOST_BYTES = 256 };

/*
 * Copies the host without the brackets of an IPv6 address; "": any address. *port_out points into text.
 * TD_ERR_INVALID: there is no port, or the host is too long; error_out names the text.
 */
enum td_status host_port_split(const char *text, char host[HOST_BYTES], const char **port_out,
                               struct td_error *error_out);
