/*
 * tensorboard: the figures of a training run as event files, which TensorBoard shows as curves.
 *
 * A file is a sequence of records in TFRecord framing (tensorflow/core/lib/io/record_writer.h),
 * all numbers little endian:
 *
 *     uint64 n | uint32 mask(crc32c(the 8 bytes of n)) | n bytes | uint32 mask(crc32c(the n bytes))
 *
 * with mask(c) = rotate_right(c, 15) + 0xa282ead8. The n bytes are a protobuf message Event
 * (tensorflow/core/util/event.proto, framework/summary.proto) with these fields, in this order:
 *
 *     Event       1 double wall_time   2 int64 step   3 string file_version, in the first record
 *                 5 Summary summary    7 SessionLog session_log
 *     Summary     1 repeated Value     SessionLog     1 enum status; 1 is START
 *     Value       1 string tag         2 float simple_value
 *
 * A tag is the path of a number in the log's line: "loss", "adapters/NAME/reward".
 *
 * Each process of a run makes its own file, because a running TensorBoard continues to read an old
 * one at its position. A resumed run cuts the steps after its checkpoint from the earlier files, so
 * that all files together have each step once. The record START tells a TensorBoard that has read
 * these steps to discard them.
 */
#define _GNU_SOURCE
#include "train/train_loop.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EVENT_FILE_PREFIX "events.out.tfevents."
#define EVENT_FILE_SUFFIX ".shoal"

/* types of protobuf fields, the lower three bits of a key */
enum { WIRE_VARINT = 0, WIRE_FIXED64 = 1, WIRE_BYTES = 2, WIRE_FIXED32 = 5 };
enum { LENGTH_BYTES = 8, CRC_BYTES = 4, HEADER_BYTES = LENGTH_BYTES + CRC_BYTES };

struct event_file {
    char *path;
    FILE *f;
};

