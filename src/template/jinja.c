/*
 * jinja: rendering: evaluates the tree of a template with its variables.
 *
 * Scopes are those of Jinja: loops, macros, captured blocks, `with` and call blocks have a scope,
 * `if` does not. A `set` writes to the innermost scope. After the end of a scope, only its changes
 * of a namespace's attributes are visible. There is one difference from Jinja. Suppose that a block
 * sets a variable that is also an input, and that blocks inside this block read the variable before
 * the `set`. In Jinja the variable is then undefined; here it has the value of the input.
 *
 * Output that is written while the item of a loop is a message of the conversation is recorded as
 * output of that message. This finds the assistant's turns in the output of templates that do not
 * mark them.
 *
 * Invariant: r->ranges cover r->root from its beginning, in ascending order, and adjacent ranges
 * have different messages.
 */
#define _GNU_SOURCE
#include "template/internal.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* limits, errors, memory */

void jinja_fail(struct jinja_ctx *w, const char *fmt, ...) {
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    error_set(w->err, ERR_FORMAT, "line %d: %s", w->line, text);
    longjmp(w->fail_jump, 1);
}

/* Adds the line to the out-of-memory error in w->err and jumps to the entry point. */
static _Noreturn void jinja_fail_memory(struct jinja_ctx *w) {
    error_wrap(w->err, "line %d", w->line);
    longjmp(w->fail_jump, 1);
}

enum { STEPS_PER_POLL = 1 << 16 };

void jinja_ctx_init(struct jinja_ctx *w, struct error *err, bool (*stop)(void *ctx), void *ctx) {
    *w = (struct jinja_ctx){.err = err,
                            .line = 1,
                            .max_bytes = JINJA_MAX_BYTES,
                            .max_steps = JINJA_MAX_STEPS,
                            .next_check = MIN(STEPS_PER_POLL, JINJA_MAX_STEPS),
                            .stop = stop,
                            .stop_ctx = ctx};
}

void jinja_check_limits(struct jinja_ctx *w) {
    if (w->steps >= w->max_steps)
        jinja_fail(w, "the template takes too many steps, more than %llu",
                   (unsigned long long)w->max_steps);
    w->next_check = MIN(w->steps + STEPS_PER_POLL, w->max_steps);
    if (!w->stop || !w->stop(w->stop_ctx)) return;
    error_set(w->err, ERR_STATE, "line %d: the rendering was ended", w->line);
    longjmp(w->fail_jump, 1);
}

static void *jinja_alloc_block(struct jinja_ctx *w, size_t size) {
    void *p = arena_try_alloc(&w->arena, size, w->err);
    if (!p) jinja_fail_memory(w);
    return p;
}

void *jinja_alloc(struct jinja_ctx *w, size_t size) {
    const size_t block = 1 << 16;
    size = (size + 15) & ~(size_t)15;
    if (size > w->max_bytes || w->bytes + size > w->max_bytes)
        jinja_fail(w, "the template takes more than %zu MiB of memory", w->max_bytes >> 20);
    w->bytes += size;
    jinja_charge_bytes(w, size);
    if (size > block / 4) return jinja_alloc_block(w, size);
    if (size > w->block_left) {
        w->block_pos = jinja_alloc_block(w, block);
        w->block_left = block;
    }
    void *p = w->block_pos;
    w->block_pos += size;
    w->block_left -= size;
    return p;
}

void *jinja_grow(struct jinja_ctx *w, void *v, size_t n, size_t *cap, size_t size) {
    if (n < *cap) return v;
    size_t new_cap = MAX(n * 2, (size_t)4);
    void *out = jinja_alloc(w, new_cap * size);
    if (n) memcpy(out, v, n * size);
    *cap = new_cap;
    return out;
}

void jinja_enter(struct jinja_ctx *w) {
    jinja_add_steps(w, 1);
    if (++w->depth > JINJA_MAX_DEPTH) jinja_fail(w, "nested too deeply");
}

/* scopes */

struct jinja_scope {
    struct jinja_scope *parent;
    struct dict vars;
};

struct render {
    struct jinja_ctx w;
    struct jinja_scope *scope;
    struct text *out, root;
    struct str captured; /* input of the innermost filter of a block */
    struct jinja_message_range *ranges;
    size_t n_ranges, ranges_cap;
    int message;       /* message of the enclosing loop, or -1 */
    size_t max_output; /* bytes of root */
    int64_t now;
    bool strict; /* see jinja_parse_strict */
};

