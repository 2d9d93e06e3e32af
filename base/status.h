/*
 * One status type for all of tandem.
 *
 * 0 is success, positive values mean "not yet", negative values are errors in three groups. The group decides
 * the reaction:
 *   call     fail the request, nothing else is wrong
 *   peer     drop the peer, try elsewhere
 *   process  exit and be restarted
 * A library's own codes are converted where they arrive, in one function per library. Whoever detects an
 * error logs it; callers only return it.
 */
#pragma once

enum td_status {
    TD_OK = 0,

    TD_NOT_YET = 1, /* ask again: it is being made */
    TD_BUSY = 2,    /* no room now: try again when something was given back */

    TD_ERR_INVALID = -1,     /* the caller's argument; the message names the field */
    TD_ERR_NOT_FOUND = -2,   /* no such key, model, worker, lease */
    TD_ERR_NO_SPACE = -3,    /* a bounded resource is used up */
    TD_ERR_CANCELLED = -4,   /* the caller, or a close, ended it */
    TD_ERR_DEADLINE = -5,    /* the time is over */
    TD_ERR_UNSUPPORTED = -6, /* well-formed, but this build can't do it */
    TD_ERR_REFUSED = -7,     /* admission said no: try later */
    TD_ERR_STALE = -8,       /* names an old incarnation, generation or lease */
    TD_ERR_FORBIDDEN = -9,   /* the caller is known, and may not do this */

    TD_ERR_PEER_LOST = -20, /* it names an old incarnation, generation or lease */
    TD_ERR_PROTOCOL = -21,  /* the peer sent what the protocol forbids */
    TD_ERR_VERSION = -22,   /* the peer speaks another version, or has another model or layout */
    TD_ERR_AUTH = -23,      /* the peer could not prove the cluster secret */
    TD_ERR_CHECKSUM = -24,  /* bytes arrived, but not the right ones */

    TD_ERR_NO_MEMORY = -40,
    TD_ERR_DEVICE = -41,
    TD_ERR_CORRUPT = -42, /* a file of ours, or a model file, is damaged */
    TD_ERR_IO = -43,
};

enum td_group { TD_GROUP_OK, TD_GROUP_NOT_YET, TD_GROUP_CALL, TD_GROUP_PEER, TD_GROUP_PROCESS };

enum td_group td_status_group(enum td_status status);
const char *td_status_name(enum td_status status); /* "ok", "invalid", ...; never NULL */

/*
 * What went wrong, in words, for the person who has to mend it. A function that can fail for several reasons
 * takes one. text is written only on failure, is always terminated, and names the field, file or option.
 */
struct td_error {
    char text[256];
};

/* Fills error_out, which may be NULL, and returns status. */
enum td_status td_fail(struct td_error *error_out, enum td_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