static uint32_t masked_crc32c(const void *p, size_t n) {
    uint32_t crc = UINT32_MAX;
    for (const uint8_t *b = p; n > 0; n--, b++) {
        crc ^= *b;
        for (int k = 0; k < 8; k++) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    crc = ~crc;
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

/* encoding */

static void put_little_endian(struct buf *b, uint64_t v, int n_bytes) {
    for (int i = 0; i < n_bytes; i++) buf_add(b, &(uint8_t){(uint8_t)(v >> (8 * i))}, 1);
}

static void put_varint(struct buf *b, uint64_t v) {
    for (; v >= 0x80; v >>= 7) buf_add(b, &(uint8_t){(uint8_t)(v | 0x80)}, 1);
    buf_add(b, &(uint8_t){(uint8_t)v}, 1);
}

static void put_key(struct buf *b, int field, int wire_type) {
    put_varint(b, (uint64_t)(field << 3 | wire_type));
}

static void put_bytes(struct buf *b, int field, const void *p, size_t n) {
    put_key(b, field, WIRE_BYTES);
    put_varint(b, n);
    if (n > 0) buf_add(b, p, n);
}

static void event_begin(struct buf *b, int64_t step) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    uint64_t bits;
    memcpy(&bits, &seconds, sizeof bits);
    put_key(b, 1, WIRE_FIXED64);
    put_little_endian(b, bits, 8);
    put_key(b, 2, WIRE_VARINT);
    put_varint(b, (uint64_t)step);
}

static void summary_add(struct buf *summary, const char *tag, float number) {
    struct buf value = {0};
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    put_bytes(&value, 1, tag, strlen(tag));
    put_key(&value, 2, WIRE_FIXED32);
    put_little_endian(&value, bits, 4);
    put_bytes(summary, 1, value.data, value.len);
    buf_release(&value);
}

/* Adds all numbers of an object, with those of its objects under "NAME/". */
static void summary_add_object(struct buf *summary, const char *prefix, const json_t *object) {
    const char *key;
    json_t *v;
    json_object_foreach ((json_t *)(uintptr_t)object, key, v) {
        char *tag = xasprintf("%s%s%s", prefix, key, json_is_object(v) ? "/" : "");
        if (json_is_object(v)) summary_add_object(summary, tag, v);
        if (json_is_number(v)) summary_add(summary, tag, (float)json_number_value(v));
        free(tag);
    }
}

static int record_write(struct event_file *e, const struct buf *event, struct error *err) {
    struct buf b = {0};
    put_little_endian(&b, event->len, LENGTH_BYTES);
    put_little_endian(&b, masked_crc32c(b.data, LENGTH_BYTES), CRC_BYTES);
    buf_add(&b, event->data, event->len);
    put_little_endian(&b, masked_crc32c(event->data, event->len), CRC_BYTES);
    bool written = fwrite(b.data, 1, b.len, e->f) == b.len && fflush(e->f) == 0;
    buf_release(&b);
    return written ? OK : error_errno(err, "cannot write '%s'", e->path);
}

/* the files of earlier processes */

static uint64_t get_little_endian(const uint8_t *p, int n_bytes) {
    uint64_t v = 0;
    for (int i = 0; i < n_bytes; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

/* The step of an event that event_begin began; -1 if it is damaged. */
static int64_t event_step(const uint8_t *event, size_t n) {
    enum { STEP_AT = 1 + 8 + 1 }; /* key and wall_time, key */
    uint64_t v = 0;
    if (n < STEP_AT || event[STEP_AT - 1] != (2 << 3 | WIRE_VARINT)) return -1;
    for (size_t i = 0; STEP_AT + i < n && i < 9; i++) {
        v |= (uint64_t)(event[STEP_AT + i] & 0x7f) << (7 * i);
        if (!(event[STEP_AT + i] & 0x80)) return (int64_t)v;
    }
    return -1;
}

/* The length of the record at the beginning of n bytes, of which *step becomes the step; 0 if it is
 * incomplete or damaged. */
static size_t record_read(const uint8_t *p, size_t n, int64_t *step) {
    if (n < HEADER_BYTES + CRC_BYTES) return 0;
    uint64_t len = get_little_endian(p, LENGTH_BYTES);
    if (get_little_endian(p + LENGTH_BYTES, CRC_BYTES) != masked_crc32c(p, LENGTH_BYTES) ||
        len > n - HEADER_BYTES - CRC_BYTES)
        return 0;
    const uint8_t *event = p + HEADER_BYTES;
    if (get_little_endian(event + len, CRC_BYTES) != masked_crc32c(event, len)) return 0;
    *step = event_step(event, len);
    return *step < 0 ? 0 : HEADER_BYTES + len + CRC_BYTES;
}

/* Cuts a file before its first record of a step after `done`; deletes it if only the record of the
 * version would be left. */
static int file_cut(const char *path, int64_t done, struct error *err) {
    struct buf b = {0};
    int rc = file_read(path, (size_t)1 << 31, &b, err), n = 0;
    size_t kept = 0, len;
    int64_t step;
    while (rc == OK &&
           (len = record_read((const uint8_t *)b.data + kept, b.len - kept, &step)) > 0 &&
           step <= done) {
        kept += len;
        n++;
    }
    if (rc == OK && (n > 1 ? kept < b.len && truncate(path, (off_t)kept) != 0 : unlink(path) != 0))
        rc = error_errno(err, "cannot shorten '%s'", path);
    buf_release(&b);
    return rc;
}

static bool is_event_file(const char *name) {
    const size_t prefix = strlen(EVENT_FILE_PREFIX), suffix = strlen(EVENT_FILE_SUFFIX),
                 n = strlen(name);
    return n > prefix + suffix && strncmp(name, EVENT_FILE_PREFIX, prefix) == 0 &&
           strcmp(name + n - suffix, EVENT_FILE_SUFFIX) == 0;
}

static int earlier_files_cut(const char *dir, int64_t done, struct error *err) {
    DIR *d = opendir(dir);
    int rc = d ? OK : error_errno(err, "cannot read '%s'", dir);
    for (const struct dirent *f; rc == OK && (f = readdir(d));) {
        if (!is_event_file(f->d_name)) continue;
        char *path = path_join(dir, f->d_name);
        rc = file_cut(path, done, err);
        free(path);
    }
    if (d) closedir(d);
    return rc;
}

/* the file of this process */

/* Makes a file whose name has the time, because TensorBoard reads the files in the order of their
 * names. */
static int file_create(struct event_file *e, const char *dir, struct error *err) {
    for (int64_t seconds = (int64_t)time(NULL); !e->f; seconds++) {
        char *name = xasprintf(EVENT_FILE_PREFIX "%010lld" EVENT_FILE_SUFFIX, (long long)seconds);
        free(e->path);
        e->path = path_join(dir, name);
        free(name);
        if (!(e->f = fopen(e->path, "wx")) && errno != EEXIST)
            return error_errno(err, "cannot write '%s'", e->path);
    }
    return OK;
}

/* Writes the records of the version and of START. */
static int head_write(struct event_file *e, int64_t done, struct error *err) {
    static const char version[] = "brain.Event:2";
    struct buf event = {0}, session = {0};
    event_begin(&event, 0);
    put_bytes(&event, 3, version, strlen(version));
    int rc = record_write(e, &event, err);
    event.len = 0;
    event_begin(&event, done + 1);
    put_key(&session, 1, WIRE_VARINT);
    put_varint(&session, 1);
    put_bytes(&event, 7, session.data, session.len);
    if (rc == OK) rc = record_write(e, &event, err);
    buf_release(&session);
    buf_release(&event);
    return rc;
}

struct event_file *event_file_open(const char *dir, int64_t done, struct error *err) {
    struct event_file *e = xcalloc(1, sizeof *e);
    int rc = earlier_files_cut(dir, done, err);
    if (rc == OK) rc = file_create(e, dir, err);
    if (rc == OK) rc = head_write(e, done, err);
    if (rc == OK) return e;
    event_file_close(e);
    return NULL;
}

int event_file_add(struct event_file *e, int64_t step, const json_t *figures, struct error *err) {
    struct buf event = {0}, summary = {0};
    summary_add_object(&summary, "", figures);
    event_begin(&event, step);
    put_bytes(&event, 5, summary.data, summary.len);
    int rc = record_write(e, &event, err);
    buf_release(&summary);
    buf_release(&event);
    return rc;
}

void event_file_close(struct event_file *e) {
    if (!e) return;
    if (e->f) fclose(e->f);
    free(e->path);
    free(e);
}
