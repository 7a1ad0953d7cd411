/*
 * knowledge: files, their chunks, a full-text index and a cache of embeddings in one SQLite file.
 *
 * The full-text index (FTS5) stores the terms that terms.c produces, and no text. BM25 is computed
 * here from its postings, because FTS5's own ranking uses the C library's logarithm, which differs
 * between systems. The tables are
 *
 *     files(id) <- chunks(file, n, title, content, hash)   one row per chunk, n-th of its file
 *                  chunks(id) = words(rowid)               its terms
 *                  chunks(hash) = embeddings(hash, model)  its vectors, one per model
 *
 * Invariant: the tables are consistent after every commit. A file is split again only if the hash
 * of its content or the chunk size has changed.
 */
#define _GNU_SOURCE
#include "memory/internal.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistr.h>

#define APPLICATION_ID 0x53484b42 /* "SHKB" */
enum {
    CHUNK_CHARS = 800,     /* default of knowledge_options.chunk_chars */
    TITLE_CHARS = 200,     /* longer titles are truncated */
    FILE_LIMIT = 64 << 20, /* bytes */
    DEPTH_LIMIT = 32,      /* folders in folders */
    EMBED_BATCH = 16,      /* chunks per call of the embedder */
    QUERY_LIMIT = 64 << 10 /* bytes */
};

/* The schema is created in one transaction, so that a process that is killed leaves no file that
 * owner_check would refuse. */
static const char schema[] =
    "BEGIN IMMEDIATE;"
    "CREATE TABLE IF NOT EXISTS files(id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE,"
    "  hash TEXT NOT NULL, chars INTEGER NOT NULL, documents INTEGER NOT NULL) STRICT;"
    "CREATE TABLE IF NOT EXISTS chunks(id INTEGER PRIMARY KEY, file INTEGER NOT NULL,"
    "  n INTEGER NOT NULL, title TEXT NOT NULL, content TEXT NOT NULL, hash TEXT NOT NULL,"
    "  terms INTEGER NOT NULL, UNIQUE(file, n)) STRICT;"
    "CREATE INDEX IF NOT EXISTS chunks_hash ON chunks(hash);"
    "CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(terms, content = '', tokenize = 'ascii');"
    "CREATE VIRTUAL TABLE IF NOT EXISTS postings USING fts5vocab(words, 'instance');"
    "CREATE TABLE IF NOT EXISTS embeddings(hash TEXT NOT NULL, model TEXT NOT NULL, v BLOB NOT "
    "NULL,"
    "  PRIMARY KEY(hash, model)) STRICT, WITHOUT ROWID;"
    "PRAGMA application_id = 0x53484b42;"
    "PRAGMA user_version = 1;"
    "COMMIT";

enum knowledge_statement {
    FILE_GET,
    FILE_PUT,
    FILE_DOCUMENTS,
    FILE_DELETE,
    FILE_PATHS,
    FILE_LIST,
    CHUNK_PUT,
    CHUNKS_OF,
    CHUNKS_DELETE,
    CHUNK_GET,
    CHUNK_ORDER,
    TOTALS,
    WORDS_PUT,
    WORDS_DELETE,
    POSTINGS,
    EMBED_MISSING,
    EMBED_COUNT,
    EMBED_PUT,
    EMBED_PRUNE,
    EMBED_LIST,
    N_STATEMENTS
};
static const char *const sql[N_STATEMENTS] = {
    [FILE_GET] = "SELECT id, hash, chars FROM files WHERE path = ?1",
    [FILE_PUT] = "INSERT INTO files(path, hash, chars, documents) VALUES(?1, ?2, ?3, 0)",
    [FILE_DOCUMENTS] = "UPDATE files SET documents = ?2 WHERE id = ?1",
    [FILE_DELETE] = "DELETE FROM files WHERE id = ?1",
    [FILE_PATHS] = "SELECT id, path FROM files WHERE path = ?1"
                   " OR substr(path, 1, length(?1) + 1) = ?1 || '/' ORDER BY path",
    [FILE_LIST] = "SELECT path, hash, documents, (SELECT count(*) FROM chunks WHERE file = f.id)"
                  " FROM files f ORDER BY path",
    [CHUNK_PUT] = "INSERT INTO chunks(file, n, title, content, hash, terms)"
                  " VALUES(?1, ?2, ?3, ?4, ?5, ?6)",
    [CHUNKS_OF] = "SELECT id, title, content FROM chunks WHERE file = ?1",
    [CHUNKS_DELETE] = "DELETE FROM chunks WHERE file = ?1",
    [CHUNK_GET] = "SELECT c.title, f.path, c.content FROM chunks c JOIN files f ON f.id = c.file"
                  " WHERE c.id = ?1",
    [CHUNK_ORDER] = "SELECT c.id, c.terms FROM chunks c JOIN files f ON f.id = c.file"
                    " ORDER BY f.path, c.n",
    [TOTALS] = "SELECT (SELECT coalesce(sum(documents), 0) FROM files),"
               " (SELECT count(*) FROM chunks)",
    [WORDS_PUT] = "INSERT INTO words(rowid, terms) VALUES(?1, ?2)",
    [WORDS_DELETE] = "INSERT INTO words(words, rowid, terms) VALUES('delete', ?1, ?2)",
    [POSTINGS] = "SELECT doc, count(*) FROM postings WHERE term >= ?1 AND term <= ?2"
                 " GROUP BY doc ORDER BY doc",
    [EMBED_MISSING] = "SELECT hash, title, content FROM chunks c WHERE NOT EXISTS (SELECT 1 FROM"
                      " embeddings e WHERE e.hash = c.hash AND e.model = ?1)"
                      " GROUP BY hash ORDER BY min(id) LIMIT ?2",
    [EMBED_COUNT] = "SELECT count(DISTINCT hash) FROM chunks c WHERE NOT EXISTS (SELECT 1 FROM"
                    " embeddings e WHERE e.hash = c.hash AND e.model = ?1)",
    [EMBED_PUT] = "INSERT OR REPLACE INTO embeddings VALUES(?1, ?2, ?3)",
    [EMBED_PRUNE] = "DELETE FROM embeddings WHERE hash NOT IN (SELECT hash FROM chunks)",
    [EMBED_LIST] = "SELECT c.id, e.v FROM chunks c JOIN embeddings e"
                   " ON e.hash = c.hash AND e.model = ?1",
};

