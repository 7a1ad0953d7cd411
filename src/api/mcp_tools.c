/*
 * mcp_tools: the tools of the MCP server. Each is a row that names the route whose request it is,
 * with the fields of its arguments and of its result. Names and types of arguments are checked
 * here, their values by the route.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "api/mcp.h"

#include <stdlib.h>
#include <string.h>

/* A member of an object: its JSON type, or "list" (of `items`), or "strings". For numbers min and
 * max are the range, for a required text the limits of its length; both 0: none. */
struct field {
    const char *name, *type, *description;
    bool required;
    double min, max;
    const struct field *items;
};

struct mcp_tool {
    const char *name, *title, *description;
    const struct field *arguments, *results; /* end with a NULL name */
    bool read_only;                          /* it changes nothing that outlives the call */
    bool runs_agents; /* it may run an agent of the server, whose tools can do more than that */
    int scope;
    const char *method, *path; /* a path that ends with "/" is completed by `wildcard` */
    const char *wildcard;      /* the argument that completes the path; or NULL */
    bool one_segment;          /* the wildcard may have no "/" */
    bool (*is_offered)(const struct server *s);                      /* NULL: always */
    void (*schema_fill)(const struct server *s, json_t *properties); /* NULL: nothing to fill in */
    json_t *(*body_make)(const json_t *arguments); /* NULL: the arguments are the body */
    const char *list; /* the member of the result that has the reply's list `data`; or NULL */
    json_t *(*result)(const json_t *reply); /* NULL: the reply is the result */
};

/* chat */

/* The arguments without `prompt` and `system`, which become messages. */
static json_t *chat_body(const json_t *arguments) {
    json_t *body = json_copy((json_t *)(uintptr_t)arguments), *messages = json_array();
    json_t *system = json_object_get(arguments, "system");
    if (system)
        json_array_append_new(messages,
                              json_pack("{s:s,s:O}", "role", "system", "content", system));
    json_array_append_new(messages, json_pack("{s:s,s:O}", "role", "user", "content",
                                              json_object_get(arguments, "prompt")));
    json_object_del(body, "prompt");
    json_object_del(body, "system");
    json_object_set_new(body, "messages", messages);
    return body;
}

static void usage_set(json_t *result, const json_t *reply) {
    const json_t *usage = json_object_get(reply, "usage");
    json_object_set(result, "prompt_tokens", json_object_get(usage, "prompt_tokens"));
    json_object_set(result, "completion_tokens", json_object_get(usage, "completion_tokens"));
}

static json_t *chat_result(const json_t *reply) {
    const json_t *choice = json_array_get(json_object_get(reply, "choices"), 0),
                 *message = json_object_get(choice, "message");
    json_t *text = json_object_get(message, "content"),
           *reasoning = json_object_get(message, "reasoning_content");
    json_t *v = json_pack("{s:o,s:s,s:s}", "text",
                          json_is_string(text) ? json_incref(text) : json_string(""), "model",
                          json_get_string(reply, "model"), "finish_reason",
                          json_get_string(choice, "finish_reason"));
    if (json_string_length(reasoning)) json_object_set(v, "reasoning", reasoning);
    usage_set(v, reply);
    return v;
}

/* ask and debate */

/* Copies members that exist, by names separated by blanks. */
static json_t *members_copy(const json_t *from, const char *names) {
    json_t *v = json_object();
    for (size_t n; *names; names += n + (names[n] == ' ')) {
        char key[64];
        n = strcspn(names, " ");
        snprintf(key, sizeof key, "%.*s", (int)n, names);
        json_object_set(v, key, json_object_get(from, key)); // no effect without a value
    }
    return v;
}

/* Without the blackboard, whose entries have whole prompts. */
static json_t *ask_result(const json_t *reply) {
    json_t *v = members_copy(reply, "answer source why language role_type roles");
    usage_set(v, reply);
    return v;
}

