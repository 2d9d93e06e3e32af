#include "proto/ask/ask_calls.h"

#include "base/mem.h"
#include "proto/ask/ask_text.h"

void ask_calls_add(json_t **calls, const Tandem__V1__GenerateResponse *m)
{
    for (size_t i = 0; i < m->n_tool_calls; i++) {
        const Tandem__V1__ToolCall *d = m->tool_calls[i];
        *calls = *calls ? *calls : json_array();
        if (d->index == json_array_size(*calls))
            json_array_append_new(*calls, json_pack("{s:o, s:o, s:s}", "id", ask_text_json(d->id.data, d->id.len),
                                                    "name", ask_text_json(d->name.data, d->name.len), "arguments", ""));
        json_t *call = json_array_get(*calls, d->index), *so_far = json_object_get(call, "arguments");
        struct bytes all = {0};
        bytes_append(&all, json_string_value(so_far), json_string_length(so_far));
        bytes_append(&all, d->arguments.data, d->arguments.len);
        json_object_set_new(call, "arguments", ask_text_json(all.data, all.len));
        bytes_free(&all);
    }
}