static void scope_set(struct render *r, struct jinja_scope *s, struct str name, struct value v) {
    dict_set(&r->w, &s->vars, STRING(name), v);
}

static void set_named(struct render *r, struct jinja_scope *s, const char *name, struct value v) {
    scope_set(r, s, (struct str){name, strlen(name), NULL}, v);
}

static struct jinja_scope *scope_push(struct render *r, struct jinja_scope *parent) {
    struct jinja_scope *s = jinja_alloc(&r->w, sizeof *s);
    s->parent = parent;
    return r->scope = s;
}

static struct value name_lookup(struct render *r, struct str name) {
    for (struct jinja_scope *s = r->scope; s; s = s->parent) {
        const struct value *found = dict_find(&r->w, &s->vars, STRING(name));
        if (found) return *found;
    }
    const struct function *f = function_find(name);
    if (f && !(r->now < 0 && strcmp(f->name, "strftime_now") == 0))
        return (struct value){.kind = V_FUNCTION, .function = f};
    return (struct value){.kind = V_UNDEFINED, .s = name};
}

/* output */

static void output_add(struct render *r, struct str s) {
    if (s.n == 0) return;
    bool root = r->out == &r->root;
    if (root && s.n > r->max_output - r->root.n)
        jinja_fail(&r->w, "the template writes more than %zu KiB", r->max_output >> 10);
    if (root && (r->n_ranges == 0 || r->ranges[r->n_ranges - 1].message != r->message)) {
        r->ranges = jinja_grow(&r->w, r->ranges, r->n_ranges, &r->ranges_cap, sizeof *r->ranges);
        r->ranges[r->n_ranges++] = (struct jinja_message_range){r->root.n, r->message};
    }
    text_add(&r->w, r->out, s);
}

/* expressions */

/* eval fails for an undefined value if the template is strict; eval_any does not. */
static struct value eval(struct render *r, const struct node *n);
static struct value eval_any(struct render *r, const struct node *n);
enum loop_control { NEXT, BREAK, CONTINUE };
static enum loop_control run(struct render *r, const struct nodes *body);

static struct args eval_args(struct render *r, const struct nodes *list) {
    struct args a = {.now = r->now};
    a.v = jinja_alloc(&r->w, (list->n + 1) * sizeof *a.v);
    a.named = jinja_alloc(&r->w, (list->n + 2) * sizeof *a.named); /* one more for `caller` */
    for (size_t i = 0; i < list->n; i++) {
        const struct node *n = list->v[i];
        if (n->kind == NODE_KWARG)
            a.named[a.n_named++] = (struct pair){STRING(n->name), eval(r, n->a)};
        else
            a.v[a.n++] = eval(r, n);
    }
    jinja_add_steps(&r->w, a.n_named); /* for the lookups by name */
    return a;
}

/* Runs a body with its own scope and returns the text that it writes. */
static struct str capture(struct render *r, const struct nodes *body, enum loop_control *flow) {
    struct text t = {0}, *out = r->out;
    struct jinja_scope *scope = r->scope;
    r->out = &t;
    scope_push(r, scope);
    *flow = run(r, body);
    r->scope = scope;
    r->out = out;
    return text_str(&t);
}

static void bind_parameters(struct render *r, const struct macro *m, const struct args *a) {
    const struct node *n = m->node;
    size_t required = n->list.n - n->list2.n, used = 0;
    if (a->n > n->list.n) jinja_fail(&r->w, "a macro takes at most %zu arguments", n->list.n);
    for (size_t i = 0; i < n->list.n; i++) {
        struct str name = n->list.v[i]->name;
        struct value v = {.kind = V_UNDEFINED, .s = name};
        const char *text = str_from(&r->w, name.p, name.n, 0).p;
        jinja_add_steps(&r->w, a->n_named);
        for (size_t k = 0; k < a->n_named; k++) used += str_equal(a->named[k].key.s, name);
        v = arg_get(a, i, text, v);
        if (i >= a->n && v.kind == V_UNDEFINED && i >= required)
            v = eval(r, n->list2.v[i - required]);
        scope_set(r, r->scope, name, v);
    }
    for (size_t k = 0; k < a->n_named; k++) {
        if (!str_is(a->named[k].key.s, "caller")) continue;
        used++;
        set_named(r, r->scope, "caller", a->named[k].value);
        if (!n->uses_caller) jinja_fail(&r->w, "the macro does not use 'caller'");
    }
    if (used != a->n_named) jinja_fail(&r->w, "a macro has no argument of this name");
}