static json_t *debate_result(const json_t *reply) {
    json_t *v = members_copy(reply, "answer scores ending rounds"), *turns = json_array();
    const json_t *said;
    size_t i;
    json_array_foreach (json_object_get(reply, "said"), i, said)
        json_array_append_new(turns, members_copy(said, "name round text"));
    json_object_set_new(v, "turns", turns);
    return v;
}

static bool has_teams(const struct server *s) {
    return s->n_teams > 0;
}

static void team_names_fill(const struct server *s, json_t *properties) {
    json_t *names = json_array();
    for (int i = 0; i < s->n_teams; i++)
        json_array_append_new(names, json_string(s->teams[i].name));
    json_object_set_new(json_object_get(properties, "team"), "enum", names);
}

/* knowledge, memories, conversations, adapters, jobs */

static bool has_knowledge(const struct server *s) {
    return s->options->knowledge != NULL;
}

static bool has_memory(const struct server *s) {
    return s->options->memory != NULL;
}

static json_t *memories_result(const json_t *reply) {
    json_t *memories = json_array();
    const json_t *memory;
    size_t i;
    json_array_foreach (json_object_get(reply, "data"), i, memory) {
        json_t *v = members_copy(memory, "id attribute value text valid_from score");
        json_t *until = json_object_get(memory, "valid_until");
        if (json_is_string(until)) json_object_set(v, "valid_until", until);
        json_array_append_new(memories, v);
    }
    return json_pack("{s:o}", "memories", memories);
}

static json_t *adapters_result(const json_t *reply) {
    json_t *models = json_array(), *adapters = json_array(), *agents = json_array(), *card;
    size_t i;
    json_array_foreach (json_object_get(reply, "data"), i, card) {
        const char *id = json_get_string(card, "id"), *parent = json_get_string(card, "parent");
        if (!*parent)
            json_array_append_new(models, json_string(id));
        else if (strncmp(id, "agent:", 6) == 0)
            json_array_append_new(agents, json_string(id));
        else if (strncmp(id, "team:", 5) != 0)
            json_array_append_new(adapters, json_pack("{s:s,s:s}", "name", id, "model", parent));
    }
    return json_pack("{s:o,s:o,s:o}", "models", models, "adapters", adapters, "agents", agents);
}

static json_t *job_result(const json_t *reply) {
    return members_copy(reply, "id kind state created started ended note progress figures");
}

static json_t *jobs_result(const json_t *reply) {
    json_t *jobs = json_array();
    const json_t *job;
    size_t i;
    json_array_foreach (json_object_get(reply, "jobs"), i, job)
        json_array_append_new(jobs, job_result(job));
    return json_pack("{s:o}", "jobs", jobs);
}

/* fields */

#define REQUIRED .required = true
#define RANGE(from, to) .min = (from), .max = (to)
#define MODEL                                                                                      \
    {                                                                                              \
        "model", "string",                                                                         \
            "Name of the base model, an adapter or (chat only) an agent, or a weighted sum such "  \
            "as "                                                                                  \
            "a*0.7+b*0.3; adapter_list has the names. Default: the base model."                    \
    }
#define SAFE_INTEGER_MAX 9007199254740991.0 /* integers are doubles in many clients */
#define SEED                                                                                       \
    { "seed", "integer", "The same seed gives the same answer.", RANGE(0, SAFE_INTEGER_MAX) }

