/*
 * grpc.reflection, v1 and v1alpha (the same messages), over a serialized FileDescriptorSet and the
 * descriptors of our own services.
 *
 * Files are handed out as the bytes that were given; a small subset of descriptor.proto reads the names in
 * them. A symbol is found by walking the files: a tool asks a dozen times, so an index would not be worth its
 * code.
 */
#include "proto/rpc/rpc_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "grpc_reflection.pb-c.h"
#include "rpc_descriptor.pb-c.h"
#include "rpc_descriptors.h"

typedef Tandem__Rpc__File file_desc;
typedef Tandem__Rpc__Message message_desc;
typedef Tandem__Rpc__Service service_desc;
typedef Grpc__Reflection__V1alpha__ServerReflectionRequest reflection_request;
typedef Grpc__Reflection__V1alpha__ServerReflectionResponse reflection_response;

struct file {
    ProtobufCBinaryData bytes; /* points into one of the sets */
    file_desc *desc;
};

struct rpc_reflection {
    Tandem__Rpc__FileSet *sets[2]; /* the user's set, and our own */
    struct file *files;
    uint32_t n_files;
};

/* ------------------------------------------------------------------ the files */

static const struct file *file_by_name(const struct rpc_reflection *r, const char *name)
{
    for (uint32_t i = 0; i < r->n_files; i++)
        if (!strcmp(r->files[i].desc->name, name))
            return &r->files[i];
    return NULL;
}

static enum td_status add_set(struct rpc_reflection *r, int which, const uint8_t *data, size_t len_bytes)
{
    Tandem__Rpc__FileSet *set = tandem__rpc__file_set__unpack(NULL, len_bytes, data);
    if (!set)
        return TD_ERR_INVALID;
    r->sets[which] = set;
    r->files = mem_resize(r->files, r->n_files + set->n_file, sizeof(*r->files));
    for (size_t i = 0; i < set->n_file; i++) {
        file_desc *desc = tandem__rpc__file__unpack(NULL, set->file[i].len, set->file[i].data);
        if (!desc)
            return TD_ERR_INVALID;
        if (file_by_name(r, desc->name)) /* the user's set may contain our own files, too */
            tandem__rpc__file__free_unpacked(desc, NULL);
        else
            r->files[r->n_files++] = (struct file){.bytes = set->file[i], .desc = desc};
    }
    return TD_OK;
}

enum td_status rpc_reflection_open(const uint8_t *data, size_t len_bytes, struct rpc_reflection **out)
{
    struct rpc_reflection *r = mem_zalloc(sizeof(*r));
    enum td_status status = add_set(r, 0, data, len_bytes);
    if (status == TD_OK)
        status = add_set(r, 1, RPC_DESCRIPTORS, sizeof(RPC_DESCRIPTORS));
    if (status != TD_OK) {
        rpc_reflection_close(r);
        return status;
    }
    *out = r;
    return TD_OK;
}

void rpc_reflection_close(struct rpc_reflection *r)
{
    if (!r)
        return;
    for (uint32_t i = 0; i < r->n_files; i++)
        tandem__rpc__file__free_unpacked(r->files[i].desc, NULL);
    free(r->files);
    for (int i = 0; i < 2; i++)
        if (r->sets[i])
            tandem__rpc__file_set__free_unpacked(r->sets[i], NULL);
    free(r);
}

/* ------------------------------------------------------------------ symbols */

/* The rest of symbol behind name: for "name" it is "", for "name.rest" it is "rest"; NULL for anything
 * else. */
static const char *after_name(const char *symbol, const char *name)
{
    size_t len = strlen(name);
    if (strncmp(symbol, name, len) != 0)
        return NULL;
    if (symbol[len] == 0)
        return symbol + len;
    return symbol[len] == '.' ? symbol + len + 1 : NULL;
}

static bool names_one_of(const char *symbol, Tandem__Rpc__Named **named, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(symbol, named[i]->name))
            return true;
    return false;
}

static bool message_has(const message_desc *m, const char *symbol)
{
    const char *rest = after_name(symbol, m->name);
    if (!rest || !*rest)
        return rest != NULL;
    for (size_t i = 0; i < m->n_nested_type; i++)
        if (message_has(m->nested_type[i], rest))
            return true;
    return names_one_of(rest, m->enum_type, m->n_enum_type);
}

static bool service_has(const service_desc *s, const char *symbol)
{
    const char *rest = after_name(symbol, s->name);
    return rest && (!*rest || names_one_of(rest, s->method, s->n_method));
}

static bool file_has(const file_desc *f, const char *symbol)
{
    const char *rest = *f->package ? after_name(symbol, f->package) : symbol;
    if (!rest || !*rest)
        return false;
    for (size_t i = 0; i < f->n_service; i++)
        if (service_has(f->service[i], rest))
            return true;
    for (size_t i = 0; i < f->n_message_type; i++)
        if (message_has(f->message_type[i], rest))
            return true;
    return names_one_of(rest, f->enum_type, f->n_enum_type);
}

static const struct file *file_by_symbol(const struct rpc_reflection *r, const char *symbol)
{
    for (uint32_t i = 0; i < r->n_files; i++)
        if (file_has(r->files[i].desc, symbol))
            return &r->files[i];
    return NULL;
}

/* ------------------------------------------------------------------ answers */