static struct value call_macro(struct render *r, const struct macro *m, const struct args *a) {
    struct jinja_scope *scope = r->scope;
    enum loop_control flow;
    jinja_enter(&r->w);
    scope_push(r, m->scope);
    bind_parameters(r, m, a);
    struct str s = capture(r, &m->node->list3, &flow);
    r->scope = scope;
    r->w.depth--;
    return STRING(s);
}

static struct value call_value(struct render *r, struct value f, const struct args *a) {
    if (f.kind == V_FUNCTION) return f.function->call(&r->w, a);
    if (f.kind == V_METHOD) return method_call(&r->w, f.method, a);
    if (f.kind == V_MACRO) return call_macro(r, f.macro, a);
    if (f.kind == V_UNDEFINED)
        jinja_fail(&r->w, "'%.*s' is undefined%s", (int)MIN(f.s.n, 60u), f.s.p ? f.s.p : "",
                   f.s.p && str_is(f.s, "strftime_now")
                       ? "; give it a date: SOURCE_DATE_EPOCH in the environment"
                       : "");
    if (f.kind == V_LOOP) jinja_fail(&r->w, "recursive loops are not supported");
    jinja_fail(&r->w, "a %s cannot be called", value_type(f));
}

static struct value eval_dict(struct render *r, const struct node *n) {
    struct value v = {.kind = V_DICT, .dict = dict_new(&r->w)};
    for (size_t i = 0; i < n->list.n; i++) {
        struct value key = eval(r, n->list.v[i]);
        dict_set(&r->w, v.dict, key, eval(r, n->list2.v[i]));
    }
    return v;
}

static struct value eval_list(struct render *r, const struct node *n) {
    struct list *l = list_new(&r->w, n->kind == NODE_TUPLE ? TUPLE : LIST);
    for (size_t i = 0; i < n->list.n; i++) list_add(&r->w, l, eval(r, n->list.v[i]));
    return LIST_VALUE(l);
}

static struct value eval_item(struct render *r, const struct node *n) {
    struct value v = eval(r, n->a), part[3] = {NONE, NONE, NONE};
    if (n->b->kind != NODE_SLICE) return value_item(&r->w, v, eval(r, n->b));
    for (int i = 0; i < 3; i++)
        if (n->b->list.v[i]) part[i] = eval(r, n->b->list.v[i]);
    return value_slice(&r->w, v, part);
}

/* Whether a filter or a test is for values that may be undefined. */
static bool takes_undefined(const struct node *n) {
    return n->kind == NODE_FILTER ? str_is(n->name, "default") || str_is(n->name, "d")
                                  : str_is(n->name, "defined") || str_is(n->name, "undefined");
}

static struct value eval_operand(struct render *r, const struct node *n) {
    return takes_undefined(n) ? eval_any(r, n->a) : eval(r, n->a);
}

static struct value eval_filter(struct render *r, const struct node *n) {
    struct value v = n->a ? eval_operand(r, n) : STRING(r->captured);
    struct args a = eval_args(r, &n->list);
    r->w.line = n->line;
    return filter_apply(&r->w, n->name, v, &a);
}

static struct value eval_test(struct render *r, const struct node *n) {
    struct value v = eval_operand(r, n);
    struct args a = eval_args(r, &n->list);
    r->w.line = n->line;
    return BOOL(jinja_test_apply(&r->w, n->name, v, &a));
}

static bool compare_values(struct render *r, int op, struct value a, struct value b) {
    struct jinja_ctx *w = &r->w;
    if (op == OP('=', '=')) return value_equal(w, a, b);
    if (op == OP('!', '=')) return !value_equal(w, a, b);
    if (op == OP_IN) return value_in(w, a, b);
    if (op == OP_NOT_IN) return !value_in(w, a, b);
    int c = value_compare(w, a, b);
    if (op == '<') return c == -1;
    if (op == '>') return c == 1;
    if (op == OP('<', '=')) return c == -1 || c == 0;
    return c == 1 || c == 0;
}

/* a < b < c: compares neighbours up to the first comparison that is false. */
static struct value eval_compare(struct render *r, const struct node *n) {
    struct value a = eval(r, n->a);
    for (size_t i = 0; i < n->list.n; i++) {
        struct value b = eval(r, n->list.v[i]->a);
        r->w.line = n->line;
        if (!compare_values(r, n->list.v[i]->op, a, b)) return BOOL(false);
        a = b;
    }
    return BOOL(true);
}