struct knowledge {
    sqlite3 *db;
    sqlite3_stmt *stmts[N_STATEMENTS];
    char *path;
};

static int db_error(struct knowledge *k, struct error *err, const char *what) {
    int why = sqlite3_errcode(k->db) == SQLITE_CANTOPEN ? sqlite3_system_errno(k->db) : 0;
    const char *system = why ? strerrordesc_np(why) : NULL;
    return error_set(err, ERR_IO, "cannot %s '%s': %s%s%s", what, k->path, sqlite3_errmsg(k->db),
                     system ? ": " : "", system ? system : "");
}

static int db_exec(struct knowledge *k, const char *text, struct error *err) {
    return sqlite3_exec(k->db, text, NULL, NULL, NULL) == SQLITE_OK ? OK
                                                                    : db_error(k, err, "write");
}

/* A prepared statement, created on first use; NULL sets err. */
static sqlite3_stmt *statement(struct knowledge *k, enum knowledge_statement which,
                               struct error *err) {
    sqlite3_stmt **q = &k->stmts[which];
    if (!*q && sqlite3_prepare_v3(k->db, sql[which], -1, SQLITE_PREPARE_PERSISTENT, q, NULL) !=
                   SQLITE_OK) {
        db_error(k, err, "read");
        return NULL;
    }
    sqlite3_reset(*q);
    sqlite3_clear_bindings(*q);
    return *q;
}

/* Binds a copy, which SQLite frees. */
static void bind_text(sqlite3_stmt *q, int index, const char *text) {
    sqlite3_bind_text(q, index, xstrdup(text), -1, free);
}

static int statement_run(struct knowledge *k, sqlite3_stmt *q, struct error *err) {
    int rc = sqlite3_step(q) == SQLITE_DONE ? OK : db_error(k, err, "write");
    sqlite3_reset(q);
    return rc;
}

/* Resets a query; `step` is the last result of sqlite3_step. */
static int statement_end(struct knowledge *k, sqlite3_stmt *q, int step, struct error *err) {
    int rc = step == SQLITE_DONE ? OK : db_error(k, err, "read");
    sqlite3_reset(q);
    return rc;
}

static const char *column_text(sqlite3_stmt *q, int index) {
    const char *text = (const char *)sqlite3_column_text(q, index);
    return text ? text : "";
}

/* Reads a single number, such as a pragma or a count. */
static int query_number(struct knowledge *k, const char *text, int64_t *out, struct error *err) {
    sqlite3_stmt *q = NULL;
    int rc = OK;
    if (sqlite3_prepare_v2(k->db, text, -1, &q, NULL) != SQLITE_OK || sqlite3_step(q) != SQLITE_ROW)
        rc = db_error(k, err, "read");
    else
        *out = sqlite3_column_int64(q, 0);
    sqlite3_finalize(q);
    return rc;
}

/* Refuses a database of another program without changing it. *version receives the version of the
 * schema; 0: there are no tables yet. */
static int owner_check(struct knowledge *k, int64_t *version, struct error *err) {
    int64_t id = 0, tables = 0;
    if (query_number(k, "PRAGMA application_id", &id, err) != OK ||
        query_number(k, "SELECT count(*) FROM sqlite_schema", &tables, err) != OK ||
        query_number(k, "PRAGMA user_version", version, err) != OK)
        return err->code;
    if (tables && id != APPLICATION_ID)
        return error_set(err, ERR_MISMATCH, "'%s' is not a knowledge base", k->path);
    if (*version > 1)
        return error_set(err, ERR_MISMATCH,
                         "'%s' was made by a newer shoal (version %d, this one knows 1)", k->path,
                         (int)*version);
    return OK;
}

/* If path_access_hook does not allow writing, opens the file as immutable, so that SQLite creates
 * no files next to it. Changes by another process are then not visible. */