static const struct field
    no_fields[] = {{0}},
    chat_arguments[] = {{"prompt", "string", "The user's message.", REQUIRED, RANGE(1, 1 << 20)},
                        {"system", "string", "The system message."},
                        MODEL,
                        {"max_tokens", "integer", "Maximum tokens of the answer.", RANGE(1, 1e6)},
                        {"temperature", "number", "0 selects the most probable token.",
                         RANGE(0, 100)},
                        {"top_p", "number", "Probability mass to sample from.", RANGE(0, 1)},
                        SEED,
                        {0}},
    chat_results[] = {{"text", "string", REQUIRED},
                      {"reasoning", "string"},
                      {"model", "string", REQUIRED},
                      {"finish_reason", "string", REQUIRED},
                      {"prompt_tokens", "integer"},
                      {"completion_tokens", "integer"},
                      {0}},
    ask_arguments[] =
        {{"question", "string", "The question.", REQUIRED, RANGE(1, MAX_QUESTION_BYTES)},
         MODEL,
         {"agents", "integer", "Number of agents. Default: 3.", RANGE(1, TEAM_MAX - 2)},
         {"iterations", "integer", "Rounds of the agents. Default: 2.", RANGE(1, 16)},
         {"language", "string", "Language of the prompts: auto, en, ja or zh. Default: auto."},
         {"conversation", "string", "Name of the conversation to continue or to begin."},
         {"max_tokens", "integer", "Maximum tokens of each agent.", RANGE(0, 65536)},
         SEED,
         {0}},
    role_fields[] = {{"name", "string"}, {"description", "string"}, {0}},
    ask_results[] = {{"answer", "string", REQUIRED},
                     {"source", "string", REQUIRED},
                     {"why", "string"},
                     {"language", "string"},
                     {"role_type", "string"},
                     {"roles", "list", .items = role_fields},
                     {"prompt_tokens", "integer"},
                     {"completion_tokens", "integer"},
                     {0}},
    debate_arguments[] =
        {{"team", "string", "The team.", REQUIRED},
         {"question", "string", "The question.", REQUIRED, RANGE(1, MAX_QUESTION_BYTES)},
         {"choices", "strings", "The answers to choose from. Default: a free answer."},
         {"rounds", "integer", "Maximum rounds. Default: the team's.", RANGE(1, 64)},
         {"temperature", "number", "Default: the team's.", RANGE(0, 100)},
         SEED,
         {0}},
    turn_fields[] = {{"name", "string"}, {"round", "integer"}, {"text", "string"}, {0}},
    debate_results[] = {{"answer", "string"},
                        {"scores", "object"},
                        {"ending", "string", REQUIRED},
                        {"rounds", "integer"},
                        {"turns", "list", REQUIRED, .items = turn_fields},
                        {0}},
    knowledge_arguments[] = {{"query", "string", "Words to search for.", REQUIRED, RANGE(1, 4096)},
                             {"limit", "integer", "Maximum passages. Default: 5.", RANGE(1, 50)},
                             {0}},
    hit_fields[] = {{"title", "string"},
                    {"source", "string"},
                    {"content", "string"},
                    {"score", "number"},
                    {0}},
    knowledge_results[] = {{"hits", "list", REQUIRED, .items = hit_fields}, {0}},
    memory_arguments[] = {{"query", "string",
                           "Words to search for. Default: all, the strongest first.",
                           RANGE(1, 4096)},
                          {"attribute", "string",
                           "Only memories of this attribute, such as residence."},
                          {"ended", "boolean", "Also what no longer holds. Default: false."},
                          {"limit", "integer", "Maximum memories. Default: 100.", RANGE(1, 1000)},
                          {0}},
    memory_fields[] = {{"id", "integer"},        {"attribute", "string"},
                       {"value", "string"},      {"text", "string"},
                       {"valid_from", "string"}, {"valid_until", "string"},
                       {"score", "number"},      {0}},
    memories_results[] = {{"memories", "list", REQUIRED, .items = memory_fields}, {0}},
    conversation_fields[] = {{"id", "string"},
                             {"title", "string"},
                             {"exchanges", "integer"},
                             {"updated", "string"},
                             {0}},
    conversations_results[] = {{"conversations", "list", REQUIRED, .items = conversation_fields},
                               {0}},
    search_arguments[] = {{"search", "string", "The text to find.", REQUIRED, RANGE(1, 256)},
                          {"limit", "integer", "Maximum exchanges. Default: 20.", RANGE(1, 100)},
                          {0}},
    exchange_fields[] = {{"id", "string"},
                         {"number", "integer"},
                         {"user", "string"},
                         {"assistant", "string"},
                         {0}},
    exchanges_results[] = {{"exchanges", "list", REQUIRED, .items = exchange_fields}, {0}},
    read_arguments[] = {{"conversation", "string", "Name of the conversation.", REQUIRED,
                         RANGE(1, 128)},
                        {"after", "integer", "Only exchanges with a larger number. Default: 0.",
                         RANGE(0, SAFE_INTEGER_MAX)},
                        {"limit", "integer", "Maximum exchanges. Default: 20.", RANGE(1, 100)},
                        {0}},
    adapter_fields[] = {{"name", "string"}, {"model", "string"}, {0}},
    adapters_results[] = {{"models", "strings", REQUIRED},
                          {"adapters", "list", REQUIRED, .items = adapter_fields},
                          {"agents", "strings", REQUIRED},
                          {0}},
    job_arguments[] = {{"job", "string", "Id of the job; job_list has the ids.", REQUIRED}, {0}},
    job_results[] = {{"id", "string", REQUIRED},
                     {"kind", "string", REQUIRED},
                     {"state", "string", REQUIRED},
                     {"note", "string"},
                     {"progress", "object"},
                     {"figures", "object"},
                     {0}},
    jobs_results[] = {{"jobs", "list", REQUIRED, .items = job_results}, {0}};