static struct value eval_concat(struct render *r, const struct node *n) {
    struct text t = {0};
    for (size_t i = 0; i < n->list.n; i++)
        text_add(&r->w, &t, value_str(&r->w, eval(r, n->list.v[i])));
    return STRING(text_str(&t));
}

static struct value eval_sign(struct render *r, const struct node *n) {
    struct value v = eval(r, n->a);
    if (v.kind == V_FLOAT) return FLOAT(n->kind == NODE_NEG ? -v.f : v.f);
    return value_binary(&r->w, n->kind == NODE_NEG ? '-' : '+', INT(0), v);
}

static struct value eval_binary(struct render *r, const struct node *n) {
    struct value a = eval(r, n->a), b = eval(r, n->b);
    r->w.line = n->line;
    return value_binary(&r->w, n->op, a, b);
}

static struct value eval_cond(struct render *r, const struct node *n) {
    if (value_truth(eval(r, n->b))) return eval(r, n->a);
    return n->c ? eval(r, n->c) : UNDEFINED;
}

static struct value eval_call(struct render *r, const struct node *n) {
    struct value f = eval(r, n->a);
    struct args a = eval_args(r, &n->list);
    r->w.line = n->line;
    return call_value(r, f, &a);
}

static struct value eval_logic(struct render *r, const struct node *n) {
    struct value a = eval(r, n->a);
    return value_truth(a) == (n->kind == NODE_AND) ? eval(r, n->b) : a;
}

static struct value eval_kind(struct render *r, const struct node *n) {
    switch (n->kind) {
    case NODE_CONST:
        return n->value;
    case NODE_NAME:
        return name_lookup(r, n->name);
    case NODE_LIST:
    case NODE_TUPLE:
        return eval_list(r, n);
    case NODE_DICT:
        return eval_dict(r, n);
    case NODE_ATTR:
        return value_attr(&r->w, eval(r, n->a), n->name);
    case NODE_ITEM:
        return eval_item(r, n);
    case NODE_CALL:
        return eval_call(r, n);
    case NODE_FILTER:
        return eval_filter(r, n);
    case NODE_TEST:
        return eval_test(r, n);
    case NODE_NOT:
        return BOOL(!value_truth(eval(r, n->a)));
    case NODE_NEG:
    case NODE_POS:
        return eval_sign(r, n);
    case NODE_AND:
    case NODE_OR:
        return eval_logic(r, n);
    case NODE_BINARY:
        return eval_binary(r, n);
    case NODE_COMPARE:
        return eval_compare(r, n);
    case NODE_CONCAT:
        return eval_concat(r, n);
    case NODE_COND:
        return eval_cond(r, n);
    default:
        jinja_fail(&r->w, "a slice is used where a value is needed");
    }
}

static struct value eval_any(struct render *r, const struct node *n) {
    jinja_enter(&r->w);
    jinja_charge_bytes(&r->w, 0);
    r->w.line = n->line;
    struct value v = eval_kind(r, n);
    r->w.depth--;
    return v;
}

static struct value eval(struct render *r, const struct node *n) {
    struct value v = eval_any(r, n);
    if (r->strict && v.kind == V_UNDEFINED)
        jinja_fail(&r->w, "'%.*s' is undefined", (int)MIN(v.s.n, 60u), v.s.p ? v.s.p : "");
    return v;
}

/* statements */

static void assign(struct render *r, const struct node *target, struct value v) {
    if (target->kind == NODE_NAME) {
        scope_set(r, r->scope, target->name, v);
    } else if (target->kind == NODE_NSREF) {
        struct value ns = name_lookup(r, target->name);
        if (ns.kind != V_NAMESPACE)
            jinja_fail(&r->w, "'%.*s' is no namespace", (int)MIN(target->name.n, 60u),
                       target->name.p);
        dict_set(&r->w, ns.dict, STRING(target->name2), v);
    } else {
        const struct list *l = value_items(&r->w, v);
        if (l->n != target->list.n)
            jinja_fail(&r->w, "%zu values for %zu names", l->n, target->list.n);
        for (size_t i = 0; i < l->n; i++) assign(r, target->list.v[i], l->v[i]);
    }
}