static int database_open(struct knowledge *k, const char *path, bool *read_only) {
    struct error refused;
    *read_only = path_access_hook && path_access_hook(path, PATH_USE_WRITE, &refused) != OK;
    if (!*read_only) return sqlite3_open(path, &k->db);
    struct buf uri = {0};
    buf_puts(&uri, "file:");
    for (const char *p = path; *p; p++)
        buf_printf(&uri, strchr("%?#", *p) ? "%%%02X" : "%c", (unsigned char)*p);
    buf_puts(&uri, "?immutable=1");
    int rc = sqlite3_open_v2(uri.data, &k->db, SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, NULL);
    buf_release(&uri);
    return rc;
}

struct knowledge *knowledge_open(const char *path, bool create, struct error *err) {
    if (!create && !path_exists(path)) {
        error_set(err, ERR_MISSING, "no knowledge base '%s'; 'shoal knowledge add' makes one",
                  path);
        return NULL;
    }
    struct knowledge *k = xcalloc(1, sizeof *k);
    int64_t version = 0;
    k->path = xstrdup(path);
    bool read_only = false;
    int rc = create && !path_exists(path) ? file_make_private(path, err) : OK;
    if (rc == OK && database_open(k, path, &read_only) != SQLITE_OK) rc = db_error(k, err, "open");
    if (rc == OK) sqlite3_busy_timeout(k->db, 10000);
    if (rc == OK) rc = owner_check(k, &version, err);
    if (rc == OK && read_only) return k;
    if (rc == OK && store_set_wal(k->db) != SQLITE_OK) rc = db_error(k, err, "write");
    if (rc == OK && version == 0) rc = db_exec(k, schema, err);
    if (rc == OK) return k;
    knowledge_close(k);
    return NULL;
}

void knowledge_close(struct knowledge *k) {
    if (!k) return;
    for (int i = 0; i < N_STATEMENTS; i++) sqlite3_finalize(k->stmts[i]);
    sqlite3_close(k->db);
    free(k->path);
    free(k);
}

/* adding and removing chunks */

/* Title and content as one text, for the index and the embedder; malloc'ed. */
static char *indexed_text(const char *title, const char *content) {
    return xasprintf("%s\n%s", title, content);
}

static int words_update(struct knowledge *k, enum knowledge_statement which, int64_t id,
                        const char *terms, struct error *err) {
    sqlite3_stmt *q = statement(k, which, err);
    if (!q) return err->code;
    sqlite3_bind_int64(q, 1, id);
    bind_text(q, 2, terms);
    return statement_run(k, q, err);
}

static int words_delete(struct knowledge *k, int64_t id, const char *title, const char *content,
                        struct error *err) {
    struct buf terms = {0};
    int64_t n;
    char *text = indexed_text(title, content);
    int rc = terms_index(text, strlen(text), &terms, &n, err);
    if (rc == OK) rc = words_update(k, WORDS_DELETE, id, terms.data, err);
    buf_release(&terms);
    free(text);
    return rc;
}

static int chunk_insert(struct knowledge *k, int64_t file, int64_t n, const char *title,
                        const char *content, const char *hash, int64_t terms, struct error *err) {
    sqlite3_stmt *q = statement(k, CHUNK_PUT, err);
    if (!q) return err->code;
    sqlite3_bind_int64(q, 1, file);
    sqlite3_bind_int64(q, 2, n);
    bind_text(q, 3, title);
    bind_text(q, 4, content);
    bind_text(q, 5, hash);
    sqlite3_bind_int64(q, 6, terms);
    return statement_run(k, q, err);
}

static int chunk_add(struct knowledge *k, int64_t file, int64_t n, const char *title,
                     const char *content, struct error *err) {
    char hash[HASH_LEN], *text = indexed_text(title, content);
    struct buf terms = {0};
    int64_t count = 0;
    sha256_bytes(text, strlen(text), hash);
    int rc = terms_index(text, strlen(text), &terms, &count, err);
    if (rc == OK) rc = chunk_insert(k, file, n, title, content, hash, count, err);
    if (rc == OK)
        rc = words_update(k, WORDS_PUT, sqlite3_last_insert_rowid(k->db), terms.data, err);
    buf_release(&terms);
    free(text);
    return rc;
}

static int statement_run_with_id(struct knowledge *k, enum knowledge_statement which, int64_t id,
                                 struct error *err) {
    sqlite3_stmt *q = statement(k, which, err);
    if (!q) return err->code;
    sqlite3_bind_int64(q, 1, id);
    return statement_run(k, q, err);
}

/* Deletes a file and its chunks. The index stores no text, so the terms of each chunk must be
 * passed to it again to remove them. */
static int file_delete(struct knowledge *k, int64_t file, struct error *err) {
    sqlite3_stmt *q = statement(k, CHUNKS_OF, err);
    if (!q) return err->code;
    sqlite3_bind_int64(q, 1, file);
    int rc = OK, step = SQLITE_DONE;
    while (rc == OK && (step = sqlite3_step(q)) == SQLITE_ROW)
        rc = words_delete(k, sqlite3_column_int64(q, 0), column_text(q, 1), column_text(q, 2), err);
    if (rc == OK) rc = statement_end(k, q, step, err);
    sqlite3_reset(q);
    if (rc == OK) rc = statement_run_with_id(k, CHUNKS_DELETE, file, err);
    return rc == OK ? statement_run_with_id(k, FILE_DELETE, file, err) : rc;
}