/* the table */

static const struct mcp_tool tools[] = {
    {.name = "chat",
     .title = "Chat",
     .description =
         "Answers a prompt with the local model, with one of its LoRA adapters, or with an "
         "agent that uses tools.",
     .arguments = chat_arguments,
     .results = chat_results,
     .read_only = true,
     .runs_agents = true,
     .scope = SCOPE_CHAT,
     .method = "POST",
     .path = "/v1/chat/completions",
     .body_make = chat_body,
     .result = chat_result},
    {.name = "ask",
     .title = "Ask a panel",
     .description = "Lets several agents of the model with different roles answer a question "
                    "together, and combines their answers. With a conversation it remembers "
                    "earlier exchanges, and stores this one.",
     .arguments = ask_arguments,
     .results = ask_results,
     .scope = SCOPE_CHAT,
     .method = "POST",
     .path = "/v1/ask",
     .result = ask_result},
    {.name = "debate",
     .title = "Debate",
     .description = "Lets a team of agents debate a question in rounds, and returns their turns "
                    "and the answer that they decide on.",
     .arguments = debate_arguments,
     .results = debate_results,
     .read_only = true,
     .scope = SCOPE_CHAT,
     .method = "POST",
     .path = "/v1/debate",
     .is_offered = has_teams,
     .schema_fill = team_names_fill,
     .result = debate_result},
    {.name = "knowledge_search",
     .title = "Search the knowledge base",
     .description = "Finds the passages of the knowledge base that match a query best, with their "
                    "sources.",
     .arguments = knowledge_arguments,
     .results = knowledge_results,
     .read_only = true,
     .scope = SCOPE_CHAT,
     .method = "GET",
     .path = "/v1/knowledge",
     .is_offered = has_knowledge},
    {.name = "memory_search",
     .title = "Search the memories of the user",
     .description = "Finds what the user of this key has stated about himself or herself in stored "
                    "conversations, such as residence or allergies.",
     .arguments = memory_arguments,
     .results = memories_results,
     .read_only = true,
     .scope = SCOPE_CHAT,
     .method = "GET",
     .path = "/v1/memories",
     .is_offered = has_memory,
     .result = memories_result},
    {.name = "conversation_list",
     .title = "List conversations",
     .description = "Lists the stored conversations of this key, which the tool ask began.",
     .arguments = no_fields,
     .results = conversations_results,
     .read_only = true,
     .scope = SCOPE_CHAT,
     .method = "GET",
     .path = "/v1/conversations",
     .list = "conversations"},
    {.name = "conversation_search",
     .title = "Search conversations",
     .description = "Finds the exchanges of all stored conversations of this key that contain a "
                    "text.",
     .arguments = search_arguments,
     .results = exchanges_results,
     .read_only = true,
     .scope = SCOPE_CHAT,
     .method = "GET",
     .path = "/v1/conversations",
     .list = "exchanges"},
    {.name = "conversation_read",
     .title = "Read a conversation",
     .description = "Returns exchanges of a stored conversation, word for word, oldest first.",
     .arguments = read_arguments,
     .results = exchanges_results,
     .read_only = true,
     .scope = SCOPE_CHAT,
     .method = "GET",
     .path = "/v1/conversations/",
     .wildcard = "conversation",
     .list = "exchanges"},
    {.name = "adapter_list",
     .title = "List models, adapters and agents",
     .description =
         "Lists the base models and the LoRA adapters that chat and ask can use, and the "
         "agents that chat can use.",
     .arguments = no_fields,
     .results = adapters_results,
     .read_only = true,
     .scope = SCOPE_CHAT,
     .method = "GET",
     .path = "/v1/models",
     .result = adapters_result},
    {.name = "job_list",
     .title = "List jobs",
     .description = "Lists the jobs of the server, such as training runs, newest first.",
     .arguments = no_fields,
     .results = jobs_results,
     .read_only = true,
     .scope = SCOPE_JOBS,
     .method = "GET",
     .path = "/v1/jobs",
     .result = jobs_result},
    {.name = "job_status",
     .title = "Status of a job",
     .description = "Returns state and progress of a job.",
     .arguments = job_arguments,
     .results = job_results,
     .read_only = true,
     .scope = SCOPE_JOBS,
     .method = "GET",
     .path = "/v1/jobs/",
     .wildcard = "job",
     .one_segment = true,
     .result = job_result},
};