static struct list *loop_items(struct render *r, const struct node *n) {
    struct list *all = value_items(&r->w, eval(r, n->b));
    if (!n->c) return all;
    struct list *kept = list_new(&r->w, LIST);
    struct jinja_scope *scope = r->scope;
    for (size_t i = 0; i < all->n; i++) {
        scope_push(r, scope);
        assign(r, n->a, all->v[i]);
        struct value item = all->v[i];
        if (n->a->kind != NODE_NAME) { /* loop.previtem is then a tuple */
            item = LIST_VALUE(list_new(&r->w, TUPLE));
            const struct list *parts = value_items(&r->w, all->v[i]);
            for (size_t k = 0; k < parts->n; k++) list_add(&r->w, item.list, parts->v[k]);
        }
        if (value_truth(eval(r, n->c))) list_add(&r->w, kept, item);
    }
    r->scope = scope;
    return kept;
}

/* As in Jinja, `else` runs when no iteration was completed: after an empty list, and also when
 * break or continue left every iteration. */
static enum loop_control run_for(struct render *r, const struct node *n) {
    struct jinja_scope *scope = r->scope;
    int message = r->message;
    bool completed = false;
    enum loop_control flow = NEXT;
    struct loop *loop = jinja_alloc(&r->w, sizeof *loop);
    loop->items = loop_items(r, n);
    for (; loop->i < loop->items->n && flow != BREAK; loop->i++) {
        struct value item = loop->items->v[loop->i];
        jinja_charge_bytes(&r->w, 0);
        if (item.kind == V_DICT && item.dict->message >= 0) r->message = item.dict->message;
        set_named(r, scope_push(r, scope), "loop", (struct value){.kind = V_LOOP, .loop = loop});
        assign(r, n->a, item);
        flow = run(r, &n->list);
        completed |= flow == NEXT;
        r->message = message;
    }
    flow = NEXT;
    if (!completed) {
        scope_push(r, scope);
        flow = run(r, &n->list2);
    }
    r->scope = scope;
    return flow;
}

static struct value macro_value(struct render *r, const struct node *n) {
    struct macro *m = jinja_alloc(&r->w, sizeof *m);
    *m = (struct macro){n, r->scope};
    return (struct value){.kind = V_MACRO, .macro = m};
}

static void run_call_block(struct render *r, const struct node *n) {
    struct value f = eval(r, n->a->a);
    struct args a = eval_args(r, &n->a->list);
    a.named[a.n_named++] = (struct pair){STRING(STR("caller")), macro_value(r, n)};
    if (f.kind != V_MACRO) jinja_fail(&r->w, "'call' of a %s is not supported", value_type(f));
    output_add(r, value_str(&r->w, call_value(r, f, &a)));
}

static enum loop_control run_set_block(struct render *r, const struct node *n) {
    enum loop_control flow;
    struct str s = capture(r, &n->list, &flow);
    if (flow != NEXT) return flow;
    r->captured = s;
    assign(r, n->a, n->b ? eval(r, n->b) : STRING(s));
    return NEXT;
}

static enum loop_control run_filter_block(struct render *r, const struct node *n) {
    enum loop_control flow;
    struct str s = capture(r, &n->list, &flow);
    if (flow != NEXT) return flow;
    r->captured = s;
    struct value v = eval(r, n->b);
    output_add(r, v.kind == V_MARKUP ? v.s : value_str(&r->w, v));
    return NEXT;
}

/* The values are evaluated in the outer scope. */
static enum loop_control run_with(struct render *r, const struct node *n) {
    struct jinja_scope *scope = r->scope;
    struct value *v = jinja_alloc(&r->w, (n->list.n + 1) * sizeof *v);
    for (size_t i = 0; i < n->list.n; i++) v[i] = eval(r, n->list2.v[i]);
    scope_push(r, scope);
    for (size_t i = 0; i < n->list.n; i++) assign(r, n->list.v[i], v[i]);
    enum loop_control flow = run(r, &n->list3);
    r->scope = scope;
    return flow;
}

static void run_generation(struct render *r, const struct node *n) {
    enum loop_control flow;
    struct str s = capture(r, &n->list, &flow);
    uint8_t *origins = jinja_alloc(&r->w, s.n);
    for (size_t i = 0; i < s.n; i++)
        origins[i] = (uint8_t)((s.origins ? s.origins[i] : 0) | JINJA_GENERATED);
    jinja_charge_scan(&r->w, s.n);
    s.origins = origins;
    output_add(r, s);
}

static void run_print(struct render *r, const struct node *n) {
    struct value v = eval(r, n->a);
    r->w.line = n->line;
    output_add(r, v.kind == V_MARKUP ? v.s : value_str(&r->w, v));
}