static void answer_error(reflection_response *response, Grpc__Reflection__V1alpha__ErrorResponse *error,
                         enum rpc_code code, const char *text)
{
    error->error_code = (int32_t)code;
    error->error_message = (char *)(uintptr_t)text;
    response->error_response = error;
    response->message_response_case =
        GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
}

/* Collects the file and everything that it imports, each once. order[0..n) is both the result and the list
 * of work. */
static size_t collect_imports(const struct rpc_reflection *r, const struct file *first, const struct file **order)
{
    size_t n = 0;
    order[n++] = first;
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < order[i]->desc->n_dependency; k++) {
            const struct file *f = file_by_name(r, order[i]->desc->dependency[k]);
            bool seen = !f;
            for (size_t j = 0; j < n && !seen; j++)
                seen = order[j] == f;
            if (!seen)
                order[n++] = f;
        }
    }
    return n;
}

static void send_files(struct rpc_call *call, reflection_response *response, const struct file *first)
{
    const struct rpc_reflection *r = rpc_call_user(call);
    Grpc__Reflection__V1alpha__ErrorResponse error = GRPC__REFLECTION__V1ALPHA__ERROR_RESPONSE__INIT;
    Grpc__Reflection__V1alpha__FileDescriptorResponse answer =
        GRPC__REFLECTION__V1ALPHA__FILE_DESCRIPTOR_RESPONSE__INIT;
    const struct file **order = mem_array(r->n_files, sizeof(*order));
    answer.file_descriptor_proto = mem_array(r->n_files, sizeof(*answer.file_descriptor_proto));
    if (first) {
        answer.n_file_descriptor_proto = collect_imports(r, first, order);
        for (size_t i = 0; i < answer.n_file_descriptor_proto; i++)
            answer.file_descriptor_proto[i] = order[i]->bytes;
        response->file_descriptor_response = &answer;
        response->message_response_case =
            GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
    } else {
        answer_error(response, &error, RPC_NOT_FOUND, "no such file or symbol");
    }
    if (rpc_call_send(call, &response->base) == TD_ERR_NO_SPACE)
        rpc_call_abort(call, RPC_RESOURCE_EXHAUSTED, "client does not read");
    free(answer.file_descriptor_proto);
    free(order);
}

static void send_services(struct rpc_call *call, reflection_response *response)
{
    const struct rpc_reflection *r = rpc_call_user(call);
    Grpc__Reflection__V1alpha__ListServiceResponse list = GRPC__REFLECTION__V1ALPHA__LIST_SERVICE_RESPONSE__INIT;
    struct bytes name = {0};
    for (uint32_t i = 0; i < r->n_files; i++) {
        for (size_t k = 0; k < r->files[i].desc->n_service; k++) {
            const file_desc *f = r->files[i].desc;
            bytes_clear(&name);
            bytes_printf(&name, "%s%s%s", f->package, *f->package ? "." : "", f->service[k]->name);
            Grpc__Reflection__V1alpha__ServiceResponse *one = mem_zalloc(sizeof(*one));
            grpc__reflection__v1alpha__service_response__init(one);
            one->name = mem_strdup(name.data);
            list.service = mem_resize(list.service, list.n_service + 1, sizeof(*list.service));
            list.service[list.n_service++] = one;
        }
    }
    response->list_services_response = &list;
    response->message_response_case =
        GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    if (rpc_call_send(call, &response->base) == TD_ERR_NO_SPACE)
        rpc_call_abort(call, RPC_RESOURCE_EXHAUSTED, "client does not read");
    for (size_t i = 0; i < list.n_service; i++) {
        free(list.service[i]->name);
        free(list.service[i]);
    }
    free(list.service);
    bytes_free(&name);
}

static void reflection_open(struct rpc_call *call, void *user)
{
    rpc_call_set_user(call, user);
}

static void reflection_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    const struct rpc_reflection *r = rpc_call_user(call);
    const reflection_request *request = (const reflection_request *)message;
    reflection_response response = GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__INIT;
    response.valid_host = request->host;
    response.original_request = (reflection_request *)(uintptr_t)request;
    switch (request->message_request_case) {
    case GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        send_files(call, &response, file_by_name(r, request->file_by_filename));
        return;
    case GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        send_files(call, &response, file_by_symbol(r, request->file_containing_symbol));
        return;
    case GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        send_services(call, &response);
        return;
    default:
        break;
    }
    Grpc__Reflection__V1alpha__ErrorResponse error = GRPC__REFLECTION__V1ALPHA__ERROR_RESPONSE__INIT;
    answer_error(&response, &error, RPC_UNIMPLEMENTED, "extensions are not served");
    rpc_call_send(call, &response.base);
}

static void reflection_half_close(struct rpc_call *call)
{
    rpc_call_finish(call, RPC_OK, "", 0);
}

void rpc_reflection_methods(struct rpc_reflection *r, struct rpc_service_method out[RPC_REFLECTION_METHODS])
{
    static const char *const PATHS[RPC_REFLECTION_METHODS] = {
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};
    for (int i = 0; i < RPC_REFLECTION_METHODS; i++)
        out[i] = (struct rpc_service_method){
            .path = PATHS[i],
            .request = &grpc__reflection__v1alpha__server_reflection_request__descriptor,
            .handlers = {.on_message = reflection_message, .on_half_close = reflection_half_close},
            .on_open = reflection_open,
            .open_user = r,
            .is_common = true,
            .is_paced = true,
        };
}