/* listing */

static bool tool_is_offered(struct server *s, const struct exchange *x, const struct mcp_tool *t) {
    return auth_allows(s, x, t->scope) && (!t->is_offered || t->is_offered(s));
}

const struct mcp_tool *mcp_tool_find(struct server *s, const struct exchange *x, const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(tools); i++)
        if (strcmp(tools[i].name, name) == 0 && tool_is_offered(s, x, &tools[i])) return &tools[i];
    return NULL;
}

static json_t *fields_schema(const struct field *f, bool closed);

static void limits_set(const struct field *f, json_t *schema) {
    bool text = strcmp(f->type, "string") == 0;
    if (f->max <= f->min) return;
    json_object_set_new(schema, text ? "minLength" : "minimum", json_integer((json_int_t)f->min));
    json_object_set_new(schema, text ? "maxLength" : "maximum", json_integer((json_int_t)f->max));
}

static json_t *field_schema(const struct field *f) {
    bool list = strcmp(f->type, "list") == 0, strings = strcmp(f->type, "strings") == 0;
    json_t *schema = json_pack("{s:s}", "type", list || strings ? "array" : f->type);
    if (list) json_object_set_new(schema, "items", fields_schema(f->items, false));
    if (strings) json_object_set_new(schema, "items", json_pack("{s:s}", "type", "string"));
    if (f->description) json_object_set_new(schema, "description", json_string(f->description));
    limits_set(f, schema);
    return schema;
}

/* The schema of an object. closed: it has no other members. */
static json_t *fields_schema(const struct field *f, bool closed) {
    json_t *properties = json_object(), *required = json_array();
    for (; f->name; f++) {
        json_object_set_new(properties, f->name, field_schema(f));
        if (f->required) json_array_append_new(required, json_string(f->name));
    }
    return json_pack("{s:s,s:o,s:o,s:b}", "type", "object", "properties", properties, "required",
                     required, "additionalProperties", !closed);
}

static json_t *tool_json(const struct server *s, const struct mcp_tool *t) {
    json_t *arguments = fields_schema(t->arguments, true);
    bool agents = t->runs_agents && s->n_agents > 0, read_only = t->read_only && !agents;
    if (t->schema_fill) t->schema_fill(s, json_object_get(arguments, "properties"));
    return json_pack("{s:s,s:s,s:s,s:o,s:o,s:{s:b,s:b,s:b,s:b}}", "name", t->name, "title",
                     t->title, "description", t->description, "inputSchema", arguments,
                     "outputSchema", fields_schema(t->results, false), "annotations",
                     "readOnlyHint", read_only, "destructiveHint", 0, "idempotentHint", read_only,
                     "openWorldHint", agents && s->options->tools.n > 0);
}

