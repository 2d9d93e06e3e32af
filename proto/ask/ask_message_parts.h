/* Where the values of a request are stored: the table (ask_params.c) names the places, ask_message.c fills
 * them. */
#pragma once

#include "tandem.pb-c.h"

struct ask_message {
    Tandem__V1__GenerateRequest m;
    Tandem__V1__TokenPrompt tokens;
    Tandem__V1__ChatPrompt chat;
    /* Arrays that the message borrows until it is packed. */
    Tandem__V1__ChatMessage *messages, **message_list;
    Tandem__V1__Sampling sampling;
    Tandem__V1__LogitBias *bias, **bias_list;
    Tandem__V1__Stopping stopping;
    Tandem__V1__Slo slo;
    Tandem__V1__Structured structured;
    double ttft_ms, tpot_ms;
    int greedy, generation_prompt; /* int, because a protobuf_c_boolean is one */
    char **dumps;                  /* JSON values as text, owned */
    size_t n_dumps;
};

/* protobuf-c's form of a repeated number: a count, then the array. */
struct ask_ids {
    size_t n;
    uint32_t *ids;
};

/* protobuf-c's form of a repeated text: a count, then the array. */
struct ask_texts {
    size_t n;
    ProtobufCBinaryData *texts;
};