static enum loop_control run_one(struct render *r, const struct node *n) {
    r->w.line = n->line;
    switch (n->kind) {
    case NODE_TEXT:
        output_add(r, n->value.s);
        return NEXT;
    case NODE_PRINT:
        run_print(r, n);
        return NEXT;
    case NODE_IF:
        return run(r, value_truth(eval(r, n->a)) ? &n->list : &n->list2);
    case NODE_FOR:
        return run_for(r, n);
    case NODE_SET:
        assign(r, n->a, eval(r, n->b));
        return NEXT;
    case NODE_SET_BLOCK:
        return run_set_block(r, n);
    case NODE_MACRO:
        scope_set(r, r->scope, n->name, macro_value(r, n));
        return NEXT;
    case NODE_CALL_BLOCK:
        run_call_block(r, n);
        return NEXT;
    case NODE_FILTER_BLOCK:
        return run_filter_block(r, n);
    case NODE_WITH:
        return run_with(r, n);
    case NODE_GENERATION:
        run_generation(r, n);
        return NEXT;
    default:
        return n->kind == NODE_BREAK ? BREAK : CONTINUE;
    }
}

static enum loop_control run(struct render *r, const struct nodes *body) {
    enum loop_control flow = NEXT;
    jinja_enter(&r->w);
    for (size_t i = 0; flow == NEXT && i < body->n; i++) {
        jinja_charge_bytes(&r->w, 0);
        flow = run_one(r, body->v[i]);
    }
    r->w.depth--;
    return flow;
}

/* entry */

/* Creates the variables, and sets the limits of memory and output in proportion to their size: the
 * copies that a template makes of a long conversation fit, but a short request cannot take much
 * memory or produce much text. A string of the variables takes at least twice its bytes, because of
 * its origins. */
static void variables_bind(struct render *r, const struct jinja_input *in) {
    const char *name;
    json_t *v;
    scope_push(r, NULL);
    json_object_foreach ((json_t *)(uintptr_t)in->vars, name, v) {
        bool messages = strcmp(name, "messages") == 0 && json_is_array(v);
        set_named(r, r->scope, name,
                  messages ? value_messages(&r->w, v) : value_from_json(&r->w, v, JINJA_DATA));
    }
    json_object_foreach ((json_t *)(uintptr_t)in->trusted, name, v)
        set_named(r, r->scope, name, value_from_json(&r->w, v, 0));
    r->max_output = JINJA_BASE_TEXT + 2 * r->w.bytes;
    r->w.max_bytes = MIN(JINJA_MAX_BYTES, JINJA_BASE_BYTES + 16 * r->w.bytes);
}

static void output_copy(struct render *r, struct jinja_output *out) {
    const struct text *t = &r->root;
    out->text = try_calloc(t->n + 1, 1, r->w.err);
    out->origins = out->text ? try_calloc(t->n + 1, 1, r->w.err) : NULL;
    out->message_ranges =
        out->origins ? try_calloc(r->n_ranges + 1, sizeof *out->message_ranges, r->w.err) : NULL;
    if (!out->message_ranges) jinja_fail_memory(&r->w);
    out->n = t->n;
    out->n_message_ranges = r->n_ranges;
    if (t->n) memcpy(out->text, t->p, t->n);
    if (t->origins) memcpy(out->origins, t->origins, t->n);
    if (r->n_ranges)
        memcpy(out->message_ranges, r->ranges, r->n_ranges * sizeof *out->message_ranges);
}

int jinja_render(const struct jinja *j, const struct jinja_input *in, struct jinja_output *out,
                 struct error *err) {
    struct render *r = xcalloc(1, sizeof *r);
    int rc = OK;
    *out = (struct jinja_output){0};
    jinja_ctx_init(&r->w, err, in->stop, in->stop_ctx);
    r->w.steps = in->steps_used;
    if (in->max_steps) r->w.max_steps = in->max_steps;
    r->w.next_check = MIN(r->w.next_check, r->w.max_steps);
    r->out = &r->root;
    r->message = -1;
    r->strict = j->strict;
    r->now = in->now;
    if (setjmp(r->w.fail_jump) == 0) {
        variables_bind(r, in);
        run(r, &j->body);
        output_copy(r, out);
    } else {
        rc = err->code;
    }
    out->steps = r->w.steps - in->steps_used;
    out->bytes = r->w.bytes;
    arena_release(&r->w.arena);
    free(r);
    return rc;
}

void jinja_output_release(struct jinja_output *out) {
    free(out->text);
    free(out->origins);
    free(out->message_ranges);
    *out = (struct jinja_output){0};
}