/* documents */

/* A file that is being added. */
struct source_file {
    struct knowledge *k;
    const char *path;
    int64_t id;
    int chars;
    int64_t chunks;
    int documents;
};

/* Splits a document into chunks and adds them. An empty `title` is replaced by the file's name
 * without its suffix. */
static int document_add(struct source_file *s, const char *title, const char *text, size_t len,
                        struct error *err) {
    const char *name = path_name(s->path);
    const char *dot = strrchr(name, '.');
    char *chunk_title = *title ? strndup(title, utf8_prefix_len(title, strlen(title), TITLE_CHARS))
                               : strndup(name, dot ? (size_t)(dot - name) : strlen(name));
    struct text_chunk *v = NULL;
    int rc = OK, n = text_split_chunks(text, len, s->chars, &v);
    for (char *p = chunk_title; *p; p++)
        if ((uint8_t)*p < ' ') *p = ' ';
    for (int i = 0; i < n && rc == OK; i++) {
        char *content = strndup(text + v[i].begin, v[i].end - v[i].begin);
        rc = chunk_add(s->k, s->id, s->chunks++, chunk_title, content, err);
        free(content);
    }
    s->documents++;
    free(v);
    free(chunk_title);
    return rc;
}

/* A string member of a JSON line; NULL when it is absent or no string, or contains a zero byte. */
static const char *json_line_text(const json_t *v, const char *key) {
    const json_t *text = json_object_get(v, key);
    const char *s = json_string_value(text);
    return s && strlen(s) == json_string_length(text) ? s : NULL;
}

static int json_line_add(void *ctx, const json_t *v, int line, struct error *err) {
    const char *title = json_line_text(v, "title"), *text = json_line_text(v, "content");
    if (!text) text = json_line_text(v, "text");
    if (!text || (json_object_get(v, "title") && !title))
        return error_set(err, ERR_FORMAT,
                         "line %d: expected {\"title\": …, \"content\": …} or {\"text\": …}", line);
    return document_add(ctx, title ? title : "", text, strlen(text), err);
}

/* File types by the suffix of the name. `read` is NULL for JSON lines. */
static const struct document_kind {
    const char *end;
    int (*read)(const char *doc, size_t len, struct buf *title, struct buf *text,
                struct error *err);
} kinds[] = {{".txt", document_read_text},
             {".text", document_read_text},
             {".md", document_read_markdown},
             {".markdown", document_read_markdown},
             {".html", document_read_html},
             {".htm", document_read_html},
             {".jsonl", NULL}};

static const struct document_kind *kind_of(const char *path) {
    size_t len = strlen(path);
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++) {
        size_t n = strlen(kinds[i].end);
        if (len > n && strcasecmp(path + len - n, kinds[i].end) == 0) return &kinds[i];
    }
    return NULL;
}

/* Adds the documents of a file: one per line for .jsonl, else one. */
static int documents_add(struct source_file *s, const struct buf *file, struct error *err) {
    const struct document_kind *document_kind = kind_of(s->path);
    if (!document_kind->read) return json_file_each(s->path, json_line_add, s, err);
    struct buf title = {0}, text = {0};
    buf_puts(&title, "");
    buf_puts(&text, "");
    int rc = document_kind->read(file->data ? file->data : "", file->len, &title, &text, err);
    if (rc == OK) rc = document_add(s, title.data, text.data, text.len, err);
    buf_release(&title);
    buf_release(&text);
    return rc;
}

/* files */

static int file_insert(struct source_file *s, const struct buf *file, const char *hash,
                       struct error *err) {
    sqlite3_stmt *q = statement(s->k, FILE_PUT, err);
    if (!q) return err->code;
    bind_text(q, 1, s->path);
    bind_text(q, 2, hash);
    sqlite3_bind_int(q, 3, s->chars);
    int rc = statement_run(s->k, q, err);
    s->id = sqlite3_last_insert_rowid(s->k->db);
    if (rc == OK) rc = documents_add(s, file, err);
    q = rc == OK ? statement(s->k, FILE_DOCUMENTS, err) : NULL;
    if (!q) return err->code;
    sqlite3_bind_int64(q, 1, s->id);
    sqlite3_bind_int(q, 2, s->documents);
    return statement_run(s->k, q, err);
}

/* Looks up the file: *id is 0 if it is unknown; *unchanged: content and chunk size are the same. */
static int file_look_up(struct source_file *s, const char *hash, int64_t *id, bool *unchanged,
                        struct error *err) {
    sqlite3_stmt *q = statement(s->k, FILE_GET, err);
    if (!q) return err->code;
    bind_text(q, 1, s->path);
    int step = sqlite3_step(q);
    *id = step == SQLITE_ROW ? sqlite3_column_int64(q, 0) : 0;
    *unchanged =
        *id && strcmp(column_text(q, 1), hash) == 0 && sqlite3_column_int(q, 2) == s->chars;
    return statement_end(s->k, q, step == SQLITE_ROW ? SQLITE_DONE : step, err);
}