json_t *mcp_tools_json(struct server *s, const struct exchange *x) {
    json_t *list = json_array();
    for (size_t i = 0; i < ARRAY_LEN(tools); i++)
        if (tool_is_offered(s, x, &tools[i])) json_array_append_new(list, tool_json(s, &tools[i]));
    return list;
}

/* arguments */

static bool has_type(const json_t *v, const char *type) {
    return strcmp(type, "string") == 0    ? json_is_string(v)
           : strcmp(type, "integer") == 0 ? json_is_integer(v)
           : strcmp(type, "number") == 0  ? json_is_number(v)
           : strcmp(type, "boolean") == 0 ? json_is_boolean(v)
                                          : json_is_string_array(v);
}

static const struct field *field_find(const struct field *f, const char *name) {
    while (f->name && strcmp(f->name, name) != 0) f++;
    return f->name ? f : NULL;
}

static int arguments_check(const struct mcp_tool *t, const json_t *arguments, struct error *err) {
    const char *name;
    json_t *v;
    json_object_foreach ((json_t *)(uintptr_t)arguments, name, v) {
        const struct field *f = field_find(t->arguments, name);
        if (!f) return error_set(err, ERR_USAGE, "'%.80s' is not an argument of this tool", name);
        if (!has_type(v, f->type))
            return error_set(err, ERR_USAGE, "'%s' must be %s %s", name,
                             strchr("aeiou", *f->type) ? "an" : "a",
                             strcmp(f->type, "strings") == 0 ? "list of strings" : f->type);
    }
    for (const struct field *f = t->arguments; f->name; f++)
        if (f->required && !json_object_get(arguments, f->name))
            return error_set(err, ERR_USAGE, "the argument '%s' is missing", f->name);
    return OK;
}

/* requests */

static int path_make(const struct mcp_tool *t, const json_t *arguments, char **path,
                     struct error *err) {
    const char *rest = t->wildcard ? json_get_string(arguments, t->wildcard) : "";
    if (t->wildcard && !*rest)
        return error_set(err, ERR_USAGE, "'%s' must not be empty", t->wildcard);
    if (t->one_segment && strchr(rest, '/'))
        return error_set(err, ERR_USAGE, "'%s' must not contain '/'", t->wildcard);
    *path = xasprintf("%s%s", t->path, rest);
    return OK;
}

static void query_make(const struct mcp_tool *t, const json_t *arguments,
                       struct mcp_tool_request *out) {
    json_t *v;
    const char *name;
    size_t n = 0;
    out->query = xcalloc(json_object_size(arguments) + 1, sizeof *out->query);
    json_object_foreach ((json_t *)(uintptr_t)arguments, name, v) {
        if (t->wildcard && strcmp(name, t->wildcard) == 0) continue;
        char *text =
            json_is_string(v) ? xstrdup(json_string_value(v)) : json_dumps(v, JSON_ENCODE_ANY);
        CHECK(text != NULL);
        out->query[n++] = (struct http_field){xstrdup(name), text};
    }
}

static void body_make(const struct mcp_tool *t, const json_t *arguments, bool stream,
                      struct buf *out) {
    json_t *body =
        t->body_make ? t->body_make(arguments) : json_copy((json_t *)(uintptr_t)arguments);
    if (stream) json_object_set_new(body, "stream", json_true());
    if (stream && t->body_make == chat_body)
        json_object_set_new(body, "stream_options", json_pack("{s:b}", "include_usage", 1));
    char *text = json_dumps(body, JSON_COMPACT | JSON_REAL_PRECISION(17));
    CHECK(text != NULL);
    *out = (struct buf){.data = text, .len = strlen(text), .cap = strlen(text)};
    json_decref(body);
}