static int file_replace(struct source_file *s, const struct buf *file, struct knowledge_report *out,
                        struct error *err) {
    char hash[HASH_LEN];
    int64_t id = 0;
    bool unchanged = false;
    sha256_bytes(file->data ? file->data : "", file->len, hash);
    int rc = file_look_up(s, hash, &id, &unchanged, err);
    if (rc == OK && unchanged) out->unchanged++;
    if (rc != OK || unchanged) return rc;
    if (id) rc = file_delete(s->k, id, err);
    if (rc == OK) rc = file_insert(s, file, hash, err);
    if (rc == OK) *(id ? &out->changed : &out->added) += 1;
    return rc;
}

/* Adds one file in a savepoint, so that it is added completely or not at all. *file_error is true
 * if the error is in the file, not in the database. */
static int file_add(struct knowledge *k, const char *path, int chars, struct knowledge_report *out,
                    bool *file_error, struct error *err) {
    struct source_file s = {.k = k, .path = path, .chars = chars};
    struct buf file = {0};
    int rc = file_read(path, FILE_LIMIT, &file, err);
    *file_error = rc != OK;
    if (rc == OK) rc = db_exec(k, "SAVEPOINT file", err);
    if (rc == OK) {
        rc = file_replace(&s, &file, out, err);
        *file_error = rc == ERR_FORMAT;
        if (rc != OK)
            sqlite3_exec(k->db, "ROLLBACK TO file; RELEASE file", NULL, NULL, NULL);
        else
            rc = db_exec(k, "RELEASE file", err);
    }
    buf_release(&file);
    if (rc != OK && !strstr(err->text, path)) error_wrap(err, "'%s'", path);
    return rc;
}

/* Files of a folder */

static int name_compare(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int folder_names(const char *path, struct strings *out, struct error *err) {
    DIR *d = opendir(path);
    if (!d) return error_errno(err, "cannot read folder '%s'", path);
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.') strings_add(out, e->d_name);
    closedir(d);
    if (out->n) qsort(out->v, (size_t)out->n, sizeof *out->v, name_compare);
    return OK;
}

/* Adds the files of known types in a folder and its folders to `files`; counts the others. */
static int folder_walk(const char *path, int depth, struct strings *files, int *skipped,
                       struct error *err) {
    struct strings names = {0};
    int rc = depth < DEPTH_LIMIT
                 ? folder_names(path, &names, err)
                 : error_set(err, ERR_USAGE, "'%s' is deeper than %d folders", path, DEPTH_LIMIT);
    for (int i = 0; i < names.n && rc == OK; i++) {
        char *child = path_join(path, names.v[i]);
        struct stat st;
        bool exists = lstat(child, &st) == 0;
        if (exists && S_ISDIR(st.st_mode))
            rc = folder_walk(child, depth + 1, files, skipped, err);
        else if (exists && S_ISREG(st.st_mode) && kind_of(child))
            strings_add(files, child);
        else
            ++*skipped;
        free(child);
    }
    strings_release(&names);
    return rc;
}

/* Removes from the database the file `path` and all files below `path`, except those in `files`
 * (may be NULL). */
static int files_prune(struct knowledge *k, const char *path, const struct strings *files,
                       struct knowledge_report *out, struct error *err) {
    sqlite3_stmt *q = statement(k, FILE_PATHS, err);
    int64_t *removed_ids = NULL;
    int n = 0, step;
    if (!q) return err->code;
    bind_text(q, 1, path);
    while ((step = sqlite3_step(q)) == SQLITE_ROW) {
        const char *name = column_text(q, 1);
        if (files && files->n &&
            bsearch(&name, files->v, (size_t)files->n, sizeof *files->v, name_compare))
            continue;
        removed_ids = xrealloc(removed_ids, sizeof *removed_ids * (size_t)(n + 1));
        removed_ids[n++] = sqlite3_column_int64(q, 0);
    }
    int rc = statement_end(k, q, step, err);
    for (int i = 0; i < n && rc == OK; i++) rc = file_delete(k, removed_ids[i], err);
    out->removed += n;
    free(removed_ids);
    return rc;
}

static int totals_read(struct knowledge *k, struct knowledge_report *out, struct error *err) {
    sqlite3_stmt *q = statement(k, TOTALS, err);
    if (!q) return err->code;
    int step = sqlite3_step(q);
    out->documents = sqlite3_column_int(q, 0);
    out->chunks = sqlite3_column_int(q, 1);
    return statement_end(k, q, step == SQLITE_ROW ? SQLITE_DONE : step, err);
}

/* Adds the files. If they are those of a folder, files with errors are skipped with a warning; else
 * an error is returned. */
static int files_add(struct knowledge *k, const struct strings *files, bool folder, int chars,
                     struct knowledge_report *out, struct error *err) {
    for (int i = 0; i < files->n; i++) {
        bool file_error;
        int rc = file_add(k, files->v[i], chars, out, &file_error, err);
        if (rc != OK && !(folder && file_error)) return rc;
        if (rc == OK) continue;
        log_warn("%s", err->text);
        out->refused++;
    }
    return OK;
}

static int files_find(const char *path, struct strings *files, bool *folder,
                      struct knowledge_report *out, struct error *err) {
    *folder = path_is_dir(path);
    if (*folder) {
        int rc = folder_walk(path, 0, files, &out->skipped, err);
        if (files->n) qsort(files->v, (size_t)files->n, sizeof *files->v, name_compare);
        return rc;
    }
    strings_add(files, path);
    return kind_of(path)
               ? OK
               : error_set(err, ERR_USAGE, "'%s' is not a .txt, .md, .html or .jsonl file", path);
}

/* Commits if rc is OK, else rolls back. */
static int transaction_end(struct knowledge *k, int rc, struct error *err) {
    if (rc == OK) rc = db_exec(k, "COMMIT", err);
    if (rc != OK) sqlite3_exec(k->db, "ROLLBACK", NULL, NULL, NULL);
    return rc;
}

static int database_update(struct knowledge *k, const char *path, const struct strings *files,
                           bool folder, int chars, struct knowledge_report *out,
                           struct error *err) {
    int rc = db_exec(k, "BEGIN IMMEDIATE", err);
    if (rc != OK) return rc;
    if (files) rc = files_add(k, files, folder, chars, out, err);
    if (rc == OK && (folder || !files)) rc = files_prune(k, path, files, out, err);
    sqlite3_stmt *q = rc == OK ? statement(k, EMBED_PRUNE, err) : NULL;
    if (rc == OK) rc = q ? statement_run(k, q, err) : err->code;
    if (rc == OK) rc = totals_read(k, out, err);
    return transaction_end(k, rc, err);
}

/* embeddings */

/* A batch of texts of chunks that have no embedding. */
struct missing_vectors {
    char *hashes[EMBED_BATCH], *texts[EMBED_BATCH];
    int n;
};

static int missing_vectors_read(struct knowledge *k, const char *model, struct missing_vectors *m,
                                struct error *err) {
    sqlite3_stmt *q = statement(k, EMBED_MISSING, err);
    int step;
    if (!q) return err->code;
    bind_text(q, 1, model);
    sqlite3_bind_int(q, 2, EMBED_BATCH);
    while ((step = sqlite3_step(q)) == SQLITE_ROW) {
        m->hashes[m->n] = xstrdup(column_text(q, 0));
        m->texts[m->n++] = indexed_text(column_text(q, 1), column_text(q, 2));
    }
    return statement_end(k, q, step, err);
}

static int vector_insert(struct knowledge *k, const char *hash, const struct embedder *e,
                         const float *v, struct error *err) {
    size_t bytes = sizeof *v * (size_t)e->d;
    for (int32_t i = 0; i < e->d; i++)
        if (!isfinite(v[i]))
            return error_set(err, ERR_NUMERIC, "an embedding has a value that is not a number");
    sqlite3_stmt *q = statement(k, EMBED_PUT, err);
    if (!q) return err->code;
    bind_text(q, 1, hash);
    bind_text(q, 2, e->model_hash);
    sqlite3_bind_blob(q, 3, memcpy(xmalloc(bytes), v, bytes), (int)bytes, free);
    return statement_run(k, q, err);
}

static int batch_embed(struct knowledge *k, const struct embedder *e, struct missing_vectors *m,
                       struct error *err) {
    float *v = xcalloc((size_t)m->n * (size_t)e->d, sizeof *v);
    int rc = e->embed(e->ctx, (const char *const *)m->texts, m->n, v, err);
    if (rc == OK) rc = db_exec(k, "BEGIN IMMEDIATE", err);
    if (rc == OK) {
        for (int i = 0; i < m->n && rc == OK; i++)
            rc = vector_insert(k, m->hashes[i], e, v + (int64_t)i * e->d, err);
        rc = transaction_end(k, rc, err);
    }
    free(v);
    return rc;
}

static int missing_vectors_count(struct knowledge *k, const char *model, int64_t *n,
                                 struct error *err) {
    sqlite3_stmt *q = statement(k, EMBED_COUNT, err);
    if (!q) return err->code;
    bind_text(q, 1, model);
    int step = sqlite3_step(q);
    *n = sqlite3_column_int64(q, 0);
    return statement_end(k, q, step == SQLITE_ROW ? SQLITE_DONE : step, err);
}

/* Computes all missing embeddings. Each batch is committed, so that an interruption loses at most
 * one batch. */
static int missing_vectors_embed(struct knowledge *k, const struct embedder *e, struct progress *p,
                                 int *embedded, struct error *err) {
    int64_t total = 0;
    int rc = missing_vectors_count(k, e->model_hash, &total, err);
    if (rc == OK && p && total) progress_start(p, "embedding", total);
    for (int n = 1; rc == OK && n > 0;) {
        struct missing_vectors m = {.n = 0};
        rc = missing_vectors_read(k, e->model_hash, &m, err);
        if (rc == OK && m.n) rc = batch_embed(k, e, &m, err);
        n = m.n;
        if (rc == OK) *embedded += n;
        if (rc == OK && p && n) progress_update(p, *embedded, NULL);
        for (int i = 0; i < n; i++) {
            free(m.hashes[i]);
            free(m.texts[i]);
        }
    }
    if (p && total) progress_finish(p, NULL);
    return rc;
}

int knowledge_add(struct knowledge *k, const char *path, const struct knowledge_options *o,
                  struct knowledge_report *out, struct error *err) {
    struct strings files = {0};
    bool folder = false;
    *out = (struct knowledge_report){0};
    char *real = realpath(path, NULL);
    int rc = real ? files_find(real, &files, &folder, out, err)
                  : error_errno(err, "cannot read '%s'", path);
    if (rc == OK)
        rc = database_update(k, real, &files, folder, o->chunk_chars ? o->chunk_chars : CHUNK_CHARS,
                             out, err);
    if (rc == OK && o->embedder)
        rc = missing_vectors_embed(k, o->embedder, o->progress, &out->embedded, err);
    strings_release(&files);
    free(real);
    return rc;
}

/* A path that no longer exists is looked up as it is given. */
int knowledge_remove(struct knowledge *k, const char *path, struct knowledge_report *out,
                     struct error *err) {
    *out = (struct knowledge_report){0};
    char *real = realpath(path, NULL);
    int rc = database_update(k, real ? real : path, NULL, false, 0, out, err);
    if (rc == OK && out->removed == 0)
        rc = error_set(err, ERR_MISSING, "nothing of '%s' is in '%s'", real ? real : path, k->path);
    free(real);
    return rc;
}

json_t *knowledge_list(struct knowledge *k, struct error *err) {
    sqlite3_stmt *q = statement(k, FILE_LIST, err);
    if (!q) return NULL;
    json_t *list = json_array();
    int step;
    while ((step = sqlite3_step(q)) == SQLITE_ROW)
        json_array_append_new(list,
                              json_pack("{s:s,s:s,s:i,s:i}", "source", column_text(q, 0), "hash",
                                        column_text(q, 1), "documents", sqlite3_column_int(q, 2),
                                        "chunks", sqlite3_column_int(q, 3)));
    if (statement_end(k, q, step, err) == OK) return list;
    json_decref(list);
    return NULL;
}

/* search */

/* The scores of a chunk. `terms` is its number of terms, `place` its rank by source and position.
 * hits_collect sorts the candidates, which are in order of id, by score. */
struct candidate {
    int64_t id;
    int32_t terms, place;
    double bm25, words, cosine, score;
};
struct search {
    struct knowledge *k;
    const struct knowledge_query *q;
    struct candidate *v; /* [n] */
    int64_t n;
    double average; /* mean number of terms per chunk */
};

static int candidate_compare_id(const void *a, const void *b) {
    int64_t x = ((const struct candidate *)a)->id, y = ((const struct candidate *)b)->id;
    return (x > y) - (x < y);
}

static int candidate_compare_score(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    if (x->bm25 != y->bm25) return x->bm25 > y->bm25 ? -1 : 1;
    return (x->place > y->place) - (x->place < y->place);
}

static int candidates_read(struct search *s, struct error *err) {
    sqlite3_stmt *q = statement(s->k, CHUNK_ORDER, err);
    int64_t terms = 0, cap = 0;
    int step;
    if (!q) return err->code;
    while ((step = sqlite3_step(q)) == SQLITE_ROW) {
        if (s->n == cap) s->v = xrealloc(s->v, sizeof *s->v * (size_t)(cap = MAX(2 * cap, 64)));
        s->v[s->n] = (struct candidate){.id = sqlite3_column_int64(q, 0),
                                        .terms = sqlite3_column_int(q, 1),
                                        .place = (int32_t)s->n};
        terms += s->v[s->n++].terms;
    }
    if (s->n) qsort(s->v, (size_t)s->n, sizeof *s->v, candidate_compare_id);
    s->average = s->n ? MAX((double)terms / (double)s->n, 1) : 1;
    return statement_end(s->k, q, step, err);
}

static struct candidate *candidate_find(const struct search *s, int64_t id) {
    struct candidate key = {.id = id};
    return s->n ? bsearch(&key, s->v, (size_t)s->n, sizeof *s->v, candidate_compare_id) : NULL;
}

/* Adds a term's score to every chunk that contains it, and the score of one occurrence in a chunk
 * of average length to *max_score. Reads the postings twice, because the IDF depends on their
 * number. */
static int bm25_add_term(struct search *s, const struct query_term *t, double *max_score,
                         struct error *err) {
    sqlite3_stmt *q = statement(s->k, POSTINGS, err);
    char *last = xasprintf("%s%s", t->text, t->prefix ? "\xF4\x8F\xBF\xBF" : "");
    int64_t df = 0;
    int step;
    if (q) bind_text(q, 1, t->text);
    if (q) bind_text(q, 2, last);
    free(last);
    if (!q) return err->code;
    while ((step = sqlite3_step(q)) == SQLITE_ROW) df++;
    if (step != SQLITE_DONE) return statement_end(s->k, q, step, err);
    sqlite3_reset(q);
    double idf = bm25_idf((double)s->n, (double)df);
    *max_score += t->weight * idf;
    while ((step = sqlite3_step(q)) == SQLITE_ROW) {
        struct candidate *c = candidate_find(s, sqlite3_column_int64(q, 0));
        if (c)
            c->bm25 += t->weight * idf *
                       bm25_term_weight(sqlite3_column_double(q, 1), c->terms, s->average);
    }
    return statement_end(s->k, q, step, err);
}

static int bm25_score(struct search *s, struct error *err) {
    struct query_term terms[QUERY_TERMS];
    double max_score = 0;
    int n = terms_query(s->q->text, terms, err), rc = MIN(n, 0);
    for (int i = 0; i < n && rc == OK; i++) rc = bm25_add_term(s, &terms[i], &max_score, err);
    for (int64_t i = 0; i < s->n && max_score > 0; i++)
        s->v[i].words = MIN(s->v[i].bm25 / max_score, 1);
    return rc;
}

/* Computes missing embeddings, and the cosine of each chunk's embedding with the query's. */
static int cosine_score(struct search *s, const struct embedder *e, struct error *err) {
    float *query = xcalloc((size_t)e->d, sizeof *query), *v = xcalloc((size_t)e->d, sizeof *v);
    size_t bytes = sizeof *v * (size_t)e->d;
    int embedded = 0, step = SQLITE_DONE, rc = missing_vectors_embed(s->k, e, NULL, &embedded, err);
    if (rc == OK) rc = e->embed(e->ctx, &s->q->text, 1, query, err);
    sqlite3_stmt *q = rc == OK ? statement(s->k, EMBED_LIST, err) : NULL;
    if (q) bind_text(q, 1, e->model_hash);
    while (q && (step = sqlite3_step(q)) == SQLITE_ROW) {
        struct candidate *c = candidate_find(s, sqlite3_column_int64(q, 0));
        if (!c || (size_t)sqlite3_column_bytes(q, 1) != bytes) continue;
        memcpy(v, sqlite3_column_blob(q, 1), bytes);
        c->cosine = cosine_similarity(query, v, e->d);
    }
    free(query);
    free(v);
    return q ? statement_end(s->k, q, step, err) : err->code;
}

static int hit_add(struct search *s, const struct candidate *c, json_t *out, struct error *err) {
    sqlite3_stmt *q = statement(s->k, CHUNK_GET, err);
    if (!q) return err->code;
    sqlite3_bind_int64(q, 1, c->id);
    int step = sqlite3_step(q);
    if (step == SQLITE_ROW) {
        json_t *hit = json_pack("{s:I,s:s,s:s,s:s,s:f,s:f}", "id", (json_int_t)c->id, "title",
                                column_text(q, 0), "source", column_text(q, 1), "content",
                                column_text(q, 2), "score", c->score, "words", c->words);
        if (hit && s->q->embedder) json_object_set_new(hit, "cosine", json_real(c->cosine));
        if (hit) json_array_append_new(out, hit);
    }
    return statement_end(s->k, q, step == SQLITE_ROW ? SQLITE_DONE : step, err);
}

static int hits_collect(struct search *s, json_t *out, struct error *err) {
    const struct knowledge_query *q = s->q;
    double mix = !q->embedder || q->mix < 0 ? 0 : q->mix > 0 ? MIN(q->mix, 1) : 0.5;
    double threshold = q->threshold == 0 ? 0.5 : q->threshold;
    int top = q->top ? q->top : 5, rc = OK;
    for (int64_t i = 0; i < s->n; i++)
        s->v[i].score = (1 - mix) * s->v[i].words + mix * MAX(s->v[i].cosine, 0);
    if (s->n) qsort(s->v, (size_t)s->n, sizeof *s->v, candidate_compare_score);
    for (int64_t i = 0; i < MIN(s->n, top) && rc == OK && s->v[i].score >= threshold; i++)
        rc = hit_add(s, &s->v[i], out, err);
    return rc;
}

static int query_check(const struct knowledge_query *q, struct error *err) {
    size_t len = strlen(q->text);
    if (len > QUERY_LIMIT)
        return error_set(err, ERR_USAGE, "a query of %zu bytes is too long: at most %d", len,
                         QUERY_LIMIT);
    return u8_check((const uint8_t *)q->text, len)
               ? error_set(err, ERR_USAGE, "the query is not UTF-8 text")
               : OK;
}

json_t *knowledge_search(struct knowledge *k, const struct knowledge_query *q, struct error *err) {
    struct search s = {.k = k, .q = q};
    json_t *out = json_array();
    int rc = query_check(q, err);
    if (rc == OK) rc = candidates_read(&s, err);
    if (rc == OK) rc = bm25_score(&s, err);
    if (rc == OK && q->embedder) rc = cosine_score(&s, q->embedder, err);
    if (rc == OK) rc = hits_collect(&s, out, err);
    free(s.v);
    if (rc == OK) return out;
    json_decref(out);
    return NULL;
}

void knowledge_snippets(const json_t *hits, int chars, struct buf *out) {
    size_t i;
    const json_t *hit;
    json_array_foreach (hits, i, hit) {
        const char *content = json_string_value(json_object_get(hit, "content"));
        size_t len = strlen(content), n = utf8_prefix_len(content, len, (size_t)chars);
        buf_printf(out, "【%s】 ", json_string_value(json_object_get(hit, "title")));
        for (size_t pos = 0; pos < n; pos++)
            buf_add(out, content[pos] == '\n' ? " " : content + pos, 1);
        buf_puts(out, n < len ? "…\n" : "\n");
    }
}