int mcp_tool_request_make(const struct mcp_tool *t, const json_t *arguments, bool stream,
                          struct mcp_tool_request *out, struct error *err) {
    json_t *given = arguments ? json_incref((json_t *)(uintptr_t)arguments) : json_object();
    *out = (struct mcp_tool_request){.method = t->method};
    int rc = arguments_check(t, given, err);
    if (rc == OK) rc = path_make(t, given, &out->path, err);
    if (rc == OK && strcmp(t->method, "GET") == 0)
        query_make(t, given, out);
    else if (rc == OK)
        body_make(t, given, stream, &out->body);
    json_decref(given);
    return rc;
}

void mcp_tool_request_release(struct mcp_tool_request *r) {
    for (struct http_field *f = r->query; f && f->name; f++) {
        free((char *)(uintptr_t)f->name);
        free((char *)(uintptr_t)f->value);
    }
    free(r->query);
    free(r->path);
    buf_release(&r->body);
}

json_t *mcp_tool_result(const struct mcp_tool *t, const json_t *reply) {
    if (t->list) return json_pack("{s:O}", t->list, json_object_get(reply, "data"));
    return t->result ? t->result(reply) : json_incref((json_t *)(uintptr_t)reply);
}

/* streams */

/* A chunk of a chat: the text is collected, the other members of the reply are the last ones. */
static json_t *chat_chunk(struct mcp_stream *m, const json_t *chunk) {
    const json_t *choice = json_array_get(json_object_get(chunk, "choices"), 0),
                 *delta = json_object_get(choice, "delta"),
                 *reason = json_object_get(choice, "finish_reason");
    json_t *text = json_object_get(delta, "content"),
           *reasoning = json_object_get(delta, "reasoning_content"), *progress = NULL;
    if (!m->reply) m->reply = json_object();
    json_object_set(m->reply, "model", json_object_get(chunk, "model"));
    if (json_is_object(json_object_get(chunk, "usage")))
        json_object_set(m->reply, "usage", json_object_get(chunk, "usage"));
    if (json_is_string(reason))
        json_object_set_new(m->reply, "choices", json_pack("[{s:O}]", "finish_reason", reason));
    buf_add(&m->text, json_string_value(text), json_string_length(text));
    buf_add(&m->reasoning, json_string_value(reasoning), json_string_length(reasoning));
    if (json_string_length(text)) progress = text;
    if (json_string_length(reasoning)) progress = reasoning;
    return json_incref(progress);
}

json_t *mcp_stream_event(struct mcp_stream *m, const char *name, const json_t *data) {
    if (strcmp(name, "step") == 0)
        return json_sprintf("%s, iteration %d", json_get_string(data, "role"),
                            (int)json_get_number(data, "iteration"));
    if (strcmp(name, "turn") == 0)
        return json_sprintf("%s: %s", json_get_string(data, "name"), json_get_string(data, "text"));
    if (strcmp(name, "result") == 0 || json_object_get(data, "error")) {
        json_decref(m->reply);
        m->reply = json_incref((json_t *)(uintptr_t)data);
        return NULL;
    }
    return *name ? NULL : chat_chunk(m, data);
}

const json_t *mcp_stream_reply(struct mcp_stream *m) {
    json_t *choice = json_array_get(json_object_get(m->reply, "choices"), 0);
    if (!m->reply) m->reply = json_pack("{s:{s:s}}", "error", "message", "the reply ended early");
    if (choice)
        json_object_set_new(
            choice, "message",
            json_pack("{s:o,s:o}", "content", json_string_lossy(m->text.data, m->text.len),
                      "reasoning_content", json_string_lossy(m->reasoning.data, m->reasoning.len)));
    return m->reply;
}

void mcp_stream_release(struct mcp_stream *m) {
    buf_release(&m->text);
    buf_release(&m->reasoning);
    json_decref(m->reply);
}
